"""How much a server could lend: a sidecar logs and exports what the server's engine core reports (`vllm/observing`)."""

import time
from collections.abc import Iterable
from itertools import accumulate
from threading import Event

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from rose.topics.health import HEALTH
from rose.topics.metrics import register, unregister
from rose.workers.executor.ipc.engine_client import EngineClient
from rose.workers.executor.ipc.messages import ObservationReport
from rose.workers.executor.metrics import SERVING_REQUESTS
from rose.workers.lender.recording import Recording
from rose.workers.lender.vllm.observing import STRETCH_BOUNDS

LOG_SECONDS = 60.0
"""Seconds between two log lines."""

POLL_SECONDS = 0.2
"""Longest time between two checks for a stop."""

LOGGED_QUANTILES = (0.5, 0.9)
"""Quantiles of the idle stretches in the log, as upper bounds of histogram buckets."""


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


def observe(client: EngineClient, stop: Event, recording: Recording | None = None) -> None:
    """Log, export and record observation reports until `stop` is set.

    Raises EngineBroken if the server is gone, or RoseError if the recording can no longer be written.
    """
    register(COLLECTOR)
    register(SERVING_REQUESTS)
    try:
        _observe(client, stop, recording)
    finally:
        unregister(COLLECTOR)
        unregister(SERVING_REQUESTS)
        COLLECTOR.report = None
        SERVING_REQUESTS.clear()


def _observe(client: EngineClient, stop: Event, recording: Recording | None) -> None:
    log, logs_at, most = structlog.get_logger("lender"), time.monotonic(), 0
    while not stop.is_set():
        for report in client.reports():
            if isinstance(report, ObservationReport):
                COLLECTOR.report, most = report, max(most, report.kv_bytes_most)
                HEALTH.report("observes its server, and lends nothing")
                SERVING_REQUESTS.labels("running").set(report.running)
                SERVING_REQUESTS.labels("waiting").set(report.waiting)
                if recording is not None:
                    recording.on_report(report)
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
