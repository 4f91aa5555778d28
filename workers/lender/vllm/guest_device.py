"""The guest's part of a device: a stream, a pool of the allocator, and a bound on the queue of the stream.

Keeps true, on a GPU
- The kernels of a guest's model run on one stream, which serving never launches on. vLLM's record of a thread's stream
  agrees.
- The thread of serving goes back to serving only when the guest's stream is idle. So a KV block that serving gets back
  has no write of the guest before it, no kernel of the guest's model runs beside a kernel of serving's step, and the
  time that the thread measures is the time of the device.
- A guest's kernels come after all that serving has launched.
- Between two layers of a guest's step, the kernels of one layer at most are in the queue.
- Serving allocates no memory of the guest's pool, and the guest's memory goes back to the device when the guest ends.

There are two exceptions to the second rule, and both write to no block of a request. The thread of a build goes on
between two pieces (`host_process`), so kernels of a build may run beside those of serving. A version is staged on a
stream of its own (`in_place_weights`), so its copies and comparisons may, too.

The guest's stream has the lowest priority that there is. Serving's stream has the same: vLLM asks for no higher one.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.utils import torch_utils


class GuestDevice:
    """A CPU, which has neither streams nor pools: every method does nothing."""

    engine_arguments: Mapping[str, Any] = {"enforce_eager": True}
    """Arguments of `vllm.EngineArgs` for a guest."""

    @contextmanager
    def building(self) -> Iterator[None]:
        """Make this thread, which builds a guest, launch and allocate for the guest."""
        yield

    @contextmanager
    def halted(self) -> Iterator[None]:
        """Halt the thread that builds a guest, so that no pool is open."""
        yield

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make serving's thread launch and allocate for the guest. Raises RuntimeError if a kernel has failed."""
        yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within `running`, give the thread to serving. Raises RuntimeError if a kernel of the guest has failed."""
        yield

    def before_layer(self) -> None:
        """Bound the queue of the stream. Call it before each layer is launched."""

    def release(self) -> None:
        """Give the memory of a guest that has ended back to the device."""


CPU = GuestDevice()


class CudaDevice(GuestDevice):
    """The guest's part of the CUDA device of serving. Made on serving's thread, for all guests of a process in turn."""

    engine_arguments: Mapping[str, Any] = {
        # `enforce_eager` would also leave out the warm-up, and kernels would be compiled in the first steps
        "compilation_config": {"mode": 0, "cudagraph_mode": "NONE"},
        "enforce_eager": False,
        "enable_flashinfer_autotune": False,  # the tuner is one for the process
        "gpu_memory_utilization": 0.001,  # vLLM refuses to start if this share is not free; the cache has its own size
    }

    def __init__(self) -> None:
        self._host: Any = torch.cuda.current_stream()
        """Serving's stream."""
        self._host_record: Any = None
        """Serving's stream by vLLM's record, which is None until vLLM has set a stream on the thread."""
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        while self._stream == self._host:  # torch hands out its streams again after the last
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._layer = torch.cuda.Event()  # type: ignore[no-untyped-call]
        """Recorded before the newest layer that was launched."""
        self._pool: Any = None
        """Pool of the present guest; deleted with its memory."""
        self._open = ExitStack()
        """The use of the pool, on the thread that launches for the guest."""

    @contextmanager
    def building(self) -> Iterator[None]:
        """Make this thread, which builds a guest, launch and allocate for the guest, whose pool begins here."""
        torch.cuda.set_stream(self._stream)  # first: the thread is on the device of the stream from then on
        self._pool = torch.cuda.MemPool()
        self._open_pool()
        try:
            yield
        finally:
            self._open.close()

    @contextmanager
    def halted(self) -> Iterator[None]:
        """Close the pool while the build is halted: torch's allocator does less for serving while a pool is open."""
        self._open.close()
        try:
            yield
        finally:
            self._open_pool()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make serving's thread launch and allocate for the guest. Raises RuntimeError if a kernel has failed."""
        try:
            self._enter()
            yield
        finally:
            self._leave()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within `running`, give the thread to serving. Raises RuntimeError if a kernel of the guest has failed."""
        self._leave()
        try:
            yield
        except BaseException:  # an error of serving, which CUDA's own error must not hide
            with suppress(RuntimeError):
                self._enter()
            raise
        self._enter()

    def before_layer(self) -> None:
        """Wait for the kernels of all layers but the newest."""
        self._layer.synchronize()  # returns at once for an event that was never recorded
        self._layer.record(self._stream)

    def release(self) -> None:
        """Give the memory of a guest that has ended back to the device."""
        self._pool = None

    def _enter(self) -> None:
        self._host = torch.cuda.current_stream()
        self._host_record = getattr(torch_utils._current_stream_tls, "value", None)
        self._stream.wait_stream(self._host)
        torch.cuda.set_stream(self._stream)
        self._open_pool()

    def _leave(self) -> None:
        self._open.close()
        torch.cuda.set_stream(self._host)
        torch_utils._current_stream_tls.value = self._host_record
        self._stream.synchronize()  # last: it raises after an error of a kernel, and the thread is serving's by then

    def _open_pool(self) -> None:
        if self._pool is not None:
            self._open.enter_context(torch.cuda.use_mem_pool(self._pool))


def guest_device() -> GuestDevice:
    """Return the guest's part of serving's device. Call it on serving's thread."""
    return CPU if current_platform.is_cpu() else CudaDevice()
