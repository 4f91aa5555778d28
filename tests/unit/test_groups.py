"""Group assembly: every group is returned once and complete, for any order of samples and any number of restarts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.schemas.samples import Sample
from rose.workers.trainer.groups import CompleteGroup, GroupAssembly, ResumePoint, SampleStatus
from tests.support.sample_fixtures import sample

Log = list[list[Sample]]
"""Partitions of samples."""


@st.composite
def logs(draw: st.DrawFn, *, most: int = 2, groups: int = 6, largest: int = 4) -> Log:
    """Draw samples of some groups over some partitions, in any order, each up to `most` times, with incomplete
    groups."""
    partitions: Log = [[] for _ in range(draw(st.integers(1, 3)))]
    samples = []
    for number in range(draw(st.integers(1, groups))):
        size = draw(st.integers(1, largest))
        for index in range(size):
            if draw(st.integers(0, 9)):
                samples += [sample(f"g{number}", index, size=size)] * draw(st.integers(1, most))
    for one in draw(st.permutations(samples)):
        partitions[draw(st.integers(0, len(partitions) - 1))].append(one)
    return partitions


def new_assembly(settled: Sequence[str] = (), *, old: int = 0) -> GroupAssembly:
    """Return an assembly of one partition that had this many samples at the start."""
    return GroupAssembly(ResumePoint({0: 0}, 0), {0: old}, settled=settled)


def offer(assembly: GroupAssembly, one: Sample, *, partition: int = 0, offset: int = 0) -> SampleStatus:
    return assembly.on_sample(one, partition=partition, offset=offset, outcomes_end=0)


@dataclass
class LogState:
    """The records on the log, and the checkpoint of a trainer."""

    samples: Log
    written: dict[int, int]
    """Number of samples of each partition that were written before the current run."""
    outcomes: list[str] = field(default_factory=list)
    """Groups in the order of settling."""
    place: ResumePoint = field(init=False)
    checkpoint: tuple[str, ...] = ()
    """Groups of the last non-empty settlement."""

    def __post_init__(self) -> None:
        self.place = ResumePoint(dict.fromkeys(self.written, 0), 0)


@dataclass
class TrainerRun:
    """A trainer from one start to its end, on the log left by earlier runs."""

    log_state: LogState
    assembly: GroupAssembly = field(init=False)
    taken: list[str] = field(default_factory=list)
    decided: list[tuple[list[str], ResumePoint]] = field(default_factory=list)
    """Settlements that are not on the log yet."""

    def __post_init__(self) -> None:
        begin = self.log_state.place
        settled = self.log_state.outcomes[begin.outcomes_from :]
        self.assembly = GroupAssembly(begin, self.log_state.written, settled=settled)
        self.next = dict(begin.offsets)

    def read(self, partition: int) -> None:
        """Read one more record, if there is one."""
        offset, records = self.next[partition], self.log_state.samples[partition]
        if offset < len(records):
            self.next[partition] += 1
            end = len(self.log_state.outcomes)
            self.assembly.on_sample(records[offset], partition=partition, offset=offset, outcomes_end=end)

    def take(self) -> None:
        self.taken += names(self.assembly.take(1))

    def settle(self, group_ids: Sequence[str]) -> None:
        """Decide, and write the checkpoint."""
        fresh = [name for name in group_ids if not self.assembly.is_settled(name)]
        self.taken = [name for name in self.taken if name not in group_ids]
        self.decided.append((fresh, self.assembly.settle(group_ids, outcomes_end=len(self.log_state.outcomes))))
        if fresh:
            self.log_state.checkpoint = tuple(group_ids)

    def commit(self, number: int) -> None:
        fresh, self.log_state.place = self.decided.pop(number)
        self.log_state.outcomes += fresh
        self.assembly.on_committed(fresh)


ACTS = [
    "read",
    "read",
    "read",
    "take",
    "take",
    "settle",
    "settle nothing",
    "settle the checkpoint's",
    "commit",
    "commit",
]


@pytest.mark.slow
@settings(max_examples=100)
@given(logs(most=1, groups=4, largest=2), st.data())
def test_every_group_outcome_is_written_once_over_any_restarts(samples: Log, data: st.DataObject) -> None:
    """Settlements are committed late, reordered or never; checkpoints are settled again; settlements may be empty."""
    log_state = LogState(samples, dict.fromkeys(range(len(samples)), 0))
    for _ in range(data.draw(st.integers(2, 4))):
        for number, records in enumerate(samples):
            log_state.written[number] = data.draw(st.integers(log_state.written[number], len(records)))
        trainer = TrainerRun(log_state)
        if data.draw(st.booleans()):
            trainer.settle(log_state.checkpoint)
        for act in data.draw(st.lists(st.sampled_from(ACTS), min_size=12, max_size=30)):
            if act == "read":
                trainer.read(data.draw(st.integers(0, len(samples) - 1)))
            elif act == "take":
                trainer.take()
            elif act == "settle" and trainer.taken:
                trainer.settle(data.draw(st.lists(st.sampled_from(trainer.taken), min_size=1, unique=True)))
            elif act == "settle nothing":
                trainer.settle(())
            elif act == "settle the checkpoint's":
                trainer.settle(log_state.checkpoint)
            elif act == "commit" and trainer.decided:
                trainer.commit(data.draw(st.integers(0, len(trainer.decided) - 1)))
        for number in trainer.next:
            log_state.written[number] = max(log_state.written[number], trainer.next[number])
    last = TrainerRun(log_state)
    for partition, records in enumerate(samples):
        for _ in records:
            last.read(partition)
    last.settle(names(last.assembly.take(len(samples) * 100)))
    last.commit(0)
    every = {one.trajectory_id: one for partition in samples for one in partition}.values()
    sizes = {one.group_id: one.group_size for one in every}
    complete = [name for name, size in sizes.items() if sum(one.group_id == name for one in every) == size]
    assert sorted(log_state.outcomes) == sorted(complete)


@given(logs())
def test_same_order_gives_the_same_groups(log: Log) -> None:
    def groups() -> list[CompleteGroup]:
        assembly = new_assembly()
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


def test_groups_are_returned_in_order_of_completion() -> None:
    assembly = new_assembly()
    for group, index in [("a", 0), ("b", 0), ("c", 0), ("b", 1), ("c", 1), ("a", 1)]:
        offer(assembly, sample(group, index, size=2))
    assert [group.group_id for group in assembly.take(2)] == ["b", "c"]
    assert [group.group_id for group in assembly.take(2)] == ["a"]
    assert assembly.take(2) == ()


def test_groups_that_are_looked_at_are_still_taken() -> None:
    assembly = new_assembly()
    for group in ("a", "b", "c"):
        offer(assembly, sample(group, 0, size=1))
    assert [group.group_id for group in assembly.peek(2)] == ["a", "b"]
    assert [group.group_id for group in assembly.peek(2, after=1)] == ["b"]
    assert assembly.peek(2, after=2) == ()
    assert assembly.peek(2) == assembly.take(2)
    assert [group.group_id for group in assembly.peek(2)] == ["c"]


@pytest.mark.parametrize("again", ["held", "taken", "settled"])
def test_second_sample_of_a_trajectory_is_dropped(again: str) -> None:
    assembly = new_assembly()
    assert offer(assembly, sample(index=0, size=2)) is SampleStatus.HELD
    if again != "held":
        offer(assembly, sample(index=1, size=2))
        assert len(assembly.take(1)) == 1
    if again == "settled":
        assembly.settle(["g"], outcomes_end=0)
        assert assembly.held_samples == 0
    assert offer(assembly, sample(index=0, size=2)) is SampleStatus.DUPLICATE


@pytest.mark.parametrize("name", ["g:4", "g:-1", "g:01", "g:x", "h:0", "g", "g:٣"])
def test_sample_that_does_not_belong_to_its_group_is_refused(name: str) -> None:
    foreign_sample = msgspec.structs.replace(sample(size=4), trajectory_id=name)
    assert offer(new_assembly(), foreign_sample) is SampleStatus.STRANGER


def test_group_returned_but_not_settled_is_read_again() -> None:
    assembly = new_assembly()
    offer(assembly, sample("a", 0, size=1), offset=3)
    offer(assembly, sample("b", 0, size=1), offset=4)
    assembly.take(2)
    assert assembly.settle(["a"], outcomes_end=7) == ResumePoint({0: 4}, 0)
    assembly.on_committed(["a"])
    assert assembly.settle(["b"], outcomes_end=8) == ResumePoint({0: 5}, 8)


def test_group_settled_but_not_committed_is_read_again() -> None:
    assembly = new_assembly()
    offer(assembly, sample("a", 0, size=1), offset=3)
    offer(assembly, sample("b", 0, size=1), offset=4)
    assembly.take(2)
    assembly.settle(["a"], outcomes_end=7)
    assert assembly.settle(["b"], outcomes_end=7) == ResumePoint({0: 3}, 0)


def test_group_settled_before_reading_and_not_committed_is_read_again() -> None:
    assembly = new_assembly(old=2)
    assembly.settle(["a"], outcomes_end=0)
    assert offer(assembly, sample("a", 0, size=1), offset=0) is SampleStatus.DUPLICATE
    offer(assembly, sample("b", 0, size=1), offset=1)
    assert assembly.settle(["b"], outcomes_end=0) == ResumePoint({0: 0}, 0)


def test_outcomes_are_retained_while_their_samples_may_be_unread() -> None:
    assembly = GroupAssembly(ResumePoint({0: 3}, 2), {0: 5}, settled=["a"])
    assert assembly.settle((), outcomes_end=7) == ResumePoint({0: 3}, 2)
    offer(assembly, sample("b", 0, size=1), offset=3)
    assert assembly.settle(["b"], outcomes_end=7) == ResumePoint({0: 4}, 2)
    offer(assembly, sample("a", 0, size=1), offset=4)
    assert assembly.settle((), outcomes_end=8) == ResumePoint({0: 4 - 1}, 2), "b is not committed"
    assembly.on_committed(["b"])
    assert assembly.settle(["a"], outcomes_end=8) == ResumePoint({0: 5}, 2), "who asks again may ask once more"
    offer(assembly, sample("c", 0, size=1), offset=5)
    assert assembly.settle(["c"], outcomes_end=9) == ResumePoint({0: 6}, 9)


def names(groups: Sequence[CompleteGroup]) -> list[str]:
    return [group.group_id for group in groups]


def test_settled_group_is_remembered_while_its_samples_may_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rose.workers.trainer.groups.REMEMBERED_GROUPS", 2)
    assembly = new_assembly(["a", "b", "c"], old=3)
    offer(assembly, sample("d", 0, size=1), offset=0)
    assert names(assembly.take(1)) == ["d"]
    assembly.settle(["d"], outcomes_end=3)
    assert offer(assembly, sample("a", 0, size=1), offset=1) is SampleStatus.DUPLICATE
    assert offer(assembly, sample("b", 0, size=1), offset=2) is SampleStatus.DUPLICATE
    assembly.settle((), outcomes_end=4)
    assert assembly.settled == ["c", "d"], "with nothing old left to read, late duplicates are all that may come"
