"""vLLM's own OpenAI server on this machine, and the small model that it serves.

Keeps true
- The server is `python -m vllm.entrypoints.openai.api_server`, unmodified; an arm adds flags and environment variables.
- No process outlives the benchmark: the server has its own process group, which is stopped as a whole.
- A server that does not start, or dies, is a ServerError with the last line of its log.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from rose.schemas.errors import RoseError
from rose.topics.local_broker import free_ports
from rose.workers.lender.admission import Promise
from rose.workers.lender.config import LendConfig
from rose.workers.lender.vllm import SETTING

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # with `uni` the model computes in the engine-core process, as on one GPU
}

MODEL_NAME = "serving"
VOCABULARY = 99
LONGEST_TOKENS = 2048
MAX_RUNNING = 32
"""Most requests in a batch: a client with this many requests in flight keeps the engine full."""

FLAGS = {
    "--host": "127.0.0.1",
    "--served-model-name": MODEL_NAME,
    "--dtype": "float32",
    "--block-size": "32",
    "--kv-cache-memory-bytes": str(384 << 20),
    "--max-model-len": str(LONGEST_TOKENS),
    "--max-num-seqs": str(MAX_RUNNING),
    "--max-num-batched-tokens": "512",
    "--distributed-executor-backend": "uni",  # a separate worker would spin on a core while it waits
}
SWITCHES = ("--enforce-eager", "--enable-prompt-tokens-details", "--enable-per-request-metrics")
"""Flags of the server. The last two report for each request the cached prompt tokens and the time in the queue."""

GUEST_TOKENS = 1024
"""Most tokens of a guest's turn."""

HOUR_SECONDS = 3600.0

READY_SECONDS, STOP_SECONDS, ANSWER_SECONDS = 600.0, 30.0, 30.0
LOOK_SECONDS = 0.5
"""Time between two looks at a starting server: the server does not report that it is ready."""

COUNTERS = (
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:num_preemptions",
)


class ServerError(RoseError):
    """The server does not start, has ended or does not answer."""


SERVED = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 32}
"""Sizes of serving's model, a Qwen3 with 0.4M parameters."""

LENT = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "head_dim": 128}
"""Sizes of the guest's model, with 19M parameters: one of its steps takes as long as several steps of serving."""


def make_model(folder: Path, sizes: Mapping[str, int]) -> Path:
    """Write a Qwen3 with random weights and the demo's tokenizer; return its folder."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        num_attention_heads=4,
        num_key_value_heads=2,
        **sizes,
        max_position_embeddings=LONGEST_TOKENS,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    with as_file(files("rose.workers") / "models" / "calculator") as calculator:
        AutoTokenizer.from_pretrained(calculator, trust_remote_code=False).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Lends:
    """Lending settings of a server."""

    dial: float
    promises: bool = True
    """Whether the run's budgets and the yield bound restrict the guest."""


@dataclass(frozen=True)
class Launch:
    """Additional flags and environment of a server; arms with equal launches share a server."""

    flags: tuple[str, ...] = ()
    lends: Lends | None = None


def lending(lends: Lends, model: Path, socket: Path, *, ttft: float, tpot: float) -> LendConfig:
    """Return the lending configuration with these budgets, in seconds, or without budgets if `lends` has no latency
    targets.
    """
    promise = Promise(dial=lends.dial, ttft_seconds=ttft, tpot_seconds=tpot)
    unbounded = Promise(dial=lends.dial, ttft_seconds=HOUR_SECONDS, tpot_seconds=HOUR_SECONDS, yield_seconds=1.0)
    return LendConfig(
        model_folder=str(model),
        socket=str(socket),
        max_turns=MAX_RUNNING,
        max_model_len=GUEST_TOKENS,
        kv_cache_bytes=160 << 20,
        step_tokens=512,
        promise=promise if lends.promises else unbounded,
    )


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    lends_at: Path | None = None
    """Socket of its guest."""
    lent: Path | None = None
    """The guest's model folder."""

    def check(self) -> None:
        """Raise ServerError if the server has ended."""
        if self.process.poll() is not None:
            raise ServerError(f"the server ended with status {self.process.returncode}: {last_line(self.log)}")

    def counters(self) -> dict[str, float]:
        """Return the present values of COUNTERS from its /metrics. Raises ServerError."""
        self.check()
        try:
            with urlopen(f"{self.url}/metrics", timeout=ANSWER_SECONDS) as answer:
                text = answer.read().decode()
        except (URLError, TimeoutError) as error:
            raise ServerError(f"the server's /metrics does not answer: {error}") from error
        found = dict.fromkeys(COUNTERS, 0.0)
        for family in text_string_to_metric_families(text):
            if family.name in found:
                found[family.name] = sum(each.value for each in family.samples if each.name.endswith("_total"))
        return found


@contextlib.contextmanager
def serve(launch: Launch, model: Path, log: Path, lending: LendConfig | None = None) -> Iterator[Server]:
    """Yield a ready server, and stop it afterwards.

    `lending`: configuration of a lending server. Raises ServerError.
    """
    [port] = free_ports(1)
    flags = [part for pair in FLAGS.items() for part in pair]
    environment = os.environ | ENVIRONMENT
    if lending is not None:
        environment[SETTING] = str(log.with_suffix(".json"))
        log.with_suffix(".json").write_bytes(msgspec.json.encode(lending))
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *flags, *SWITCHES, *launch.flags],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    server = Server(
        f"http://127.0.0.1:{port}",
        process,
        log,
        Path(lending.socket) if lending else None,
        Path(lending.model_folder) if lending else None,
    )
    try:
        _wait_until_ready(server)
        yield server
    finally:
        _stop(process)


def _wait_until_ready(server: Server) -> None:
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end:
        server.check()
        with contextlib.suppress(URLError, TimeoutError, ConnectionError), urlopen(f"{server.url}/health", timeout=5):
            return
        time.sleep(LOOK_SECONDS)  # a server does not report that it is ready, so it is polled
    raise ServerError(f"the server was not ready after {READY_SECONDS:g} s: {last_line(server.log)}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with contextlib.suppress(ProcessLookupError):  # ends the remaining processes of the group
        os.killpg(process.pid, signal.SIGKILL)


def last_line(log: Path) -> str:
    """Return the last line of a log."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "its log is empty")
