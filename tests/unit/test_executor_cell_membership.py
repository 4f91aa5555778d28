"""The cell of an executor and its moves, with grants and stored offsets set by the test."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.schemas.errors import UsageError
from rose.topics.catalog import DISPATCHED, HEARTBEATS, Topic, inbox_slot
from rose.topics.reader import Reader
from rose.topics.records import Place
from rose.topics.writer import Writer
from rose.workers.executor.cell_membership import INCARNATION_RANDOM_BITS, CellMembership, inbox_of
from rose.workers.executor.config import ExecutorConfig

NAMES = st.from_regex(r"[a-z0-9-]{1,30}", fullmatch=True)


def config(name: str = "pod-1", slot: int | None = None) -> ExecutorConfig:
    return ExecutorConfig(model_folder=Path(), name=name, slot=slot)


class ScriptedBus:
    """Two cells of four inboxes; a written record is stored when the test says so."""

    def __init__(self) -> None:
        self.next = 10
        self.coming: list[tuple[int, Callable[[int, int], None]]] = []
        self.reads: dict[Place, int] = {}

    def partition_count(self, topic: Topic) -> int:
        return {DISPATCHED: 4, HEARTBEATS: 2}[topic]

    def watermarks(self, _: Place) -> tuple[int, int]:
        return 0, self.next

    def assign(self, places: dict[Place, int]) -> None:
        self.reads = places

    def tombstone(self, _: Topic, *, key: str, partition: int, on_delivery: Callable[[int, int], None]) -> None:
        assert key == "pod-1"
        self.coming.append((partition, on_delivery))

    def flush(self) -> None:
        for partition, stored in self.coming:
            stored(partition, self.next)
            self.next += 1
        self.coming.clear()

    def membership_of(self, target_cell: int | None = None) -> CellMembership:
        return CellMembership(cast(Reader, self), cast(Writer, self), config(slot=2), target_cell)


def test_idle_executor_leaves_at_once_and_stays_listed_until_its_mark_is_stored() -> None:
    bus = ScriptedBus()
    membership_of = bus.membership_of()
    assert (membership_of.inbox, membership_of.cell, bus.reads) == ((DISPATCHED, 2), 0, {(DISPATCHED, 2): 11})
    before = membership_of.incarnation
    assert (
        not membership_of.advance(None, held_turns=0)
        and not membership_of.advance(0, held_turns=0)
        and not membership_of.leaving_for
    )
    assert not membership_of.advance(1, held_turns=0)
    assert membership_of.leaving_for == "it goes to cell 1", "nothing is taken on any more"
    assert not membership_of.advance(1, held_turns=0) and (membership_of.cell, membership_of.incarnation) == (0, before)
    [(slot, _)] = bus.coming
    bus.flush()
    assert membership_of.advance(1, held_turns=0) and (
        membership_of.cell,
        membership_of.inbox,
        membership_of.leaving_for,
    ) == (1, (DISPATCHED, slot), None)
    assert slot % 2 == 1 and bus.reads == {(DISPATCHED, slot): 12}
    assert membership_of.incarnation >> INCARNATION_RANDOM_BITS == 11 and not membership_of.advance(1, held_turns=0)


def test_busy_executor_leaves_at_the_next_version_unless_called_back() -> None:
    bus = ScriptedBus()
    membership_of = bus.membership_of()
    assert not membership_of.advance(1, held_turns=2) and not membership_of.leaving_for
    membership_of.on_version_change(1)
    assert membership_of.leaving_for
    assert not membership_of.advance(0, held_turns=2) and not membership_of.leaving_for, "it is told to stay"
    membership_of.on_version_change(1)
    assert not membership_of.advance(1, held_turns=1) and not bus.coming, "it has not given all back"
    membership_of.advance(1, held_turns=0)
    bus.flush()
    assert membership_of.advance(0, held_turns=0) and membership_of.cell == 1, "once it has begun there it goes"
    membership_of.advance(0, held_turns=0)
    bus.flush()
    assert membership_of.advance(0, held_turns=0) and membership_of.inbox == (DISPATCHED, 2), (
        "back where it was told to be"
    )


def test_executor_stays_listed_until_results_of_late_dispatches_are_stored() -> None:
    bus = ScriptedBus()
    membership_of = bus.membership_of()
    membership_of.advance(1, held_turns=0)
    bus.flush()
    assert not membership_of.advance(1, held_turns=1) and (membership_of.cell, membership_of.leaving_for) == (
        0,
        "it goes to cell 1",
    )
    assert membership_of.advance(1, held_turns=0) and membership_of.cell == 1


def test_nonexistent_cell_changes_nothing() -> None:
    bus = ScriptedBus()
    membership_of = bus.membership_of(target_cell=2)
    membership_of.on_version_change(7)
    assert not membership_of.advance(7, held_turns=0) and (
        membership_of.cell,
        membership_of.leaving_for,
        bus.coming,
    ) == (0, None, [])


@given(NAMES, st.none() | st.integers(0, 9), st.integers(1, 40), st.integers(1, 9))
def test_executor_starts_in_its_granted_cell_and_always_in_the_same_inbox(
    name: str, target_cell: int | None, slots: int, cells: int
) -> None:
    topic, slot = inbox_of(config(name), target_cell, slots=slots, cells=cells)
    assert topic is DISPATCHED and 0 <= slot < slots
    if target_cell is None or target_cell >= min(slots, cells):
        assert slot == inbox_slot(name, slots)
    else:
        assert slot % cells == target_cell
        assert inbox_of(config(name, slot), target_cell, slots=slots, cells=cells) == (DISPATCHED, slot)


def test_executors_that_join_a_cell_are_spread_over_its_inboxes() -> None:
    slots = {inbox_of(config(f"pod-{n}"), 1, slots=8, cells=2)[1] for n in range(40)}
    assert slots == {1, 3, 5, 7}


def test_executor_without_an_inbox_reports_the_fix() -> None:
    assert inbox_of(config(slot=0), None, slots=1, cells=1) == (DISPATCHED, 0)
    with pytest.raises(UsageError, match=r"slot is 1 and the last inbox 0: .* `rose topics create` adds"):
        inbox_of(config(slot=1), None, slots=1, cells=1)
