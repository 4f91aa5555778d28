"""The router exports the counts of its core."""

from collections.abc import Callable
from dataclasses import dataclass, field

from prometheus_client import REGISTRY

from rose.pipeline.routing.liveness import ClockSkews
from rose.pipeline.routing.membership import CellOwnership
from rose.pipeline.routing.metrics import export_metrics
from rose.pipeline.routing.router import Router
from rose.schemas.heartbeats import ExecutorState
from tests.support.routing_fixtures import RoutingSimulation, request


@dataclass
class ServingCell:
    router: Router
    clock_skews: ClockSkews
    clock: Callable[[], float]


@dataclass
class Serving:
    cells: int
    sessions: dict[CellOwnership, ServingCell] = field(default_factory=dict)


def sample(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"rose_router_{name}", labels)


def test_exported_counts_equal_the_router_counts() -> None:
    simulation = RoutingSimulation()
    simulation.version = 4
    simulation.beat(0, policy_version=4, max_turns=1)
    clock_skews = ClockSkews()
    for second in range(12):
        clock_skews.on_heartbeat("w0", second - 7.0, float(second))
    with export_metrics(
        Serving(6, {CellOwnership(4, 1): ServingCell(simulation.router, clock_skews, lambda: simulation.now + 30.0)})
    ):
        for index in range(3):
            simulation.ask(request(f"g0:{index}"))
        assert sample("turns_requested_total", cell="4") == 3
        assert sample("waiting_turns", cell="4") == 2
        assert sample("oldest_waiting_seconds", cell="4") == 30.0
        assert sample("outstanding_turns", cell="4") == 1
        assert sample("executors", cell="4", standing="live") == 1
        assert sample("policy_version", cell="4") == 4
        assert sample("clock_behind_seconds", cell="4", worker="w0") == 7
        assert (sample("serves"), sample("cells")) == (1, 6)
    assert sample("turns_requested_total", cell="4") is None


def test_each_cell_has_its_own_counts() -> None:
    one, other = RoutingSimulation(), RoutingSimulation()
    other.ask(request("g0:0"))
    sessions = {
        CellOwnership(cell, 1): ServingCell(simulation.router, ClockSkews(), lambda: 0.0)
        for cell, simulation in ((0, one), (2, other))
    }
    with export_metrics(Serving(3, sessions)):
        assert [sample("turns_requested_total", cell=str(cell)) for cell in range(3)] == [0, None, 1]
        assert sample("serves") == 2


def test_clock_skew_of_a_gone_or_unknown_executor_is_not_exported() -> None:
    simulation = RoutingSimulation()
    simulation.beat(0)
    clock_skews = ClockSkews()
    for second in range(12):
        for worker in ("w0", "nobody"):
            clock_skews.on_heartbeat(worker, second - 7.0, float(second))
    with export_metrics(
        Serving(1, {CellOwnership(0, 1): ServingCell(simulation.router, clock_skews, lambda: simulation.now)})
    ):
        assert sample("clock_behind_seconds", cell="0", worker="w0") == 7
        assert sample("clock_behind_seconds", cell="0", worker="nobody") is None
        simulation.beat(0, state=ExecutorState.STOPPING)
        assert sample("clock_behind_seconds", cell="0", worker="w0") is None


def test_metrics_of_a_router_without_a_cell_have_no_counts() -> None:
    with export_metrics(Serving(1)):
        assert (sample("serves"), sample("cells")) == (0, 1)
        assert sample("turns_requested_total", cell="0") is None
