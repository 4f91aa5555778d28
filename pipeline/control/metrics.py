"""Prometheus metrics of the control app, read from its core at each scrape."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rose.pipeline.control.elasticity import ElasticityCore


class ControlCollector(Collector):
    """Reads the core at each scrape."""

    def __init__(self, core: ElasticityCore, clock: Callable[[], float]) -> None:
        self._core = core
        self._clock = clock

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics with their present values."""
        decides, cells, lenders, woken, parked, moved, moving, work = self.describe()
        control, now = self._core, self._clock()
        live = control.live_summaries(now)
        decides.add_metric([], bool(live))
        cells.add_metric([], len(live))
        if live:
            known = list(control.lenders.items())
            lending = [name for name, lender in known if lender.lends]
            lenders.add_metric(["lends"], len(lending))
            lenders.add_metric(["parked"], sum(lender.lends is False for _, lender in known))
            lenders.add_metric(["by hand"], sum(name in control.manual_grants for name, _ in known))
            lenders.add_metric(["drained"], sum(name in control.drains for name, _ in known))
            work.add_metric([], max(each.waiting_seconds for each in live))
        woken.add_metric([], control.woken)
        parked.add_metric([], control.parked)
        moved.add_metric([], control.rebalancer.moves)
        moving.add_metric([], len(control.rebalancer.moving_workers(now)))
        yield from (decides, cells, lenders, woken, parked, moved, moving, work)

    @staticmethod
    def describe() -> list[CounterMetricFamily | GaugeMetricFamily]:
        """Empty metric families, in the order in which `collect` fills them."""
        return [
            GaugeMetricFamily("rose_control_decides", "Whether this control app decides; one of several does."),
            GaugeMetricFamily("rose_control_cells", "Cells whose routers send summaries."),
            GaugeMetricFamily(
                "rose_control_lenders", "Lenders by decision: lend, park, manual grant or drain.", labels=["told"]
            ),
            CounterMetricFamily("rose_control_woken", "Times that a lender was woken."),
            CounterMetricFamily("rose_control_parked", "Times that a lender was parked."),
            CounterMetricFamily("rose_control_moved", "Moves of a worker to another cell."),
            GaugeMetricFamily("rose_control_moving", "Workers that move to another cell."),
            GaugeMetricFamily(
                "rose_control_waiting_seconds",
                "Time that the open executors need for the waiting turns, in the worst cell.",
            ),
        ]


@contextmanager
def export_metrics(core: ElasticityCore, clock: Callable[[], float]) -> Iterator[None]:
    """Export the metrics of the core for the duration of the context."""
    collector = ControlCollector(core, clock)
    REGISTRY.register(collector)
    try:
        yield
    finally:
        REGISTRY.unregister(collector)
