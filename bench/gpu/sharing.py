"""What a guest engine on the same GPU costs serving, for several ways to launch both."""

import time
from collections.abc import Callable
from typing import Any

from bench.gpu.card import WARM_UPS, Card, card_of, percentile
from bench.gpu.decoder import SMALL, TINY, Decoder
from bench.gpu.report import Report, Unavailable
from bench.gpu.steps import CONTEXT, hooked

PERIOD = 0.010
"""Seconds from one request of serving to the next."""

SERVING_BATCH = 8


class Serving:
    """A decode step as a CUDA graph, which is due every PERIOD, or at once after one that took longer."""

    def __init__(self, card: Card, replay: Callable[[], Any]) -> None:
        self.latencies: list[float] = []
        """Seconds from when a step was due until its results were there."""
        self._stream: Any = None
        self._card = card
        self._replay = replay
        self._due = 0.0

    def begin(self, stream: Any) -> None:
        """Begin a window in which the steps are on `stream`."""
        self.latencies, self._stream = [], stream
        self._due = time.perf_counter() + PERIOD

    def serve_due(self) -> None:
        """Compute a step if it is due."""
        now = time.perf_counter()
        if now < self._due:
            return
        with self._card.on(self._stream):
            self._replay()
        self._stream.synchronize()
        now = time.perf_counter()
        self.latencies.append(now - self._due)
        self._due = max(self._due + PERIOD, now)


def serving_beside_guest(report: Report) -> None:
    """G: decides how serving and guest share a GPU: one stream, streams of two priorities, or a part of the GPU.

    Serving replays a decode step every 10 ms. One thread launches it from the hooks of the guest's layers, as a lender
    does, and while the thread waits for the guest. Rows: serving's latency and the guest's tokens per second, for a
    guest that decodes or prefills step after step.
    """
    card = card_of(report)
    shape = card.size(SMALL, TINY)
    served, guest = (Decoder(shape, device=card.device, dtype=card.dtype) for _ in range(2))
    context, window = card.size(CONTEXT, 8), card.size(4.0, 0.05)
    tokens, caches = served.tokens(SERVING_BATCH, 1), served.caches(SERVING_BATCH, context)
    serving = Serving(card, card.graph(lambda: served(tokens, caches)))
    card.wait()
    serving.begin(card.stream(first=True))
    end = time.perf_counter() + window
    while time.perf_counter() < end:
        serving.serve_due()
    alone = _row(serving)
    report.row(way="alone", **alone)

    batch, prompt = card.size(32, 2), card.size(2048, 16)
    drawn, kept = guest.tokens(batch, 1), guest.caches(batch, context)
    prompts = guest.tokens(1, prompt)
    decode: Callable[[], Any] = lambda: guest(drawn, kept)  # noqa: E731
    loads = {"decode": (decode, batch), "prefill": (lambda: guest(prompts), prompt)}
    replayed = card.graph(decode)
    for way in WAYS:
        for load, (step, tokens_a_step) in loads.items():
            try:
                steps, seconds = _window(card, way, serving, guest, replayed if way == "graph" else step, window)
            except (RuntimeError, Unavailable) as error:  # parts of the GPU that torch or the driver lacks
                report.row(way=way, load=load, failed=str(error)[:200])
                break
            report.row(way=way, load=load, guest_tokens_s=tokens_a_step * steps / seconds, **_row(serving, alone))
            if way == "graph":
                break  # of the decode step


WAYS = "one stream", "one stream, two layers queued", "priority", "graph", "32 multiprocessors", "16 multiprocessors"
"""Ways to launch the guest's steps. All but the first two launch serving on a stream of a higher priority."""


def _window(
    card: Card, way: str, serving: Serving, guest: Decoder, step: Callable[[], Any], seconds: float
) -> tuple[int, float]:
    """Let the guest compute step after step beside serving; returns its steps and the seconds that they took."""
    depth = 2 if way == "one stream, two layers queued" else None
    count, _, unit = way.partition(" ")
    stream = card.stream_on(int(count)) if unit == "multiprocessors" else card.stream()
    serving_stream = stream if way.startswith("one stream") else card.stream(first=True)
    steps = 0
    card.wait()
    with hooked(card, guest, depth, serving.serve_due) as hooks, card.on(stream):
        serving.begin(serving_stream)
        for _ in range(WARM_UPS):
            hooks.begin()
            step()
        card.wait()
        serving.begin(serving_stream)
        began = time.perf_counter()
        while time.perf_counter() < began + seconds:
            hooks.begin()
            step()
            while not stream.query():
                serving.serve_due()
            serving.serve_due()
            steps += 1
        card.wait()
        return steps, time.perf_counter() - began


def _row(serving: Serving, alone: dict[str, float] | None = None) -> dict[str, float]:
    latencies = [1000 * seconds for seconds in serving.latencies] or [0.0]
    row = {"steps": len(latencies), "p50_ms": percentile(latencies, 0.5), "p99_ms": percentile(latencies, 0.99)}
    row["longest_ms"] = max(latencies)
    if alone is not None and alone["p99_ms"]:
        row["p99_over_alone"] = row["p99_ms"] / alone["p99_ms"]
    return row
