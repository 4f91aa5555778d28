"""The executor's side of the channel: sends commands to the engine, reads its reports, and copies weights for it.

Keeps true
- Commands arrive in the order in which they were sent, and no sender waits for the engine.
- Policy versions are passed in two weight buffers of shared memory. One serves; the next version is copied to the
  other, one version at a time. A buffer is written only while no engine computes from it.
- Bytes are not converted; the engine's tensors (`StagedTensors`) are views of the shared memory, not copies.
"""

import math
import mmap
import os
import select
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Event

import torch
from torch import Tensor

from rose.workers.executor.ipc.messages import (
    REPORT_DECODER,
    Command,
    EngineFailed,
    EngineLost,
    EngineStatus,
    MessageSender,
    Report,
    StageWeights,
    TensorLayout,
    WeightsActivated,
)
from rose.workers.executor.ipc.shared_memory import ChannelFds, RingBuffer
from rose.workers.executor.vllm.types import EngineBroken, EngineStartError

READY_POLL_SECONDS = 0.05
"""Seconds between two polls for the first report of an engine, whose start takes seconds."""


ALIGNMENT = 64
"""Bytes; a cache line."""


def write_tensors(descriptor: int, tensors: Mapping[str, Tensor]) -> tuple[TensorLayout, ...]:
    """Copy the tensors into the buffer of `descriptor`, over its earlier content. Return where each tensor lies."""
    layout, end = [], 0
    for name, tensor in tensors.items():
        layout.append(TensorLayout(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end))
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    if os.fstat(descriptor).st_size < end:
        os.ftruncate(descriptor, end)
    for name, target in StagedTensors(descriptor, layout):
        target.copy_(tensors[name])
    return tuple(layout)


@dataclass(frozen=True, slots=True)
class StagedTensors:
    """The tensors of a version in the buffer of `descriptor`."""

    descriptor: int
    layout: Sequence[TensorLayout]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors. The tensors keep the buffer mapped, and touch its pages only when they are read."""
        yield from self.within(mmap.mmap(self.descriptor, 0))

    def within(self, memory: mmap.mmap) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors as views of `memory`, a mapping of the buffer."""
        for entry in self.layout:
            dtype: torch.dtype = getattr(torch, entry.dtype)
            count = math.prod(entry.shape)
            yield entry.name, torch.frombuffer(memory, dtype=dtype, count=count, offset=entry.offset).view(entry.shape)


class EngineClient:
    """Client of one engine, in any process."""

    def __init__(self, channel: ChannelFds, liveness_fd: int, exit_reason: Callable[[], str] = lambda: "") -> None:
        """`liveness_fd`: a descriptor that becomes readable when the engine's process is gone.

        `exit_reason` returns why the process has ended, or an empty text.
        """
        self._channel = channel
        self._commands = MessageSender(RingBuffer(channel.commands))
        self._reports = RingBuffer(channel.reports)
        self._liveness = select.poll()
        self._liveness.register(liveness_fd, select.POLLIN)
        self._exit_reason = exit_reason
        self._started = False
        self._active_buffer = 1

    def send(self, command: Command) -> None:
        """Send a command and wake the engine. Never waits."""
        self._commands.send(command)
        self._channel.wake_engine()

    def stage_weights(self, version: int, tensors: Mapping[str, Tensor]) -> StageWeights:
        """Copy a version into the spare weight buffer, and return the command that the caller then sends.

        May be called on any thread. The version before must have been activated or rejected.
        """
        buffer = 1 - self._active_buffer
        return StageWeights(version, buffer, write_tensors(self._channel.weight_buffers[buffer], tensors))

    def reports(self) -> Iterator[Report]:
        """Yield the reports that are there. Raises EngineStartError or EngineBroken if the engine failed or is gone."""
        self._commands.flush()
        exited = bool(self._liveness.poll(0))
        for message in self._reports.read():
            report = REPORT_DECODER.decode(message)
            if isinstance(report, EngineFailed):
                raise (EngineStartError if report.usage else EngineBroken)(report.reason)
            if isinstance(report, EngineLost):
                raise EngineBroken(f"{report.reason}; the server builds another guest in {report.seconds:.0f} s")
            self._started |= isinstance(report, EngineStatus)
            if isinstance(report, WeightsActivated):
                self._active_buffer = 1 - self._active_buffer
            yield report
        if exited:
            if reason := self._exit_reason():
                raise (EngineBroken if self._started else EngineStartError)(f"the engine's process has ended: {reason}")
            raise EngineBroken("the engine's process has ended: its last words, if any, are in the log before this")

    def wait_until_ready(self, stop: Event) -> EngineStatus | None:
        """Return the engine's first status; None if `stop` is set before. Raises EngineStartError or EngineBroken."""
        while not stop.is_set():
            for report in self.reports():
                if isinstance(report, EngineStatus):
                    return report
            self.wait(READY_POLL_SECONDS)
        return None

    def wait(self, seconds: float) -> None:
        """Wait for `seconds`, or until the engine's process is gone."""
        self._liveness.poll(1000 * seconds)
