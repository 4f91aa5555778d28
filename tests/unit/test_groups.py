"""Group assembly: every group comes once, whole, in whatever order its samples come, over any number of restarts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.samples import Sample
from tests.unit.samples import sample
from workers.trainer.groups import CompleteGroup, GroupAssembly, ResumePoint, Taken

Log = list[list[Sample]]
"""Partitions of samples."""


@st.composite
def logs(draw: st.DrawFn) -> Log:
    """Samples of some groups over some partitions, in any order, some of them twice, some groups not complete."""
    partitions: Log = [[] for _ in range(draw(st.integers(1, 3)))]
    samples = []
    for number in range(draw(st.integers(1, 6))):
        size = draw(st.integers(1, 4))
        for index in range(size):
            if draw(st.integers(0, 9)):
                samples += [sample(f"g{number}", index, size=size)] * draw(st.integers(1, 2))
    for one in draw(st.permutations(samples)):
        partitions[draw(st.integers(0, len(partitions) - 1))].append(one)
    return partitions


def offer(assembly: GroupAssembly, one: Sample, *, partition: int = 0, offset: int = 0) -> Taken:
    return assembly.offer(one, partition=partition, offset=offset, outcomes_from=0)


@dataclass
class Life:
    """A trainer from one start to its end, over what the lives before have left on the log."""

    log: Log
    outcomes: list[str]
    """Groups in the order of settling, as on the log."""
    begin: ResumePoint
    assembly: GroupAssembly = field(init=False)
    next: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.assembly = GroupAssembly(settled=self.outcomes[self.begin.outcomes_from :])
        self.next = dict(self.begin.offsets)
        self.ends = {number: len(partition) for number, partition in enumerate(self.log)}

    def read(self, partition: int) -> None:
        """One record further, if there is one."""
        offset = self.next[partition]
        if offset < len(self.log[partition]):
            self.next[partition] += 1
            known_from = self.begin.outcomes_from
            self.assembly.offer(
                self.log[partition][offset], partition=partition, offset=offset, outcomes_from=known_from
            )

    def settle(self, group: CompleteGroup) -> ResumePoint:
        self.assembly.settle(group.group_id)
        point = self.assembly.resume_at(self.next, outcomes_end=len(self.outcomes))
        self.outcomes.append(group.group_id)
        return point


@given(logs(), st.data())
def test_every_complete_group_is_settled_once_however_often_it_begins_again(log: Log, data: st.DataObject) -> None:
    outcomes: list[str] = []
    point = ResumePoint(dict.fromkeys(range(len(log)), 0), 0)
    for _ in range(data.draw(st.integers(0, 5))):
        life = Life(log, outcomes, point)
        taken: list[CompleteGroup] = []
        for act in data.draw(st.lists(st.sampled_from(["read", "read", "take", "settle"]), max_size=30)):
            if act == "read":
                life.read(data.draw(st.integers(0, len(log) - 1)))
            elif act == "take":
                taken += life.assembly.take(1)
            elif taken:
                point = life.settle(taken.pop(data.draw(st.integers(0, len(taken) - 1))))
    last = Life(log, outcomes, point)
    for partition, records in enumerate(log):
        for _ in records:
            last.read(partition)
    for group in last.assembly.take(len(outcomes) + 100):
        last.settle(group)
    every = {one.trajectory_id: one for partition in log for one in partition}.values()
    sizes = {one.group_id: one.group_size for one in every}
    complete = [name for name, size in sizes.items() if sum(one.group_id == name for one in every) == size]
    assert sorted(outcomes) == sorted(complete)


@given(logs())
def test_the_same_order_gives_the_same_groups(log: Log) -> None:
    def groups() -> list[CompleteGroup]:
        assembly = GroupAssembly()
        found: list[CompleteGroup] = []
        for one in (one for partition in log for one in partition):
            offer(assembly, one)
            found += assembly.take(1)
        return found

    assert groups() == groups()
    assert all(
        [one.trajectory_id for one in group.samples] == sorted(one.trajectory_id for one in group.samples)
        for group in groups()
    )


def test_groups_are_taken_in_the_order_in_which_they_became_complete() -> None:
    assembly = GroupAssembly()
    for group, index in [("a", 0), ("b", 0), ("c", 0), ("b", 1), ("c", 1), ("a", 1)]:
        offer(assembly, sample(group, index, size=2))
    assert [group.group_id for group in assembly.take(2)] == ["b", "c"]
    assert [group.group_id for group in assembly.take(2)] == ["a"]
    assert assembly.take(2) == ()


@pytest.mark.parametrize("again", ["held", "taken", "settled"])
def test_a_second_sample_of_a_trajectory_is_dropped(again: str) -> None:
    assembly = GroupAssembly()
    assert offer(assembly, sample(index=0, size=2)) is Taken.HELD
    if again != "held":
        offer(assembly, sample(index=1, size=2))
        assert len(assembly.take(1)) == 1
    if again == "settled":
        assembly.settle("g")
        assert assembly.held_samples == 0
    assert offer(assembly, sample(index=0, size=2)) is Taken.DUPLICATE


@pytest.mark.parametrize("name", ["g:4", "g:-1", "g:01", "g:x", "h:0", "g", "g:٣"])
def test_a_sample_that_is_none_of_its_group_is_a_stranger(name: str) -> None:
    stranger = msgspec.structs.replace(sample(size=4), trajectory_id=name)
    assert offer(GroupAssembly(), stranger) is Taken.STRANGER


def test_what_is_taken_and_not_settled_is_read_again() -> None:
    assembly = GroupAssembly()
    offer(assembly, sample("a", 0, size=1), offset=3)
    offer(assembly, sample("b", 0, size=1), offset=4)
    assembly.take(2)
    assert assembly.resume_at({0: 5}, outcomes_end=7) == ResumePoint({0: 3}, 0)
    assembly.settle("a")
    assert assembly.resume_at({0: 5}, outcomes_end=7) == ResumePoint({0: 4}, 0)
    assembly.settle("b")
    assert assembly.resume_at({0: 5}, outcomes_end=7) == ResumePoint({0: 5}, 7)


def names(groups: Sequence[CompleteGroup]) -> list[str]:
    return [group.group_id for group in groups]


def test_more_settled_groups_than_are_remembered_are_known_when_they_are_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.trainer.groups.REMEMBERED_GROUPS", 2)
    assembly = GroupAssembly(settled=["a", "b", "c"])
    assert offer(assembly, sample("a", 0, size=1)) is Taken.DUPLICATE
    offer(assembly, sample("d", 0, size=1))
    assert names(assembly.take(1)) == ["d"]
