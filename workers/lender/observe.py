"""How much a server could lend: measured in its engine core's loop without a guest, logged and exported by a sidecar.

Keeps true
- Every moment since the start is idle or busy, and each idle stretch that has ended is counted once.
- Serving's loop works as without observation; each pass takes microseconds more, and there is one report a second.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import accumulate
from logging import Logger
from pathlib import Path
from threading import Event
from typing import Any

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from rose.topics.health import HEALTH
from rose.topics.metrics import register, unregister
from rose.workers.executor.ipc.engine_client import EngineClient
from rose.workers.executor.ipc.messages import ObservationReport
from rose.workers.executor.metrics import SERVING_REQUESTS
from rose.workers.lender.config import LendConfig
from rose.workers.lender.sidecar_link import CurrentSidecar, SidecarListener

LOG_SECONDS = 60.0
"""Seconds between two log lines."""

POLL_SECONDS = 0.2
"""Longest time between two checks for a stop."""

LOGGED_QUANTILES = (0.5, 0.9)
"""Quantiles of the idle stretches in the log, as upper bounds of histogram buckets."""


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
        self._block_bytes = sum(tensor.size for tensor in kv.kv_cache_tensors) // kv.num_blocks
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


class ObservationCollector(Collector):
    """Exports the newest observation report of the server as metrics."""

    def __init__(self) -> None:
        self.report: ObservationReport | None = None

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of the newest report; none without a report. Called on the metrics server's threads."""
        seen = self.report
        if seen is None:
            return
        observed, idle, stretches, kv = self.describe()
        observed.add_metric([], seen.seconds)
        idle.add_metric([], seen.idle_seconds)
        bounds = [*map(str, STRETCH_BOUNDS), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(seen.stretches)), strict=True))
        stretches.add_metric([], buckets, seen.stretch_seconds)
        kv.add_metric(["held"], seen.kv_bytes_held)
        kv.add_metric(["most"], seen.kv_bytes_most)
        kv.add_metric(["total"], seen.kv_bytes_total)
        yield from (observed, idle, stretches, kv)

    @staticmethod
    def describe() -> tuple[CounterMetricFamily, CounterMetricFamily, HistogramMetricFamily, GaugeMetricFamily]:
        """Return the metric families without samples, which `collect` fills."""
        return (
            CounterMetricFamily("rose_lender_observed_seconds", "Time that a server was observed."),
            CounterMetricFamily("rose_lender_idle_seconds", "Observed time without a serving request."),
            HistogramMetricFamily("rose_lender_idle_stretch_seconds", "Length of idle stretches that have ended."),
            GaugeMetricFamily(
                "rose_lender_serving_kv_bytes",
                "KV cache of serving: held, most since the last report, and in total.",
                labels=["what"],
            ),
        )


COLLECTOR = ObservationCollector()
"""The collector of this process."""


def observe(client: EngineClient, stop: Event) -> None:
    """Log and export observation reports until `stop` is set. Raises EngineBroken if the server is gone."""
    register(COLLECTOR)
    register(SERVING_REQUESTS)
    try:
        _observe(client, stop)
    finally:
        unregister(COLLECTOR)
        unregister(SERVING_REQUESTS)
        COLLECTOR.report = None
        SERVING_REQUESTS.clear()


def _observe(client: EngineClient, stop: Event) -> None:
    log, logs_at, most = structlog.get_logger("lender"), time.monotonic(), 0
    while not stop.is_set():
        for report in client.reports():
            if isinstance(report, ObservationReport):
                COLLECTOR.report, most = report, max(most, report.kv_bytes_most)
                HEALTH.report("observes its server, and lends nothing")
                SERVING_REQUESTS.labels("running").set(report.running)
                SERVING_REQUESTS.labels("waiting").set(report.waiting)
        if COLLECTOR.report is not None and time.monotonic() >= logs_at:
            logs_at = time.monotonic() + LOG_SECONDS
            log.info("idle_capacity_observed", **log_fields(COLLECTOR.report, most))
            most = 0
        client.wait(POLL_SECONDS)


def log_fields(report: ObservationReport, kv_bytes_most: int) -> dict[str, str]:
    """Return the fields of a log line. `kv_bytes_most`: most KV bytes of serving since the log line before."""
    figures = {
        "observed": f"{report.seconds:.0f} s",
        "idle": f"{report.idle_seconds / report.seconds:.1%}" if report.seconds else "nothing yet",
        "stretches": str(sum(report.stretches)),
        "serving_kv_most": f"{kv_bytes_most / max(1, report.kv_bytes_total):.1%}",
    }
    for share in LOGGED_QUANTILES:
        figures[f"stretch_p{100 * share:.0f}"] = _quantile(report.stretches, share)
    return figures


def _quantile(stretches: tuple[int, ...], share: float) -> str:
    total = sum(stretches)
    for bound, counted in zip(STRETCH_BOUNDS, accumulate(stretches), strict=False):
        if total and counted >= share * total:
            return f"<= {bound:g} s"
    return f"> {STRETCH_BOUNDS[-1]:g} s" if total else "none yet"
