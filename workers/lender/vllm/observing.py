"""Observation of a server's idle time from its engine core's loop, without a guest and without lent memory.

Keeps true: serving's loop works as without observation; each pass takes microseconds more, and there is one report a
second.
"""

import time
from logging import Logger
from pathlib import Path
from typing import Any

from vllm.v1.engine import EngineCoreRequestType

from rose.workers.executor.ipc.messages import MessageSender, ObservationReport
from rose.workers.executor.ipc.shared_memory import RingBuffer
from rose.workers.lender.config import LendConfig
from rose.workers.lender.idle_stretches import IdleStretches
from rose.workers.lender.sidecar_link import Connection, SidecarListener

REPORT_SECONDS = 1.0


def observe(core: Any, config: LendConfig, log: Logger) -> None:
    """Report the idle time of `core`, an EngineCoreProc, to the sidecars that connect. Raises UsageError."""
    process_input_queue, process_engine_step = core._process_input_queue, core._process_engine_step
    arrived = core.input_queue.queue

    def wake() -> None:
        core.process_input_queue_block = False  # first: the loop may be about to sleep
        core.input_queue.put((EngineCoreRequestType.WAKEUP, None))

    listener = SidecarListener(Path(config.socket), wake, heartbeat_seconds=REPORT_SECONDS, log=log)
    observer = Observer(core.scheduler, listener)

    def take_input() -> None:
        core.process_input_queue_block = True
        listener.arm_wakeup()
        if listener.connection is not observer.link:
            core.process_input_queue_block = False
        process_input_queue()
        if core.scheduler.has_requests():
            observer.idleness.on_busy(time.monotonic())

    def step() -> bool:
        executed: bool = process_engine_step()
        if not arrived and not core.scheduler.has_requests():
            observer.idleness.on_idle(time.monotonic())
        observer.on_step()
        return executed

    core._process_input_queue = take_input
    core._process_engine_step = step


class Observer:
    """The observation of one server."""

    def __init__(self, scheduler: Any, listener: SidecarListener) -> None:
        self.idleness = IdleStretches(time.monotonic())
        self.link: Connection | None = None
        """The listener's connection at the last step."""
        self._listener = listener
        self._pool = scheduler.kv_cache_manager.block_pool
        self._scheduler = scheduler
        kv = scheduler.kv_cache_config
        self._blocks = kv.num_blocks - 1  # vLLM reserves one block
        self._block_bytes = sum(tensor.size for tensor in kv.kv_cache_tensors) // kv.num_blocks
        self._most_blocks = 0
        """Most blocks that were held since the last report."""
        self._report_at = 0.0
        self._reports: MessageSender | None = None

    def on_step(self) -> None:
        """Update the counts, and report if it is time. Call it after each step of the loop."""
        self._most_blocks = max(self._most_blocks, self._held_blocks)
        if self._listener.connection is not self.link:
            self._switch_connection()
        now = time.monotonic()
        if self._reports is not None and now >= self._report_at and not len(self._reports):
            self._report_at = now + REPORT_SECONDS
            self._reports.send(self._report(now))
            self._most_blocks = 0

    @property
    def _held_blocks(self) -> int:
        """Blocks of serving's requests, without cached prefixes that no request holds."""
        return int(self._blocks - self._pool.get_num_free_blocks())

    def _switch_connection(self) -> None:
        while self._listener.closed:  # first: the connection that is used from now on may end at any moment
            self._listener.closed.pop().close()
        self.link = self._listener.connection
        self._reports = None if self.link is None else MessageSender(RingBuffer(self.link.channel.reports))

    def _report(self, now: float) -> ObservationReport:
        running, waiting = self._scheduler.get_request_counts()
        return ObservationReport(
            seconds=self.idleness.seconds(now),
            idle_seconds=self.idleness.idle_seconds(now),
            stretches=tuple(self.idleness.stretches),
            stretch_seconds=self.idleness.stretch_seconds,
            running=running,
            waiting=waiting,
            kv_bytes_total=self._blocks * self._block_bytes,
            kv_bytes_held=self._held_blocks * self._block_bytes,
            kv_bytes_most=self._most_blocks * self._block_bytes,
        )
