"""The device that checks measure: a CUDA GPU, or in a dry run a CPU with the same methods.

Streams, events and graphs of a dry run act at once, and those of a GPU act later. So a dry run shows that the code of a
check runs, but its figures have no meaning.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from bench.gpu.driver import Driver
from bench.gpu.report import Report

WARM_UPS = 3
"""Number of runs of a step before the runs that count, and before a graph is captured."""

CYCLES_PER_MS = 1_700_000
"""Clock of a Hopper GPU, about 1.7 GHz."""


class Card:
    """A CUDA GPU."""

    dry = False
    device = "cuda"
    dtype = torch.bfloat16

    def size(self, real: Any, tiny: Any) -> Any:
        """Return `real`, or `tiny` in a dry run."""
        return tiny if self.dry else real

    def stream(self, *, first: bool = False) -> Any:
        """Return a new stream. `first`: the stream has a higher priority than other streams."""
        return torch.cuda.Stream(priority=-1 if first else 0)  # type: ignore[no-untyped-call]

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which kernels are launched on `stream`."""
        return torch.cuda.stream(stream)

    def event(self) -> Any:
        """Return a new event that records its time."""
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until the device is idle."""
        torch.cuda.synchronize()

    def busy(self, milliseconds: float) -> None:
        """Occupy the current stream for about this time."""
        torch.cuda._sleep(int(milliseconds * CYCLES_PER_MS))  # type: ignore[no-untyped-call]

    def free_bytes(self) -> int:
        """Return the bytes of the device's memory that the driver counts as free."""
        return int(torch.cuda.mem_get_info()[0])

    def graph(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """Capture a step as a graph, after WARM_UPS runs; return a function that replays it on the current stream."""
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
        """Return a stream whose kernels run on this many multiprocessors. Raises Unavailable and RuntimeError."""
        return torch.cuda.ExternalStream(Driver().stream_on(multiprocessors))  # type: ignore[no-untyped-call]

    def milliseconds(self, step: Callable[[], Any], times: int = 10) -> list[float]:
        """Return the device time of a step on the current stream, for each of `times` runs after WARM_UPS runs."""
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

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Any) -> float:
        return 1000 * float(end.at - self.at)


def card_of(report: Report) -> Card:
    """Return the device of a check, and write its name. Raises RuntimeError without a GPU, except in a dry run."""
    if report.dry:
        report.write(device="dry run on a CPU")
        return DryCard()
    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA GPU is here: --dry-run runs the checks on a CPU")
    report.write(device=torch.cuda.get_device_name())
    return Card()
