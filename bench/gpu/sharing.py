"""Measure the cost of a guest engine for serving on the same GPU, for several ways to launch both."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.gpu.card import WARM_UPS, Card, card_of
from bench.gpu.decoder import SMALL, TINY, Decoder
from bench.gpu.report import Report, Unavailable
from bench.gpu.steps import CONTEXT, hooked
from bench.percentiles import percentile

PERIOD = 0.010
"""Seconds from one request of serving to the next."""

SERVING_BATCH = 8


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to launch serving and the guest. By default the guest has its own stream, of a lower priority."""

    one_stream: bool = False
    """Whether serving and the guest share a stream."""
    depth: int | None = None
    """Most layers of the guest in the GPU's queue; None: no bound."""
    graph: bool = False
    """Whether the guest's decode step is a graph; prefills are not measured then."""
    multiprocessors: int | None = None
    """Size of the guest's part of the GPU; None: the whole GPU."""


WAYS = {
    "one stream": Way(one_stream=True),
    "one stream, two layers queued": Way(one_stream=True, depth=2),
    "priority": Way(),
    "graph": Way(graph=True),
    "32 multiprocessors": Way(multiprocessors=32),
    "16 multiprocessors": Way(multiprocessors=16),
}


class Serving:
    """Serving's decode steps, each a replayed graph. A step is due every PERIOD, or at once after a longer step."""

    def __init__(self, card: Card, replay: Callable[[], Any]) -> None:
        self.latencies: list[float] = []
        """Seconds from the time at which a step was due until it had ended, for each step."""
        self._stream: Any = None
        self._card = card
        self._replay = replay
        self._due = 0.0

    def begin(self, stream: Any) -> None:
        """Begin a window, in which the steps run on `stream`."""
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

    Serving replays a decode step every 10 ms. One thread launches this step from the hooks of the guest's layers, as a
    lender does, and while the thread waits for the guest. Rows: serving's latency and the guest's tokens per second,
    for a guest that continuously decodes or prefills.
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

    def decode() -> Any:
        return guest(drawn, kept)

    loads = {"decode": (decode, batch), "prefill": (lambda: guest(prompts), prompt)}
    replayed = {"decode": (card.graph(decode), batch)}
    for name, way in WAYS.items():
        for load, (step, tokens_a_step) in (replayed if way.graph else loads).items():
            try:
                steps, seconds = _window(card, way, serving, guest, step, window)
            except (RuntimeError, Unavailable) as error:  # torch or the driver may lack parts of the GPU
                report.row(way=name, load=load, failed=str(error)[:200])
                break
            report.row(way=name, load=load, guest_tokens_s=tokens_a_step * steps / seconds, **_row(serving, alone))


def _window(
    card: Card, way: Way, serving: Serving, guest: Decoder, step: Callable[[], Any], seconds: float
) -> tuple[int, float]:
    """Let the guest compute step after step while serving runs; return the guest's steps and their seconds."""
    stream = card.stream() if way.multiprocessors is None else card.stream_on(way.multiprocessors)
    serving_stream = stream if way.one_stream else card.stream(first=True)
    steps = 0
    card.wait()
    with hooked(card, guest, way.depth, serving.serve_due) as hooks, card.on(stream):
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
    row = {"steps": len(latencies), "p50_ms": percentile(latencies, 50), "p99_ms": percentile(latencies, 99)}
    row["longest_ms"] = max(latencies)
    if alone is not None and alone["p99_ms"]:
        row["p99_over_alone"] = row["p99_ms"] / alone["p99_ms"]
    return row
