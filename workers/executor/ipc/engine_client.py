"""The bus's end of an executor's channel: orders to the engine, its reports, and versions laid for it.

Keeps true
- Orders arrive in the order in which they were given, and nobody waits for the engine to take them.
- A version is laid on the buffer that does not serve, and one at a time.
"""

import select
from collections.abc import Iterator, Mapping
from threading import Event

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
    WeightsActivated,
)
from rose.workers.executor.ipc.shared_memory import ChannelFds, RingBuffer
from rose.workers.executor.ipc.weight_buffers import write_tensors
from rose.workers.executor.vllm.types import EngineBroken, EngineStartError

READY_POLL_SECONDS = 0.05
"""Between two looks for the first report of an engine, which takes seconds to start."""


class EngineClient:
    """To one engine, wherever it runs."""

    def __init__(self, channel: ChannelFds, liveness_fd: int) -> None:
        """`liveness_fd`: a descriptor that becomes readable once the engine's process is gone."""
        self._channel = channel
        self._commands = MessageSender(RingBuffer(channel.commands))
        self._reports = RingBuffer(channel.reports)
        self._liveness = select.poll()
        self._liveness.register(liveness_fd, select.POLLIN)
        self._active_buffer = 1

    def send(self, command: Command) -> None:
        """Never waits."""
        self._commands.send(command)
        self._channel.wake_engine()

    def stage_weights(self, version: int, tensors: Mapping[str, Tensor]) -> StageWeights:
        """Copy a version to where the engine reads it, on any thread. The order that says so is the
        caller's to give. The one before must have been served or refused.
        """
        buffer = 1 - self._active_buffer
        return StageWeights(version, buffer, write_tensors(self._channel.weight_buffers[buffer], tensors))

    def reports(self) -> Iterator[Report]:
        """Those that are there. Raises EngineStartError or EngineBroken when the engine has failed or is gone."""
        self._commands.flush()
        exited = bool(self._liveness.poll(0))
        for message in self._reports.read():
            report = REPORT_DECODER.decode(message)
            if isinstance(report, EngineFailed):
                raise (EngineStartError if report.usage else EngineBroken)(report.reason)
            if isinstance(report, EngineLost):
                raise EngineBroken(f"{report.reason}; the server builds another guest in {report.seconds:.0f} s")
            if isinstance(report, WeightsActivated):
                self._active_buffer = 1 - self._active_buffer
            yield report
        if exited:
            raise EngineBroken("the engine's process has ended: its last words, if any, are in the log before this")

    def wait_until_ready(self, stop: Event) -> EngineStatus | None:
        """Wait for the engine to be ready; None once `stop` is set. Raises EngineStartError or EngineBroken."""
        while not stop.is_set():
            for report in self.reports():
                if isinstance(report, EngineStatus):
                    return report
            self.wait(READY_POLL_SECONDS)
        return None

    def wait(self, seconds: float) -> None:
        """So long, or until the engine's process is gone."""
        self._liveness.poll(1000 * seconds)
