"""The executor's side of the channel: sends commands to the engine, reads its reports, and copies weights for it.

Keeps true
- Commands arrive in the order in which they were sent, and no sender waits for the engine.
- Versions are copied one at a time, into the weight buffer that does not serve.
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
"""Seconds between two polls for the first report of an engine, whose start takes seconds."""


class EngineClient:
    """Client of one engine, in any process."""

    def __init__(self, channel: ChannelFds, liveness_fd: int) -> None:
        """`liveness_fd`: a descriptor that becomes readable when the engine's process is gone."""
        self._channel = channel
        self._commands = MessageSender(RingBuffer(channel.commands))
        self._reports = RingBuffer(channel.reports)
        self._liveness = select.poll()
        self._liveness.register(liveness_fd, select.POLLIN)
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
            if isinstance(report, WeightsActivated):
                self._active_buffer = 1 - self._active_buffer
            yield report
        if exited:
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
