"""`SampleStream` on a real broker: the whole contract of any trainer under any kill."""

import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from threading import Event

import msgspec
import pytest

from rose.pipeline.audit import audit_log
from rose.schemas.progress import Group, GroupState
from rose.topics.admin import connect, create_topics
from rose.topics.catalog import GROUPS, SAMPLES, Partitions, Retention, home_partition
from rose.topics.dead_letters import read_dead_letters
from rose.topics.errors import BusError
from rose.topics.reader import Reader
from rose.topics.records import RawMessage
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from rose.workers.trainer.stream import SampleStream, StreamStopped, WrongLog
from rose.workers.weights.publish import WeightPublisher
from tests.support.brokers import AnyBroker
from tests.support.trainer_fixtures import (
    GROUP_SIZE,
    everyone,
    group_name,
    make_samples,
    on_log,
    outcomes_of,
    write_prompts,
    write_samples,
)
from tests.support.waiting import until

pytestmark = pytest.mark.slow

HOMES = 2


@pytest.fixture
def settings(broker: AnyBroker, namespace: str) -> BusSettings:
    settings = broker.settings(namespace)
    create_topics(settings, Partitions(home=HOMES, slots=1, samples=2, chunks=1))
    return settings


def write_group(settings: BusSettings, number: int, state: GroupState) -> None:
    """Write the state of a group as an environment worker does."""
    name, writer = group_name(number), Writer(settings, "test")
    record = Group(group_id=name, group_size=GROUP_SIZE, state=state, offset=0, changed_at=0.0)
    writer.write(GROUPS, record, key=name, partition=home_partition(name, HOMES))
    writer.flush()


def test_stream_can_be_iterated_again_without_loss(settings: BusSettings) -> None:
    write_samples(settings, make_samples(groups=range(12)))
    found: list[str] = []
    with SampleStream(settings, "policy", total_groups=12) as stream:
        for _ in range(4):
            for group in stream:
                found.append(group.group_id)
                stream.settle(outcomes_of([group]))
                if len(found) % 3 == 0:
                    break
        assert stream.ended and list(stream) == []
    assert sorted(found) == [group_name(number) for number in range(12)]
    assert on_log(settings) == everyone(range(12))


def test_unsettled_groups_are_returned_again_and_settled_groups_are_not(settings: BusSettings) -> None:
    late = make_samples(groups=range(3))
    write_samples(settings, [*late[:5], *make_samples(groups=range(3, 9)), late[5]])
    settled: list[str] = []
    for count in (1, 2, 1):
        with SampleStream(settings, "policy") as stream:
            groups = stream.take(count)
            settled += [group.group_id for group in groups]
            stream.settle(outcomes_of(groups))
            stream.take(1)  # taken and never settled
    write_samples(settings, late[6:])
    with SampleStream(settings, "policy") as stream:
        groups = stream.take(5)
        stream.settle(outcomes_of(groups))
    settled += [group.group_id for group in groups]
    assert sorted(settled) == [group_name(number) for number in range(9)]
    assert on_log(settings) == everyone(range(9))


def test_stop_ends_the_replay_of_a_trainer(settings: BusSettings) -> None:
    """Otherwise the replay would end only when the broker returns."""
    stop = Event()
    with SampleStream(settings, "policy", stop=stop) as stream, pytest.raises(StreamStopped):
        publisher = WeightPublisher(settings, "policy", on_wait=stream.check_stopped)
        stop.set()
        assert publisher.newest is None
    with pytest.raises(StreamStopped):
        SampleStream(settings, "policy", stop=stop)


def test_group_is_settled_completely_and_once(settings: BusSettings) -> None:
    write_samples(settings, make_samples(groups=range(2)))
    with SampleStream(settings, "policy") as stream:
        groups = stream.take(2)
        with pytest.raises(ValueError, match="is settled whole"):
            stream.settle(outcomes_of(groups)[1:])
        stream.settle(outcomes_of(groups[:1]))
        stream.settle(outcomes_of(groups))
    with SampleStream(settings, "policy", total_groups=2) as stream:
        stream.settle(outcomes_of(groups))  # a checkpoint may request this after a restart
        assert stream.take(1) == ()
    assert on_log(settings) == everyone(range(2))


def test_outcomes_in_a_checkpoint_are_settled_before_their_samples_are_read(settings: BusSettings) -> None:
    write_samples(settings, make_samples(groups=range(3)))
    with SampleStream(settings, "policy") as stream:
        (group,) = stream.take(1)
    for _ in range(2):  # the second must know it from the log: an older sample may hold the start offset back
        with SampleStream(settings, "policy") as stream:
            stream.settle(outcomes_of([group]))
            assert group.group_id not in {one.group_id for one in stream.take(2)}
    assert on_log(settings) == sorted(sample.trajectory_id for sample in group.samples)


@pytest.fixture
def one_partition(broker: AnyBroker, namespace: str) -> BusSettings:
    settings = broker.settings(namespace)
    create_topics(settings, Partitions(home=HOMES, slots=1, samples=1, chunks=1))
    return settings


def test_restarts_without_settlement_forget_no_outcome(one_partition: BusSettings) -> None:
    waits = make_samples(groups=[0])
    write_samples(one_partition, [*waits[:-1], *make_samples(groups=[1, 2])])
    with SampleStream(one_partition, "policy") as stream:
        stream.settle(outcomes_of(stream.take(2)))
    for _ in range(2):
        with SampleStream(one_partition, "policy") as stream:
            stream.settle(())
    write_samples(one_partition, waits[-1:])
    with SampleStream(one_partition, "policy") as stream:
        groups = stream.take(1)
        stream.settle(outcomes_of(groups))
        assert [group.group_id for group in groups] == [group_name(0)]
    assert on_log(one_partition) == everyone(range(3))


def test_outcomes_in_a_checkpoint_are_known_until_later_settlements(
    one_partition: BusSettings,
) -> None:
    write_samples(one_partition, make_samples(groups=range(2)))
    with SampleStream(one_partition, "policy") as stream:
        kept = outcomes_of(stream.take(2))
        stream.settle(kept)
    for _ in range(3):
        with SampleStream(one_partition, "policy") as stream:
            stream.settle(kept)
    assert on_log(one_partition) == everyone(range(2))


@pytest.mark.parametrize("commits", [True, False])
def test_concurrent_settlement_does_not_commit_past_another(one_partition: BusSettings, commits: bool) -> None:
    write_samples(one_partition, make_samples(groups=[0]))
    write_samples(one_partition, make_samples(groups=[1]))
    with SampleStream(one_partition, "policy") as stream:
        first, second = stream.take(2)
        under_way = stream.settlement(outcomes_of([first]))
        stream.settle(outcomes_of([second]))
        if commits:
            under_way.commit()
    write_samples(one_partition, make_samples(groups=[2]))
    with SampleStream(one_partition, "policy") as stream:
        groups = stream.take(1 if commits else 2)
        stream.settle(outcomes_of(groups))
        assert [group.group_id for group in groups] == [group_name(number) for number in ((2,) if commits else (0, 2))]
    assert on_log(one_partition) == everyone(range(3))


def test_transaction_marker_after_old_samples_does_not_keep_them_unread(
    one_partition: BusSettings,
) -> None:
    """Otherwise no start would ever read back fewer outcomes than the previous start."""
    writer = Writer(one_partition, "test", transactional_id="environments")
    writer.begin()
    for sample in make_samples(groups=range(2)):
        writer.write(SAMPLES, sample, key=sample.group_id, trajectory_id=sample.trajectory_id)
    writer.commit()
    with stopped_after(20, one_partition, "policy") as stream:
        groups = stream.take(2)
        assert stream.take(1) == ()
        stream.settle(outcomes_of(groups[:1]))
        assert stream.settlement(outcomes_of(groups[1:])).resume.outcomes_from >= GROUP_SIZE


def test_newer_stream_fences_the_older(settings: BusSettings) -> None:
    write_samples(settings, make_samples(groups=range(1)))
    with SampleStream(settings, "policy") as old:
        groups = old.take(1)
        with SampleStream(settings, "policy") as new:
            with pytest.raises(BusError) as refused:
                old.settle(outcomes_of(groups))
            assert refused.value.is_fenced
            new.settle(outcomes_of(new.take(1)))
    assert on_log(settings) == everyone(range(1))


@pytest.mark.slow
def test_invalid_sample_is_dead_lettered_once(settings: BusSettings) -> None:
    writer = Writer(settings, "test")
    samples = make_samples(groups=range(2))
    foreign_sample = msgspec.structs.replace(samples[0], trajectory_id="g00:77")
    write_samples(settings, [samples[0], foreign_sample])
    no_sample = RawMessage(b"g00", b"no record", (("rose-schema", b"sample/3"),))
    writer.forward(SAMPLES, no_sample, partition=0, key=b"g00")
    writer.flush()
    for _ in range(3):
        with stopped_after(3, settings, "policy", total_groups=2) as stream:
            assert stream.take(2) == ()
    write_samples(settings, samples[1:])
    with SampleStream(settings, "policy") as stream:
        stream.settle(outcomes_of(stream.take(2)))
    dead_letters = list(read_dead_letters(settings, SAMPLES))
    assert sorted(dead_letter.raw.value == b"no record" for dead_letter in dead_letters) == [False, True]
    assert on_log(settings) == everyone(range(2))


class StopAfter(Event):
    """An event that is set after a number of checks."""

    left = math.inf

    def is_set(self) -> bool:
        self.left -= 1
        return self.left < 0


@contextmanager
def stopped_after(times: int, settings: BusSettings, model_id: str, *, total_groups: int = 0) -> Iterator[SampleStream]:
    """A stream that is stopped after a number of checks, counted from the current position of the log."""
    stop = StopAfter()
    with SampleStream(settings, model_id, stop=stop, total_groups=total_groups) as stream:
        stop.left = times
        yield stream


def test_endless_stream_remembers_a_bounded_number_of_groups(settings: BusSettings) -> None:
    write_samples(settings, make_samples(groups=range(3)))
    with SampleStream(settings, "policy") as stream:
        stream.settle(outcomes_of(stream.take(3)))
        assert not stream._ended_groups | stream._handed_out, "the assembly alone remembers them, and only so many"


def test_samples_of_another_model_are_left_to_its_trainer(settings: BusSettings) -> None:
    mine, theirs = make_samples(groups=[0]), make_samples(groups=[1])
    write_samples(settings, [*(msgspec.structs.replace(one, model_id="other") for one in theirs), *mine])
    for model_id, expected in (("policy", group_name(0)), ("other", group_name(1))):
        with SampleStream(settings, model_id) as stream:
            groups = stream.take(1)
            stream.settle(outcomes_of(groups))
            assert [group.group_id for group in groups] == [expected]
    assert on_log(settings) == everyone(range(2))


def test_refused_prompt_does_not_prevent_the_end_of_the_run(settings: BusSettings) -> None:
    write_prompts(settings, range(8))
    for state in (GroupState.REFUSED, GroupState.REFUSED):  # written twice, counted once
        write_group(settings, 3, state)
    write_group(settings, 4, GroupState.REFUSED)
    write_group(settings, 4, GroupState.OPEN)  # corrected
    write_group(settings, 7, GroupState.SETTLED)  # so long ago that its outcomes are gone
    write_samples(settings, make_samples(groups=[0, 1, 2, 4, 5, 6]))
    sizes = []
    with SampleStream(settings, "policy", total_groups=8) as stream:
        while groups := stream.take(4):
            sizes.append(len(groups))
            stream.settle(outcomes_of(groups))
        assert stream.ended
    assert sizes == [4, 2] and len(on_log(settings)) == 6 * GROUP_SIZE


def test_run_ends_when_its_last_prompts_are_refused_while_it_waits(settings: BusSettings) -> None:
    write_samples(settings, make_samples(groups=range(2)))
    with SampleStream(settings, "policy", total_groups=4) as stream:
        stream.settle(outcomes_of(stream.take(1)))
        write_group(settings, 8, GroupState.REFUSED)
        write_group(settings, 9, GroupState.REFUSED)
        groups = stream.take(3)
        assert len(groups) == 1
        stream.settle(outcomes_of(groups))
        assert stream.take(3) == () and stream.ended


def test_log_that_ends_before_the_start_offset_is_refused(broker: AnyBroker, settings: BusSettings) -> None:
    write_samples(settings, make_samples(groups=range(4)))
    with SampleStream(settings, "policy") as stream:
        stream.settle(outcomes_of(stream.take(4)))
    admin = connect(settings)
    for deleted in admin.delete_topics([settings.topic(SAMPLES)]).values():
        deleted.result()
    # nodes learn of the deletion one by one
    until(lambda: settings.topic(SAMPLES) not in admin.list_topics(timeout=10).topics)
    create_topics(settings, Partitions(home=HOMES, slots=1, samples=2, chunks=1))
    if settings.embedded:
        with pytest.raises(WrongLog, match="which ends at 0"):
            SampleStream(settings, "policy")
    else:  # Apache Kafka forgets the committed offsets of a deleted topic
        SampleStream(settings, "policy").close()


def test_settled_old_samples_are_deleted(broker: AnyBroker, namespace: str) -> None:
    settings = replace(broker.settings(namespace), retention=Retention(samples=0.0))
    create_topics(settings, Partitions(home=1, slots=1, samples=1, chunks=1))
    waits, done = make_samples(groups=[0]), make_samples(groups=[1, 2])
    write_samples(settings, [*done[:4], waits[0], *done[4:]])
    with SampleStream(settings, "policy") as stream:
        stream.settle(outcomes_of(stream.take(2)))
    with stopped_after(2, settings, "policy") as stream:
        stream.take(1)
    with closing(Reader(settings, "test", group="test")) as reader:
        assert reader.watermarks((SAMPLES, 0)) == (4, 9)
    write_samples(settings, waits[1:])
    with SampleStream(settings, "policy") as stream:
        stream.settle(outcomes_of(stream.take(1)))
    assert on_log(settings) == everyone(range(3))


def test_samples_unsettled_by_the_trainer_of_another_model_are_kept(settings: BusSettings) -> None:
    """The time of the stall does not matter."""
    theirs = [msgspec.structs.replace(one, model_id="other") for one in make_samples(groups=[1])]
    with SampleStream(settings, "other") as stream:
        stream.settle(())
    write_samples(settings, [*theirs, *make_samples(groups=[0])])
    with SampleStream(settings, "policy") as stream:
        stream.settle(outcomes_of(stream.take(1)))
    settings = replace(settings, retention=Retention(samples=0.0))
    for _ in range(2):
        with stopped_after(2, settings, "policy") as stream:
            stream.take(1)
    with stopped_after(50, settings, "other") as stream:
        groups = stream.take(1)
        stream.settle(outcomes_of(groups))
    assert on_log(settings) == everyone(range(2))


def test_audit_agrees_with_the_settled_outcomes(settings: BusSettings) -> None:
    write_prompts(settings, range(3))
    write_samples(settings, make_samples(groups=range(3)))
    with SampleStream(settings, "policy", total_groups=3) as stream:
        stream.settle(outcomes_of(stream.take(3)))
    assert audit_log(settings).clean
