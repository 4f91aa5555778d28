"""The weight buffers as a process with a GPU reads them: mapped and registered with CUDA.

Keeps true
- A buffer is mapped and registered once, and anew only if it has grown: registration takes long. Copies from registered
  memory to the GPU run beside the host.
- Memory is registered no longer than it is mapped, and no longer than its `WeightMappings` exists.
- Without a GPU, or where nothing is to be registered, nothing is kept: a buffer is mapped for each version.
"""

import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch
from torch import Tensor

from rose.workers.executor.ipc.engine_client import StagedTensors

BUFFERS = 2
"""Number of weight buffers of a channel. The engine may get another channel, whose buffers replace these."""


class WeightMappings:
    """Mappings of the weight buffers that an engine reads."""

    def __init__(self, *, registers: bool = True) -> None:
        """`registers`: whether buffers are registered with CUDA. This may take seconds for a buffer."""
        self._registers = registers
        self._mapped: dict[int, tuple[mmap.mmap, Callable[[], object]]] = {}
        """Mapping and end of its registration, by the inode of the buffer; the mapping that was used last is last."""

    def tensors(self, staged: StagedTensors) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors of a version. The tensors keep their memory mapped."""
        if self._registers and torch.cuda.is_available():
            return staged.within(self._memory(staged.descriptor))
        return iter(staged)

    def _memory(self, descriptor: int) -> mmap.mmap:
        buffer = os.fstat(descriptor)
        memory, end = self._mapped.pop(buffer.st_ino, (None, lambda: None))
        if memory is None or len(memory) != buffer.st_size:
            end()
            memory = mmap.mmap(descriptor, buffer.st_size)
            end = _register(self, memory)
        self._mapped[buffer.st_ino] = memory, end
        for oldest in list(self._mapped)[:-BUFFERS]:
            self._mapped.pop(oldest)[1]()
        return memory


def _register(owner: WeightMappings, memory: mmap.mmap) -> Callable[[], object]:
    """Register a mapping with CUDA. Return a function that ends the registration; `owner` ends it at the latest.

    If CUDA refuses, copies from the mapping are correct, and slower.
    """
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    if int(torch.cuda.cudart().cudaHostRegister(address, len(memory), 0)):  # type: ignore[no-untyped-call]
        with suppress(RuntimeError):  # CUDA reports the error once more, at the next launch of a kernel
            torch.zeros(1, device="cuda")
        return lambda: None
    end = weakref.finalize(owner, _unregister, memory, address)
    end.atexit = False  # the end of the process ends the registration
    return end


def _unregister(memory: mmap.mmap, address: int) -> None:
    """End the registration of `memory`, which is mapped until then, once no copy reads it."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
