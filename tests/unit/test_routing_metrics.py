"""What the router exports is what its core counts."""

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import REGISTRY

from pipeline.routing.metrics import exported
from pipeline.routing.router import Router
from pipeline.routing.skew import Skews
from schemas.slack import ExecutorState
from tests.unit.routing_world import World, request


@dataclass
class Serving:
    router: Router
    skews: Skews
    clock: Callable[[], float]


def test_the_exported_counts_are_the_cores() -> None:
    world = World()
    world.version = 4
    world.beat(0, policy_version=4, max_turns=1)
    skews = Skews()
    for second in range(12):
        skews.heard("w0", second - 7.0, float(second))
    with exported(lambda: Serving(world.router, skews, lambda: world.now + 30.0)):
        for index in range(3):
            world.ask(request(f"g0:{index}"))
        found = {
            name: REGISTRY.get_sample_value(f"rose_router_{name}")
            for name in ("turns_requested_total", "waiting_turns")
        }
        assert found == {"turns_requested_total": 3, "waiting_turns": 2}
        assert REGISTRY.get_sample_value("rose_router_oldest_waiting_seconds") == 30.0
        assert REGISTRY.get_sample_value("rose_router_outstanding_turns") == 1
        assert REGISTRY.get_sample_value("rose_router_executors", {"standing": "live"}) == 1
        assert REGISTRY.get_sample_value("rose_router_policy_version") == 4
        assert REGISTRY.get_sample_value("rose_router_clock_behind_seconds", {"worker": "w0"}) == 7
        assert REGISTRY.get_sample_value("rose_router_serves") == 1
    assert REGISTRY.get_sample_value("rose_router_turns_requested_total") is None


def test_of_a_clock_whose_executor_is_gone_or_was_never_there_nothing_is_said() -> None:
    world = World()
    world.beat(0)
    skews = Skews()
    for second in range(12):
        for worker in ("w0", "nobody"):
            skews.heard(worker, second - 7.0, float(second))
    with exported(lambda: Serving(world.router, skews, lambda: world.now)):
        behind = "rose_router_clock_behind_seconds"
        assert REGISTRY.get_sample_value(behind, {"worker": "w0"}) == 7
        assert REGISTRY.get_sample_value(behind, {"worker": "nobody"}) is None
        world.beat(0, state=ExecutorState.STOPPING)
        assert REGISTRY.get_sample_value(behind, {"worker": "w0"}) is None


def test_a_router_that_waits_exports_that_it_does() -> None:
    with exported(lambda: None):
        assert REGISTRY.get_sample_value("rose_router_serves") == 0
        assert REGISTRY.get_sample_value("rose_router_turns_requested_total") is None
