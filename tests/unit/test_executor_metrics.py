"""Exported metrics of an executor are current: a restarting executor exports nothing until it is ready."""

from prometheus_client import REGISTRY

from rose.workers.executor import metrics
from rose.workers.executor.ipc.messages import EngineStatus, LendingStats, ServingStats

TICK = EngineStatus(
    7, "cpu", 0, 0, 200, 100, 1, 1.0, 1.0, 0, 0.0, lending=LendingStats(budget_bytes=64, frozen=True, cuts=2)
)
SLACK = ServingStats(5, 2, 0.5, 0.25, 0.01, 0.01, 0.1, 0.1, 0.1, {})
GAUGES = ("rose_executor_policy_version", "rose_executor_kv_free_bytes", "rose_lender_budget_bytes")


def metric(name: str) -> float | None:
    return REGISTRY.get_sample_value(name)


def test_restarted_executor_metrics_pause_and_keep_counting() -> None:
    with metrics.exported():
        metrics.show_held(TICK, turns=1, version=7)
        metrics.show_lending(TICK)
        metrics.show_serving(SLACK)
        cuts = metric("rose_lender_cuts_total")
        assert [*map(metric, GAUGES)] == [7, 100, 64] and cuts is not None
    assert [*map(metric, (*GAUGES, "rose_lender_cuts_total"))] == [None] * 4
    with metrics.exported():
        assert [*map(metric, GAUGES)] == [-1, 0, None], "it has heard of no guest yet"
        metrics.show_serving(SLACK)
        assert (metric("rose_lender_budget_bytes"), metric("rose_lender_frozen")) == (0, 0)
        metrics.show_lending(TICK)
        assert (metric("rose_lender_budget_bytes"), metric("rose_lender_cuts_total")) == (64, cuts + 2)
