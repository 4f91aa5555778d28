"""Fakes of CUDA for a process without a GPU: `torch.cuda`'s streams, events and memory pools, and vLLM's platform.

A kernel that is launched does not run before somebody waits for it, as late as CUDA allows. The fakes replace names of
`torch.cuda` for the length of a block. vLLM's record of streams is the real one, and so is its platform but for what it
asks the driver.
"""

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from vllm.utils import torch_utils


class FakeEvent:
    """An event, complete until it is recorded."""

    def __init__(self, **_: object) -> None:
        self._stream: FakeStream | None = None
        self._place = 0

    def record(self, stream: "FakeStream") -> None:
        self._stream, self._place = stream, len(stream.work)

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.run(self._place)


class FakeStream:
    """A stream: work in the order of its launch."""

    def __init__(self, cuda: "FakeCuda") -> None:
        self.work: list[str | tuple[FakeStream, int]] = []
        """Names of kernels, and the places in other streams that later work waits for."""
        self.failure: Exception | None = None
        """Error of a kernel, which each wait raises."""
        self._cuda = cuda
        self._done = 0

    @property
    def queued(self) -> list[str]:
        """Kernels that have not run."""
        return [each for each in self.work[self._done :] if isinstance(each, str)]

    def launch(self, kernel: str) -> None:
        self.work.append(kernel)

    def wait_stream(self, other: "FakeStream") -> None:
        self.work.append((other, len(other.work)))

    def synchronize(self) -> None:
        self.run(len(self.work))
        if self.failure is not None:
            raise self.failure

    def run(self, end: int) -> None:
        while self._done < end:
            each = self.work[self._done]
            self._done += 1
            if isinstance(each, str):
                self._cuda.ran.append(each)
            else:
                each[0].run(each[1])


class FakePool:
    """A pool of the allocator, which gives its memory back when it is deleted."""

    def __init__(self, cuda: "FakeCuda") -> None:
        self._given_back = cuda.given_back
        self._given_back.append(False)
        self._number = len(self._given_back) - 1

    def __del__(self) -> None:
        self._given_back[self._number] = True


class FakeCuda:
    """The CUDA device of the process."""

    def __init__(self, streams: int) -> None:
        self.ran: list[str] = []
        """Kernels in the order in which they ran."""
        self.streams = [FakeStream(self) for _ in range(streams)]
        """Streams that are handed out in turn; the first is the current one of every thread."""
        self.given_back: list[bool] = []
        """Whether the memory of each pool is back on the device, in the order in which pools were made."""
        self.open: dict[int, FakePool] = {}
        """The pool that a thread allocates from, by the thread's identifier."""
        self._handed_out = 0
        self._current = threading.local()

    def stream(self, *_: object) -> FakeStream:
        self._handed_out += 1
        return self.streams[self._handed_out % len(self.streams)]

    def current_stream(self, *_: object) -> FakeStream:
        found: FakeStream = getattr(self._current, "stream", self.streams[0])
        return found

    def set_stream(self, stream: FakeStream) -> None:
        self._current.stream = stream

    @contextmanager
    def use_mem_pool(self, pool: FakePool) -> Iterator[None]:
        thread = threading.get_ident()
        assert thread not in self.open
        self.open[thread] = pool
        try:
            yield
        finally:
            del self.open[thread]

    def launch(self, *kernels: str) -> None:
        """Launch kernels on the current stream of this thread."""
        for kernel in kernels:
            self.current_stream().launch(kernel)

    @property
    def queued(self) -> Sequence[str]:
        """Kernels on all streams that have not run."""
        return [kernel for stream in self.streams for kernel in stream.queued]


@contextmanager
def fake_cuda(*, streams: int = 32) -> Iterator[FakeCuda]:
    """Replace the names of torch by fakes during the block."""
    cuda = FakeCuda(streams)
    names: dict[str, Any] = {
        "Event": FakeEvent,
        "Stream": cuda.stream,
        "MemPool": lambda: FakePool(cuda),
        "current_stream": cuda.current_stream,
        "set_stream": torch_utils._patched_set_stream,
        "use_mem_pool": cuda.use_mem_pool,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch_utils, "prev_set_stream", cuda.set_stream)
        patch.setattr(torch_utils, "_current_stream_tls", threading.local())
        yield cuda


def cuda_platform() -> Any:
    """Return vLLM's platform for CUDA, of a GPU of the Hopper generation.

    Set the platform in a process of its own, after the import of what a build of vLLM for CPUs cannot import then.
    """
    sys.modules.setdefault("vllm._C_stable_libtorch", ModuleType("vllm._C_stable_libtorch"))  # kernels for GPUs
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Hopper(NonNvmlCudaPlatform):  # type: ignore[misc]
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "fake"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 << 30

        @classmethod
        def is_integrated_gpu(cls, device_id: int = 0) -> bool:
            return False

        @classmethod
        def device_count(cls) -> int:
            return 1

    return Hopper()
