"""What the router exports is what its core counts."""

from prometheus_client import REGISTRY

from pipeline.routing.metrics import exported
from tests.unit.routing_world import World, manifest, request


def test_the_exported_counts_are_the_cores() -> None:
    world = World()
    world.feed(manifest(4))
    world.version = 4
    world.beat(0, policy_version=4, max_turns=1)
    with exported(world.router):
        for index in range(3):
            world.ask(request(f"g0:{index}"))
        found = {
            name: REGISTRY.get_sample_value(f"rose_router_{name}") for name in ("requested_total", "waiting_turns")
        }
        assert found == {"requested_total": 3, "waiting_turns": 2}
        assert REGISTRY.get_sample_value("rose_router_outstanding_turns") == 1
        assert REGISTRY.get_sample_value("rose_router_executors", {"standing": "live"}) == 1
        assert REGISTRY.get_sample_value("rose_router_policy_version") == 4
    assert REGISTRY.get_sample_value("rose_router_requested_total") is None
