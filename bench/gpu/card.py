"""The device that checks measure: a CUDA GPU, or in a dry run a CPU behind the same methods.

Streams, events and graphs of a dry run do at once what a GPU does later, so a dry run shows that a check's code runs
and none of its figures.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from bench.gpu.driver import Driver
from bench.gpu.report import Report

WARM_UPS = 3
"""Runs of a step before the runs that count, and before a graph is captured."""

CYCLES_PER_MS = 1_700_000
"""About the clock of a Hopper GPU."""


class Card:
    """A CUDA GPU."""

    dry = False
    device = "cuda"
    dtype = torch.bfloat16

    def size(self, real: Any, tiny: Any) -> Any:
        """Return `real`, or `tiny` in a dry run."""
        return tiny if self.dry else real

    def stream(self, *, first: bool = False) -> Any:
        """Return a new stream. `first`: with a higher priority than other streams."""
        return torch.cuda.Stream(priority=-1 if first else 0)  # type: ignore[no-untyped-call]

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Launch on `stream` within the context."""
        return torch.cuda.stream(stream)

    def event(self) -> Any:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until the device is idle."""
        torch.cuda.synchronize()

    def busy(self, milliseconds: float) -> None:
        """Occupy the current stream for about so long."""
        torch.cuda._sleep(int(milliseconds * CYCLES_PER_MS))  # type: ignore[no-untyped-call]

    def free_bytes(self) -> int:
        """Free memory of the device as the driver counts it."""
        return int(torch.cuda.mem_get_info()[0])

    def graph(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """Capture a step after a few runs of it; returns what replays it on the current stream."""
        side = self.stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay

    def stream_on(self, multiprocessors: int) -> Any:
        """Return a stream on a part of the GPU. Raises Unavailable and RuntimeError."""
        return torch.cuda.ExternalStream(Driver().stream_on(multiprocessors))  # type: ignore[no-untyped-call]

    def milliseconds(self, step: Callable[[], Any], times: int = 10) -> list[float]:
        """Device time of a step on the current stream, for each of `times` runs after a few others."""
        for _ in range(WARM_UPS):
            step()
        marks = [(self.event(), self.event()) for _ in range(times)]
        for begin, end in marks:
            begin.record()
            step()
            end.record()
        self.wait()
        return [float(begin.elapsed_time(end)) for begin, end in marks]


class DryCard(Card):
    """A CPU in place of a GPU."""

    dry = True
    device = "cpu"
    dtype = torch.float32

    def stream(self, *, first: bool = False) -> Any:
        return _Stream()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def event(self) -> Any:
        return _Event()

    def wait(self) -> None:
        pass

    def busy(self, milliseconds: float) -> None:
        pass

    def free_bytes(self) -> int:
        return 0

    def graph(self, step: Callable[[], Any]) -> Callable[[], Any]:
        step()
        return step

    def stream_on(self, multiprocessors: int) -> Any:
        return _Stream()


class _Stream:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class _Event:
    at = 0.0

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Any) -> float:
        return 1000 * float(end.at - self.at)


def card_of(report: Report) -> Card:
    """The device of a check. Raises RuntimeError without a GPU, except in a dry run."""
    if report.dry:
        report.write(device="dry run on a CPU")
        return DryCard()
    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA GPU is here: --dry-run runs the checks on a CPU")
    report.write(device=torch.cuda.get_device_name())
    return Card()


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile; `share` between 0 and 1."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def seconds_of(function: Callable[[], Any]) -> float:
    """Wall time of a call, which has to wait for the device itself."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began
