"""vLLM's own OpenAI server on this machine, and the small model that it serves.

Keeps true
- The server is `python -m vllm.entrypoints.openai.api_server` and nothing else; an arm adds flags and environment.
- What runs on is ended with the benchmark: the server has a process group of its own, which is stopped as one.
- A server that does not come up, or dies, is a ServerError with the last thing that it said.
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
"""Requests in a batch: a client with this many on their way keeps the engine full."""

FLAGS = {
    "--host": "127.0.0.1",
    "--served-model-name": MODEL_NAME,
    "--dtype": "float32",
    "--block-size": "32",
    "--kv-cache-memory-bytes": str(384 << 20),
    "--max-model-len": str(LONGEST_TOKENS),
    "--max-num-seqs": str(MAX_RUNNING),
    "--max-num-batched-tokens": "512",
    "--distributed-executor-backend": "uni",  # a worker of its own would spin on a core while it waits
}
SWITCHES = ("--enforce-eager", "--enable-prompt-tokens-details", "--enable-per-request-metrics")
"""The last two make the server tell of each request what came from the cache and how long it queued."""

GUEST_TOKENS = 1024
"""The longest turn of a guest."""

HOUR_SECONDS = 3600.0

READY_SECONDS, STOP_SECONDS, ANSWER_SECONDS = 600.0, 30.0, 30.0
LOOK_SECONDS = 0.5
"""Between two looks at a server that comes up: nothing else tells that it answers."""

COUNTERS = (
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:num_preemptions",
)


class ServerError(RoseError):
    """A server that is not there or not alone."""


SERVED = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 32}
"""A Qwen3 of 0.4M parameters."""

LENT = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "head_dim": 128}
"""A guest's, of 19M parameters: its steps take several of serving's."""


def make_model(folder: Path, sizes: Mapping[str, int]) -> Path:
    """A Qwen3 with random weights, and the demo's tokenizer."""
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
    """How a server lends."""

    dial: float
    promises: bool = True
    """Whether the run's budgets, and the yield bound, hold the guest back."""


@dataclass(frozen=True)
class Launch:
    """What a server is started with beyond what all are; arms of equal launches share a server."""

    flags: tuple[str, ...] = ()
    lends: Lends | None = None


def lending(lends: Lends, model: Path, socket: Path, *, ttft: float, tpot: float) -> LendConfig:
    """Of a server that keeps these budgets, in seconds, while it lends; without promises, of one that keeps none."""
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
    """A server that runs."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    lends_at: Path | None = None
    """The socket of its guest."""
    lent: Path | None = None
    """The guest's model folder."""

    def check(self) -> None:
        """Raises ServerError when it has ended."""
        if self.process.poll() is not None:
            raise ServerError(f"the server ended with status {self.process.returncode}: {last_line(self.log)}")

    def counters(self) -> dict[str, float]:
        """COUNTERS as its /metrics says them now. Raises ServerError."""
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
    """A server that answers; stopped in the end. `lending`: of one that lends. Raises ServerError."""
    [port] = free_ports(1)
    flags = [part for pair in FLAGS.items() for part in pair]
    environment = os.environ | ENVIRONMENT
    if lending is not None:
        flags.append("--no-async-scheduling")
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
        time.sleep(LOOK_SECONDS)  # a server tells nobody that it is up: it is asked
    raise ServerError(f"the server was not ready after {READY_SECONDS:g} s: {last_line(server.log)}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with contextlib.suppress(ProcessLookupError):  # what it left behind
        os.killpg(process.pid, signal.SIGKILL)


def last_line(log: Path) -> str:
    """The last thing that a log says."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
