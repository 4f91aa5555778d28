"""Three router processes share six cells: no turn is lost when a router leaves or joins."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from rose.pipeline.local.fork_server import ForkedProcess
from rose.pipeline.routing.membership import SESSION_SECONDS, OwnershipLost, RouterMembership
from rose.schemas.cells import CellSummary
from rose.topics.admin import create_topics
from rose.topics.catalog import SUMMARIES, Partitions
from rose.topics.log_reader import read_whole_topics
from tests.support.brokers import EMBEDDED, AnyBroker, kafka_first
from tests.support.roles import freeze, kill, stop, thaw
from tests.support.router_process_fixtures import RouterHarness, router_process

CELLS = 6
PARTITIONS = Partitions(home=CELLS, slots=2 * CELLS, samples=1, chunks=1, cells=CELLS)
MAX_TURNS = 3

pytestmark = pytest.mark.slow


class Routers:
    """Routers by number, and the cells that they report."""

    def __init__(self, bus: RouterHarness, processes: ExitStack) -> None:
        self._bus = bus
        self._processes = processes
        self.running: dict[int, ForkedProcess] = {}

    def begin(self, *numbers: int) -> None:
        for number in numbers:
            self.running[number] = self._processes.enter_context(router_process(self._bus.settings, number))

    def by_cell(self) -> dict[int, str]:
        """Return the router of the last summary of each cell."""
        found = read_whole_topics(self._bus.settings, [SUMMARIES])
        return {each.record.cell: each.record.router for each in found if isinstance(each.record, CellSummary)}

    def until_shared_by(self, *numbers: int) -> None:
        """Wait until every cell is served, each of these routers serves some cells, and no other router serves any."""
        names = {f"router-{number}" for number in numbers}
        self._bus.until(lambda: len(owners := self.by_cell()) == CELLS and set(owners.values()) == names)


@pytest.fixture
def bus(broker: AnyBroker, namespace: str) -> Iterator[RouterHarness]:
    settings = broker.settings(namespace)
    create_topics(settings, PARTITIONS)
    bus = RouterHarness(settings, PARTITIONS)
    for worker in range(PARTITIONS.slots):
        bus.beat(worker, slot=worker, max_turns=MAX_TURNS)
    yield bus
    bus.close()


@pytest.fixture
def routers(bus: RouterHarness) -> Iterator[Routers]:
    with ExitStack() as processes:
        yield Routers(bus, processes)


def whole(bus: RouterHarness) -> None:
    """Assert that every turn is answered once by an executor of its cell, and that no executor held more than its
    offer."""
    bus.finish()
    assert all(each.slot % CELLS == each.home % CELLS for each in bus.inboxes)
    assert bus.most_held <= MAX_TURNS


@kafka_first
def test_routers_share_the_cells_and_a_change_moves_only_some(bus: RouterHarness, routers: Routers) -> None:
    routers.begin(0)
    routers.until_shared_by(0)
    bus.keep_turns_moving(1.0, 2 * CELLS)
    routers.begin(1, 2)
    routers.until_shared_by(0, 1, 2)
    bus.keep_turns_moving(2.0, 4 * CELLS)
    if bus.settings.embedded:
        whole(bus)  # there the cells of a leaving router wait for its return
        return
    stop(routers.running[1])
    routers.until_shared_by(0, 2)
    bus.keep_turns_moving(1.0, 2 * CELLS)
    whole(bus)


@kafka_first
def test_cells_of_a_killed_router_continue_elsewhere(bus: RouterHarness, routers: Routers, broker_kind: str) -> None:
    routers.begin(0, 1, 2)
    routers.until_shared_by(0, 1, 2)
    bus.keep_turns_moving(1.0, 2 * CELLS)
    kill(routers.running[1])
    if broker_kind == EMBEDDED:
        routers.begin(1)
    bus.keep_turns_moving(SESSION_SECONDS, 4 * CELLS)
    if broker_kind != EMBEDDED:
        routers.until_shared_by(0, 2)
        routers.begin(1)
    routers.until_shared_by(0, 1, 2)
    bus.keep_turns_moving(1.0, 2 * CELLS)
    whole(bus)


@kafka_first
def test_router_resumed_after_a_freeze_does_no_harm_in_any_cell(bus: RouterHarness, routers: Routers) -> None:
    routers.begin(0, 1, 2)
    routers.until_shared_by(0, 1, 2)
    freeze(routers.running[2])
    bus.keep_turns_moving(2 * SESSION_SECONDS, 4 * CELLS)
    thaw(routers.running[2])
    routers.until_shared_by(0, 1, 2)
    bus.keep_turns_moving(1.0, 2 * CELLS)
    whole(bus)


def test_cell_ownership_is_one_unbroken_period(bus: RouterHarness) -> None:
    one = RouterMembership(bus.settings, "router-0")
    bus.until(lambda: len(one.poll(0.05)) == CELLS)
    alone = one.owned
    if not bus.settings.embedded:  # there the cells of a leaving router wait for its return
        other = RouterMembership(bus.settings, "router-1")
        bus.until(lambda: 0 < len(one.poll(0.05)) < CELLS > len(other.poll(0.05)) > 0)
        kept, lost = one.owned, alone - one.owned
        assert kept < alone, "what it keeps is what it had"
        assert {each.cell for each in other.owned} == {each.cell for each in lost}
        with pytest.raises(OwnershipLost):
            one.ensure_owner(next(iter(lost)))
        other.close()
        bus.until(lambda: len(one.poll(0.05)) == CELLS)
        assert one.owned & alone == kept, "what it comes by again may have been another's"
    one.rejoin()
    bus.until(lambda: len(one.poll(0.05)) == CELLS)
    assert not one.owned & alone
    one.close()
