"""Observation of a server's idle time in its engine core's loop, without a guest and without lent memory.

Keeps true
- Every moment since the start is idle or busy, and each idle stretch that has ended is counted once.
- Serving's loop works as without observation; each pass takes microseconds more, and there is one report a second.
- The engine core imports this module, which therefore loads no Kafka client and draws no random number.
"""

import time
from bisect import bisect_left
from collections.abc import Callable
from logging import Logger
from pathlib import Path
from typing import Any

from rose.workers.executor.ipc.messages import ObservationReport
from rose.workers.executor.vllm.types import block_bytes
from rose.workers.lender.config import LendConfig
from rose.workers.lender.sidecar_link import CurrentSidecar, SidecarListener

STRETCH_BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Upper bounds of the histogram of idle stretches, in seconds. A further bucket counts longer stretches."""


class IdleStretches:
    """Idle time of one server, which is idle at the start. Pure; `now` is seconds on any one clock.

    Example: on_busy(0), on_idle(2), on_busy(5), read at 10 -> 10 s observed, 3 s idle, one stretch of 3 s
    """

    def __init__(self, now: float) -> None:
        self.stretches = [0] * (len(STRETCH_BOUNDS) + 1)
        """Number of ended idle stretches, by bucket of STRETCH_BOUNDS."""
        self.stretch_seconds = 0.0
        """Sum of the ended idle stretches, in seconds."""
        self._began = now
        self._idle_since: float | None = now

    def on_busy(self, now: float) -> None:
        """Record that serving has work from `now` on."""
        if self._idle_since is not None:
            seconds = now - self._idle_since
            self.stretches[bisect_left(STRETCH_BOUNDS, seconds)] += 1
            self.stretch_seconds += seconds
            self._idle_since = None

    def on_idle(self, now: float) -> None:
        """Record that serving has no work from `now` on."""
        if self._idle_since is None:
            self._idle_since = now

    def seconds(self, now: float) -> float:
        """Seconds since the start of the observation."""
        return now - self._began

    def idle_seconds(self, now: float) -> float:
        """Idle seconds since the start, the current stretch included."""
        return self.stretch_seconds + (now - self._idle_since if self._idle_since is not None else 0.0)


REPORT_SECONDS = 1.0


def observe_core(core: Any, config: LendConfig, wake: Callable[[], None], log: Logger) -> None:
    """Report the idle time of `core`, an EngineCoreProc, to the sidecars that connect. Raises UsageError.

    `wake`: ends the loop's wait for input.
    """
    process_input_queue, process_engine_step = core._process_input_queue, core._process_engine_step
    arrived = core.input_queue.queue

    listener = SidecarListener(Path(config.socket), wake, heartbeat_seconds=REPORT_SECONDS, log=log)
    observer = Observer(core.scheduler, listener)

    def take_input() -> None:
        core.process_input_queue_block = True
        listener.arm_wakeup()
        if observer.sidecar.changed:
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
        self.sidecar = CurrentSidecar(listener)
        self._pool = scheduler.kv_cache_manager.block_pool
        self._scheduler = scheduler
        kv = scheduler.kv_cache_config
        self._blocks = kv.num_blocks - 1  # vLLM reserves one block
        self._block_bytes = block_bytes(kv)
        self._most_blocks = 0
        """Most blocks that were held since the last report."""
        self._report_at = 0.0

    def on_step(self) -> None:
        """Update the counts, and report if it is time. Call it after each step of the loop."""
        self._most_blocks = max(self._most_blocks, self._held_blocks)
        if self.sidecar.changed:
            self.sidecar.switch()
        now, reports = time.monotonic(), self.sidecar.reports
        if reports is not None and now >= self._report_at and not len(reports):
            self._report_at = now + REPORT_SECONDS
            reports.send(self._report(now))
            self._most_blocks = 0

    @property
    def _held_blocks(self) -> int:
        """Blocks of serving's requests, without cached prefixes that no request holds."""
        return int(self._blocks - self._pool.get_num_free_blocks())

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
