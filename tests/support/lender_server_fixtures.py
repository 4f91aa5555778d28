"""A vLLM server whose engine process may host a guest, and a scripted sidecar."""

import http.client
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from rose.schemas.arrays import pack_tokens
from rose.schemas.prompts import Sampling
from rose.topics.local_broker import free_ports
from rose.workers.executor.ipc.messages import (
    REPORT_DECODER,
    Command,
    EngineStatus,
    MessageSender,
    Report,
    Resume,
    SubmitTurn,
    TurnFinished,
)
from rose.workers.executor.ipc.shared_memory import RingBuffer
from rose.workers.lender.admission import Promise
from rose.workers.lender.config import LendConfig
from rose.workers.lender.sidecar_link import connect
from tests.support.waiting import WAIT_SECONDS, until

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "workers/models/calculator"
VOCABULARY = 99
NOTES = "LEND_WITNESS"
"""Environment variable with the path of the probe's notes file: one JSON object per line."""

HANG = "LEND_HANG"
"""Environment variable with the path of a file. A guest hangs while the file exists (`lend_hang`)."""

FAULT = "LEND_FAULT"
"""Environment variable with the path of a file that names the fault of a guest rank (`rank_probe`)."""

SERVING = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # with `uni` the model computes in the engine-core process, as on a GPU
    "VLLM_LOGGING_LEVEL": "INFO",  # an engine of the test process may have set another level
    "OMP_NUM_THREADS": "1",
}

RANKS = 2
ON_RANKS = (
    *("--tensor-parallel-size", str(RANKS), "--distributed-executor-backend", "mp"),
    *("--worker-extension-cls", "tests.support.rank_probe.RankProbe"),
)
"""Flags of a server with one worker per rank and a probe in each worker."""

STRICTLY = Promise()

Wanted = TypeVar("Wanted", bound=Report)


@dataclass
class Server:
    """A vLLM server with its configuration."""

    process: "subprocess.Popen[bytes]"
    port: int
    config: LendConfig
    log: Path
    notes: Path

    @property
    def core(self) -> psutil.Process:
        """The engine-core process."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(child for child in children if child.name().startswith("VLLM::Engin"))

    @property
    def workers(self) -> list[psutil.Process]:
        """Workers of a server of several ranks, in rank order."""
        children = self.core.children(recursive=True)
        return sorted((child for child in children if "Worker" in child.name()), key=lambda child: child.name())

    def has_logged(self, text: str) -> bool:
        return text in self.log.read_text()

    def step_notes(self) -> list[dict[str, Any]]:
        """Return the notes of the probe, one per step."""
        return [json.loads(line) for line in self.notes.read_text().splitlines()]

    def complete(self, prompt: Sequence[int], tokens: int = 16, /, **fields: Any) -> "Answer":
        """Send one greedy, streamed completion request and return the answer. `fields` replace those of the request."""
        return self._ask("/v1/completions", {"prompt": list(prompt), "max_tokens": tokens} | fields)

    def describe(self, image: str, tokens: int = 16, **sampling: Any) -> "Answer":
        """Send one streamed request with the image at this URL, as `complete` does."""
        parts = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": "what is it?"}]
        message = {"role": "user", "content": parts}
        return self._ask("/v1/chat/completions", {"messages": [message], "max_tokens": tokens, **sampling})

    def _ask(self, path: str, fields: dict[str, Any]) -> "Answer":
        body = {"model": "serving", "temperature": 0, "ignore_eos": True, "stream": True} | fields
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_SECONDS)
        began = time.perf_counter()
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        answer = Answer()
        for line in response:
            if line.startswith(b"data: {"):
                choice = json.loads(line[6:])["choices"][0]
                answer.at.append(time.perf_counter() - began)
                answer.text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        connection.close()
        return answer


@dataclass
class Answer:
    text: str = ""
    at: list[float] = field(default_factory=list)
    """Seconds after the request, for each piece of the text."""


class ScriptedSidecar:
    """A scripted sidecar: connects, sends commands, reads reports."""

    def __init__(self, config: LendConfig) -> None:
        until(lambda: Path(config.socket).is_socket())
        self.end = connect(Path(config.socket))
        self.commands = RingBuffer(self.end.channel.commands)
        self.reports = RingBuffer(self.end.channel.reports)
        self.received: list[Report] = []
        self.send(Resume())

    def send(self, word: Command) -> None:
        MessageSender(self.commands).send(word)
        self.end.channel.wake_engine()

    @property
    def ended(self) -> bool:
        return bool(select.select([self.end.connection], [], [], 0)[0])

    def take(self, name: str, context: Sequence[int], sampling: Sampling, version: int = -1) -> None:
        self.send(SubmitTurn(name, pack_tokens(context), sampling, version))

    def wait_for_reports(self, kind: type[Wanted], count: int = 1) -> list[Wanted]:
        """Wait until `count` reports of a kind have arrived since the last `forget`."""
        until(lambda: len(self._of(kind)) >= count)
        return self._of(kind)

    def done(self, count: int) -> dict[str, TurnFinished]:
        return {done.turn.name: done for done in self.wait_for_reports(TurnFinished, count)}

    def forget(self) -> None:
        self._read()
        self.received.clear()

    def awake(self) -> None:
        """Wait until the guest lends. On ranks of a busy server the build takes minutes."""
        until(lambda: bool(ticks := self._of(EngineStatus)) and not ticks[-1].suspended_reason, 4 * WAIT_SECONDS)

    def parked(self) -> str:
        """Wait until there is no guest; return the reason."""
        until(lambda: bool(ticks := self._of(EngineStatus)) and bool(ticks[-1].suspended_reason))
        return self._of(EngineStatus)[-1].suspended_reason

    def silent_for(self) -> float:
        """Return the seconds until the next status report of the engine."""
        self.forget()
        began = time.monotonic()
        self.wait_for_reports(EngineStatus)
        return time.monotonic() - began

    def _of(self, kind: type[Wanted]) -> list[Wanted]:
        self._read()
        return [report for report in self.received if isinstance(report, kind)]

    def _read(self) -> None:
        self.received += [REPORT_DECODER.decode(message) for message in self.reports.read()]


SERVERS = {"sync": "vllm.entrypoints.openai.api_server", "async": "tests.support.async_server"}
"""Module of the server by its scheduling."""


def server_flags(port: int) -> list[str]:
    """Return the vLLM flags of a small server on a CPU."""
    where = ["--served-model-name", "serving", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    memory = ["--enforce-eager", "--block-size", "32", "--kv-cache-memory-bytes", str(32 << 20), "--seed", "0"]
    sizes = ["--max-model-len", "512", "--max-num-seqs", "16", "--max-num-batched-tokens", "512"]
    return [*where, *memory, *sizes, "--distributed-executor-backend", "uni"]


@contextmanager
def lending_server(
    folder: Path,
    *flags: str,
    lends: bool = True,
    promise: Promise = STRICTLY,
    scheduling: str = "sync",
    module: str = "",
    **sizes: Any,
) -> Iterator[Server]:
    """Start a server with the shipped policy as the model of serving and guest. `sizes` are fields of its
    LendConfig. `module`: that of the server; empty: by the scheduling."""
    small: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_turns": 8,
        "max_model_len": 256,
        "kv_cache_bytes": 8 << 20,
        "step_tokens": 64,
    }
    config = LendConfig(
        model_folder=str(MODEL),
        socket=str(folder / "lend.sock"),
        promise=promise,
        **(small | sizes),
    )
    (folder / "lend.json").write_bytes(msgspec.json.encode(config))
    [port] = free_ports(1)
    environment = os.environ | SERVING | {NOTES: str(folder / "notes.jsonl"), FAULT: str(folder / "fault")}
    environment.pop("ROSE_LEND", None)
    if lends:
        environment["ROSE_LEND"] = str(folder / "lend.json")
    command = [sys.executable, "-m", module or SERVERS[scheduling], "--model", str(MODEL)]
    command += [*server_flags(port), *flags]
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
    server = Server(process, port, config, log, folder / "notes.jsonl")
    try:
        until(lambda: healthy(port) or process.poll() is not None, 4 * WAIT_SECONDS)
        assert process.poll() is None, log.read_text()[-4000:]
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30.0)
        except subprocess.TimeoutExpired:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.wait()


def healthy(port: int) -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1.0)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
