"""Observed idle capacity: all time is idle or busy, and each stretch is counted once in its bucket."""

from threading import Event
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from rose.workers.executor.ipc.messages import ObservationReport, Report
from rose.workers.executor.vllm.types import EngineBroken
from rose.workers.lender.observe import ObservationCollector, log_fields, observe
from rose.workers.lender.vllm.observing import STRETCH_BOUNDS, IdleStretches


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 500.0)), max_size=60))
def test_all_time_is_idle_or_busy_and_each_idle_stretch_is_counted(history: list[tuple[bool, float]]) -> None:
    """Each event is the new state of serving, and the time since the last event."""
    idleness, now, idle, stretches, since = IdleStretches(0.0), 0.0, 0.0, list[float](), 0.0
    is_idle = True
    for becomes_idle, seconds in history:
        now += seconds
        idle += seconds * is_idle
        if is_idle and not becomes_idle:
            stretches.append(now - since)
        elif not is_idle and becomes_idle:
            since = now
        is_idle = becomes_idle
        (idleness.on_idle if becomes_idle else idleness.on_busy)(now)
        assert idleness.seconds(now) == now
        assert idleness.idle_seconds(now) == pytest.approx(idle)
    for place, upper in enumerate(STRETCH_BOUNDS):
        lower = STRETCH_BOUNDS[place - 1] if place else -1.0
        assert idleness.stretches[place] == sum(lower < length <= upper for length in stretches)
    assert sum(idleness.stretches) == len(stretches)


def test_idle_stretches_are_exported_and_logged() -> None:
    observed = ObservationCollector()
    assert list(observed.collect()) == []
    counts = tuple(1 if place in (2, 6) else 0 for place in range(len(STRETCH_BOUNDS) + 1))
    observed.report = ObservationReport(10.0, 4.0, counts, 1.009, 1, 0, 1000, 100, 250)
    metrics = {sample.name: sample.value for metric in observed.collect() for sample in metric.samples}
    assert metrics["rose_lender_idle_seconds_total"] == 4.0
    assert metrics["rose_lender_idle_stretch_seconds_count"] == 2.0
    words = log_fields(observed.report, 250)
    assert (words["idle"], words["serving_kv_most"], words["stretch_p50"]) == ("40.0%", "25.0%", "<= 0.01 s")


class Link:
    """A link to a server that sends these reports and is then gone."""

    def __init__(self, *reports: Report) -> None:
        self.pending = [*reports]

    def reports(self) -> list[Report]:
        if not self.pending:
            raise EngineBroken("it is gone")
        return [self.pending.pop(0)]

    def wait(self, seconds: float) -> None:
        assert REGISTRY.get_sample_value("rose_lender_serving_requests", {"state": "running"}) == 1


def test_gone_server_exports_nothing_until_a_new_server() -> None:
    counts = (0,) * (len(STRETCH_BOUNDS) + 1)
    for reports in ((), (ObservationReport(10.0, 4.0, counts, 1.009, 1, 0, 1000, 100, 250),), ()):
        link: Any = Link(*reports)
        with pytest.raises(EngineBroken):
            observe(link, Event())
        for name in ("rose_lender_observed_seconds_total", "rose_lender_serving_kv_bytes"):
            assert REGISTRY.get_sample_value(name) is None
        assert REGISTRY.get_sample_value("rose_lender_serving_requests", {"state": "running"}) is None
