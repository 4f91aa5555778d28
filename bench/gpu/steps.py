"""How long a user's request waits for the guest's step that is under way."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bench.gpu.card import WARM_UPS, Card, card_of
from bench.gpu.decoder import LARGE, SMALL, TINY, Decoder
from bench.gpu.report import Report

YIELD_MS = 20.0
"""The promise of a strict lender."""

DEPTHS = None, 1, 2
"""Layers that may lie in the queue of the GPU; None is what the product does on a CPU: no bound."""

CONTEXT = 512
EVERY = 5
"""Every so many-th layer a step is stopped, once."""


class LayerHooks:
    """Hooks before the layers of a decoder, which bound what the GPU has not yet computed, and look for requests."""

    def __init__(self, card: Card, model: Decoder, depth: int | None, look: Callable[[], None] | None = None) -> None:
        """`depth`: launched layers that may be unfinished. `look`: called in every hook."""
        self.passed: list[float] = []
        """When the host left the hooks of this step."""
        self.yielded: float | None = None
        """Seconds from the hook before `stop` until the GPU was idle in the hook `stop`."""
        self._card = card
        self._depth = depth
        self._look = look
        self._stop: int | None = None
        self._events: list[Any] = []
        self._handles = [layer.register_forward_pre_hook(self._hook) for layer in model.layers]

    def begin(self, stop: int | None = None) -> None:
        """Begin a step, which waits for the GPU before layer `stop`, as for a request that missed the hook before."""
        self._stop, self.yielded = stop, None
        self.passed, self._events = [], []

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, *_: Any) -> None:
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
    """Hooks for the time of the context."""
    hooks = LayerHooks(card, model, depth, look)
    try:
        yield hooks
    finally:
        hooks.remove()


def yield_times(report: Report) -> None:
    """E: decides how the guest's steps are bounded: hooks at layers alone, hooks that wait for events, or CUDA graphs.

    For decode and prefill of a policy of 0.6B and of 8B. `queued_ms` is the time from the last hook, at which a request
    can take its turn, to the end of the step on the GPU; `yield_ms` is the longest that a request waits for the GPU,
    wherever in the step it arrives; `slower` is the step's time over that without waiting for events.
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
            alone = 0.0
            for depth in DEPTHS:
                found = _measured(card, model, step, depth)
                alone = alone or found["step_ms"]
                worst[depth] = max(worst.get(depth, 0.0), found["yield_ms"])
                report.row(policy=name, load=f"{kind} {size}", depth=depth, slower=found["step_ms"] / alone, **found)
            if kind == "decode":
                report.row(policy=name, load=f"{kind} {size}", graph=True, **_replayed(card, step))
        for depth in (1, 2):
            report.check(
                f"yield_{name}_depth_{depth}",
                worst[depth],
                "ms",
                YIELD_MS,
                "a strict lender's promise; no more layers queued",
            )


def _step(model: Decoder, kind: str, size: int, context: int) -> Callable[[], Any]:
    if kind == "prefill":
        prompt = model.tokens(1, size)
        return lambda: model(prompt)
    tokens, caches = model.tokens(size, 1), model.caches(size, context)
    return lambda: model(tokens, caches)


def _measured(card: Card, model: Decoder, step: Callable[[], Any], depth: int | None) -> dict[str, float]:
    steps, launches, queued, yields = [], [], [], []
    with hooked(card, model, depth) as hooks:
        for turn in range(WARM_UPS + 8):
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
            yields.append(hooks.yielded or 0.0)
            card.wait()
    return {
        "step_ms": 1000 * min(steps),
        "launch_ms": 1000 * min(launches),
        "queued_ms": 1000 * max(queued),
        "yield_ms": 1000 * max(*yields, *queued),
    }


def _replayed(card: Card, step: Callable[[], Any]) -> dict[str, float]:
    """A graph is not interrupted: a request that comes at its begin waits for the whole of it."""
    replay = card.graph(step)
    card.wait()
    launches, steps = [], []
    for _ in range(8):
        began = time.perf_counter()
        replay()
        launches.append(time.perf_counter() - began)
        card.wait()
        steps.append(time.perf_counter() - began)
    return {"step_ms": 1000 * min(steps), "launch_ms": 1000 * min(launches), "yield_ms": 1000 * max(steps)}
