"""Measure a guest of the lender beside a real vLLM server on the GPU, if vLLM is there."""

import json
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from bench.gpu.card import card_of
from bench.gpu.report import Report, require
from bench.percentiles import percentile

LARGE = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "head_dim": 256}
"""Sizes of the model of serving and guest on a GPU, about 0.5B parameters."""

SHARE = 0.9
"""Share of the GPU's memory that serving takes."""

PERIOD = 0.05
"""Seconds from the end of a request to the next."""

PROMPTS = [[3 + (7 * number + place) % 90 for place in range(40)] for number in range(8)]


class Requests:
    """Requests to serving in sequence, each with a greedy answer of 16 tokens."""

    def __init__(self, url: str, model: str) -> None:
        self.latencies: list[float] = []
        """Milliseconds of each request."""
        self.changed = 0
        """Answers that differ from the first answer to the same prompt."""
        self._url = url
        self._model = model
        self._answers: dict[int, str] = {}

    def ask(self, number: int) -> None:
        """Send a request, and compare its answer."""
        number %= len(PROMPTS)
        body = {"model": self._model, "prompt": PROMPTS[number], "max_tokens": 16, "temperature": 0.0}
        headers = {"Content-Type": "application/json"}
        began = time.perf_counter()
        with urlopen(Request(f"{self._url}/v1/completions", json.dumps(body).encode(), headers), timeout=60) as answer:
            text = json.load(answer)["choices"][0]["text"]
        self.latencies.append(1000 * (time.perf_counter() - began))
        self.changed += self._answers.setdefault(number, text) != text

    @contextmanager
    def sent(self) -> Iterator[None]:
        """Send requests during the block, on a thread."""
        stop, errors = threading.Event(), []

        def send() -> None:
            number = 0
            try:
                while not stop.wait(PERIOD):
                    self.ask(number)
                    number += 1
            except Exception as error:  # noqa: BLE001  raised at the end of the block
                errors.append(error)

        self.latencies = []
        thread = threading.Thread(target=send)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        if errors:
            raise errors[0]

    def row(self) -> dict[str, float]:
        """Return the latencies since the last block began."""
        found = self.latencies or [0.0]
        return {"requests": len(found), "p50_ms": percentile(found, 50), "p99_ms": percentile(found, 99)}


def guest_beside_server(report: Report) -> None:
    """M: decides whether a guest runs on a GPU beside a server that has 0.9 of its memory.

    Rows: latencies of serving alone, while a guest is built, and while it computes; the guest's tokens per second; the
    free memory of the GPU before, with and after the guest.
    """
    card = card_of(report)
    require("vllm")
    server, guests = require("bench.coserving.server"), require("bench.coserving.guests")
    messages, link_of = require("rose.workers.executor.ipc.messages"), require("rose.workers.lender.sidecar_link")
    client, window = require("rose.workers.executor.ipc.engine_client"), card.size(20.0, 2.0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = server.make_model(folder / "model", card.size(LARGE, server.SERVED))
        lending = require("rose.workers.lender.config").LendConfig(
            model_folder=str(model),
            socket=str(folder / "socket"),
            dtype=card.size("bfloat16", "float32"),
            max_model_len=server.GUEST_TOKENS,
            kv_cache_bytes=card.size(4 << 30, 64 << 20),
            untried_devices=not card.dry,
        )
        free = [card.free_bytes()]
        cache = str(int((SHARE - 0.05) * free[0]))  # the rest of the share is for weights and activations
        gpu = ("--dtype", "bfloat16", "--no-enforce-eager", "--kv-cache-memory-bytes", cache)
        flags = () if card.dry else (*gpu, "--gpu-memory-utilization", str(SHARE))
        with server.serve(server.Launch(flags), model, folder / "log", lending) as running:
            requests = Requests(running.url, server.MODEL_NAME)
            for number in range(2 * len(PROMPTS)):
                requests.ask(number)
            with requests.sent():
                time.sleep(window)  # the window has a fixed length
            report.row(guest="none", **requests.row())
            free.append(card.free_bytes())
            with closing(link_of.connect(folder / "socket")) as end:
                link = client.EngineClient(end.channel, end.connection.fileno())
                began = time.perf_counter()
                with requests.sent():
                    link.send(messages.Resume())
                    tick = _status(link, suspended=False)
                report.row(guest="is built", seconds=time.perf_counter() - began, **requests.row())
                free.append(card.free_bytes())
                task = guests.GuestTask(str(folder / "socket"), 8, server.VOCABULARY, str(model), 0.0)
                turns = guests.Trajectories(task, link, tick.version)
                began = time.perf_counter()
                with requests.sent():
                    while time.perf_counter() < began + window:
                        turns.read_reports(more=True)
                tokens_s = sum(turns.rolled.counts) / (time.perf_counter() - began)
                report.row(guest="computes", guest_tokens_s=tokens_s, **requests.row())
                link.send(messages.Suspend())
                _status(link, suspended=True)
            free.append(card.free_bytes())
            for name, size in zip(("start", "serving", "guest", "parked"), free, strict=True):
                report.row(memory=name, free_gib=size / (1 << 30))
            report.check("answers_changed", requests.changed, "answers", 0, "greedy answers of serving alone")


def _status(link: Any, *, suspended: bool) -> Any:
    """Wait for a status of the guest in this state. Raises RuntimeError if there is none within five minutes."""
    stop, end = threading.Event(), time.monotonic() + 300
    while time.monotonic() < end:
        tick = link.wait_until_ready(stop)
        if tick is not None and bool(tick.suspended_reason) is suspended:
            return tick
    raise RuntimeError("the guest does not change its state: the server's log says why")
