"""Measure how long a user's request waits for the guest's present step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bench.gpu.card import WARM_UPS, Card, card_of
from bench.gpu.decoder import LARGE, SMALL, TINY, Decoder
from bench.gpu.report import Report

YIELD_MS = 20.0
"""Yield bound of a strict lender."""

DEPTHS = None, 1, 2
"""Most layers in the GPU's queue; None: no bound, as in the product on a CPU."""

CONTEXT = 512
"""Tokens of the context of decode steps."""

RUNS = 8
"""Number of measured runs of a step."""

EVERY = 5
"""Distance of the layers at which a step is stopped; each of these layers has one stopped step."""


class LayerHooks:
    """A hook before the layers of a decoder, which bounds the layers in the GPU's queue and looks for requests."""

    def __init__(self, card: Card, depth: int | None, look: Callable[[], None] | None) -> None:
        """Create the hook. `depth`: most unfinished layers; None: no bound. `look`: function that every hook calls."""
        self.passed: list[float] = []
        """Times at which the host left the hooks of this step."""
        self.yielded = 0.0
        """Seconds from the hook of the layer before `stop` until the GPU was idle, in the hook of the layer `stop`."""
        self._card = card
        self._depth = depth
        self._look = look
        self._stop: int | None = None
        self._events: list[Any] = []

    def begin(self, stop: int | None = None) -> None:
        """Begin a step, which waits for the GPU before layer `stop`: a request came just after the previous hook."""
        self._stop, self.yielded = stop, 0.0
        self.passed, self._events = [], []

    def before_layer(self, *_: Any) -> None:
        """Run the hook of the next layer."""
        if self._depth is not None:
            if len(self._events) >= self._depth:
                self._events[-self._depth].synchronize()
            event = self._card.event()
            event.record()
            self._events.append(event)
        if len(self.passed) == self._stop:
            self._card.wait()
            self.yielded = time.perf_counter() - self.passed[-1]
        if self._look is not None:
            self._look()
        self.passed.append(time.perf_counter())


@contextmanager
def hooked(
    card: Card, model: Decoder, depth: int | None, look: Callable[[], None] | None = None
) -> Iterator[LayerHooks]:
    """Yield the hooks of the model's layers, and remove them afterwards. The parameters are those of LayerHooks."""
    hooks = LayerHooks(card, depth, look)
    handles = [layer.register_forward_pre_hook(hooks.before_layer) for layer in model.layers]
    try:
        yield hooks
    finally:
        for handle in handles:
            handle.remove()


def yield_times(report: Report) -> None:
    """E: decides how the guest's steps are bounded: hooks at layers alone, hooks that wait for events, or CUDA graphs.

    Rows: decode and prefill steps of policies of 0.6B and 8B. `queued_ms` is the time from the last hook to the end of
    the step on the GPU; `yield_ms` is the longest wait of a request for the GPU, for any arrival in the step; `slower`
    is the step's time relative to a step that does not wait for events.
    """
    card = card_of(report)
    loads = card.size(
        {
            "0.6B": (
                SMALL,
                [("decode", 1), ("decode", 8), ("decode", 64)] + [("prefill", n) for n in (256, 1024, 2048)],
            ),
            "8B": (LARGE, [("decode", 64), ("prefill", 2048)]),
        },
        {"tiny": (TINY, [("decode", 2), ("prefill", 16)])},
    )
    for name, (shape, steps) in loads.items():
        model = Decoder(shape, device=card.device, dtype=card.dtype)
        worst: dict[int | None, float] = {}
        for kind, size in steps:
            step = _step(model, kind, size, card.size(CONTEXT, 8))
            for depth in DEPTHS:
                found = _measured(card, model, step, depth)
                if depth is None:
                    unbounded_ms = found["step_ms"]
                worst[depth] = max(worst.get(depth, 0.0), found["yield_ms"])
                slower = found["step_ms"] / unbounded_ms
                report.row(policy=name, load=f"{kind} {size}", depth=depth, slower=slower, **found)
            if kind == "decode":
                report.row(policy=name, load=f"{kind} {size}", graph=True, **_replayed(card, step))
        for depth in filter(None, DEPTHS):
            against = "a strict lender's promise; no more layers queued"
            report.check(f"yield_{name}_depth_{depth}", worst[depth], "ms", YIELD_MS, against)


def _step(model: Decoder, kind: str, size: int, context: int) -> Callable[[], Any]:
    if kind == "prefill":
        prompt = model.tokens(1, size)
        return lambda: model(prompt)
    tokens, caches = model.tokens(size, 1), model.caches(size, context)
    return lambda: model(tokens, caches)


def _measured(card: Card, model: Decoder, step: Callable[[], Any], depth: int | None) -> dict[str, float]:
    steps, launches, queued, yields = [], [], [], []
    with hooked(card, model, depth) as hooks:
        for turn in range(WARM_UPS + RUNS):
            card.wait()
            hooks.begin()
            began = time.perf_counter()
            step()
            launched = time.perf_counter()
            card.wait()
            end = time.perf_counter()
            if turn >= WARM_UPS:
                steps.append(end - began)
                launches.append(launched - began)
                queued.append(end - hooks.passed[-1])
        for stop in range(1, len(model.layers), EVERY):
            hooks.begin(stop)
            step()
            yields.append(hooks.yielded)
            card.wait()
    return {
        "step_ms": 1000 * min(steps),
        "launch_ms": 1000 * min(launches),
        "queued_ms": 1000 * max(queued),
        "yield_ms": 1000 * max(*yields, *queued),
    }


def _replayed(card: Card, step: Callable[[], Any]) -> dict[str, float]:
    """Measure a step as a graph, which cannot be interrupted: a request at its start waits for the whole step."""
    replay = card.graph(step)
    card.wait()
    launches, steps = [], []
    for _ in range(RUNS):
        began = time.perf_counter()
        replay()
        launches.append(time.perf_counter() - began)
        card.wait()
        steps.append(time.perf_counter() - began)
    return {"step_ms": 1000 * min(steps), "launch_ms": 1000 * min(launches), "yield_ms": 1000 * max(steps)}
