"""A hung transaction of a trainer, beside other trainers of its model."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
from confluent_kafka import KafkaError

from rose.schemas.errors import UsageError
from rose.topics.admin import create_topics
from rose.topics.catalog import Partitions
from rose.topics.errors import BusError
from rose.topics.reader import Reader
from rose.topics.records import Place
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from rose.workers.trainer.stream import SampleStream
from tests.support.brokers import AnyBroker, any_broker
from tests.support.trainer_fixtures import everyone, group_name, make_samples, on_log, outcomes_of, write_samples

pytestmark = pytest.mark.slow


@pytest.fixture
def settings(broker: AnyBroker, namespace: str) -> BusSettings:
    settings = broker.settings(namespace)
    create_topics(settings, Partitions(home=2, slots=1, samples=2, chunks=1))
    return settings


class SlowCoordinator:
    """A producer whose offsets are accepted after three checks of the group's coordinator."""

    def __init__(self, producer: Any) -> None:
        self._producer = producer
        self._asked, self._enough = 0, Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def __len__(self) -> int:
        return len(self._producer)

    def send_offsets_to_transaction(self, *arguments: Any) -> None:
        self._enough.wait()
        self._producer.send_offsets_to_transaction(*arguments)

    def reach(self, _place: Place) -> None:
        self._asked += 1
        if self._asked == 3:
            self._enough.set()


@any_broker
@pytest.mark.slow
def test_slow_coordinator_does_not_end_a_trainer(settings: BusSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    write_samples(settings, make_samples(groups=[0]))
    with SampleStream(settings, "policy", total_groups=1) as stream:
        first = stream._committer.writer
        slow = SlowCoordinator(first._producer)
        monkeypatch.setattr(Reader, "reach_coordinator", slow.reach)
        monkeypatch.setattr(first, "_producer", slow)
        stream.settle(outcomes_of(stream.take(1)))
        monkeypatch.setattr(first, "_producer", slow._producer)
    assert on_log(settings) == everyone([0])


def abandon_commit(
    writer: Writer, monkeypatch: pytest.MonkeyPatch, *, committed: bool, on_wait: Callable[[], None] = lambda: None
) -> None:
    """Make the next commit of the writer abort after the whole transaction, or also its end, is on the broker."""
    commit = writer.commit

    def hang(offsets: Mapping[Place, int], reader: Reader, *, metadata: str) -> None:
        if committed:
            commit(offsets, reader, metadata=metadata)
        else:
            writer.flush()
        on_wait()
        raise BusError("committing offsets (it has not returned)", KafkaError(KafkaError._TIMED_OUT))

    monkeypatch.setattr(writer, "commit", hang)


@any_broker
@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("publishes_alone", [False, True])
def test_abandoned_settlement_is_repeated_only_if_absent_from_the_log(
    settings: BusSettings, monkeypatch: pytest.MonkeyPatch, committed: bool, publishes_alone: bool
) -> None:
    """This also holds for a transaction without settlements, which moves no offset, as for a version alone."""
    write_samples(settings, make_samples(groups=range(3)))
    with SampleStream(settings, "policy") as stream:
        stream.settle(outcomes_of(stream.take(1)))
        abandon_commit(stream._committer.writer, monkeypatch, committed=committed)
        second = outcomes_of(stream.take(1))
        given_up = [] if publishes_alone else second
        if settings.embedded:
            with pytest.raises(BusError):
                stream.settle(given_up)
            return
        stream.settle(given_up)
        stream.settle(second)
        stream.settle(outcomes_of(stream.take(1)))
    assert on_log(settings) == everyone(range(3))
    with SampleStream(settings, "policy", total_groups=3) as stream:
        assert stream.take(1) == ()


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize(("settles", "after_reading"), [([0, 1, 2], True), ([1], True), ([2], True), ([1], False)])
def test_abandoned_settlement_is_not_repeated_after_another_trainer_settled(
    settings: BusSettings,
    monkeypatch: pytest.MonkeyPatch,
    settles: list[int],
    after_reading: bool,
    committed: bool,
) -> None:
    """The committed offset may be unchanged, because the first group is still open."""
    write_samples(settings, make_samples(groups=range(3)))

    def another() -> None:
        with SampleStream(settings, "policy") as stream:
            groups = stream.take(3 - 2 * committed) if after_reading else taken
            stream.settle(outcomes_of(group for group in groups if group.group_id in names))

    names = [group_name(number) for number in settles]
    with SampleStream(settings, "policy") as stream:
        taken = stream.take(3)
        abandon_commit(stream._committer.writer, monkeypatch, committed=committed, on_wait=another)
        with pytest.raises(BusError) as refused:
            stream.settle(outcomes_of(group for group in taken if group.group_id != group_name(0)))
    assert refused.value.is_fenced is not settings.embedded  # which makes the transaction repeat nothing
    assert on_log(settings) == everyone({*settles, 1, 2} if committed else settles)


def test_settlement_of_the_same_group_by_another_trainer_is_not_the_own_settlement(
    settings: BusSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_samples(settings, make_samples(groups=range(2)))

    def another() -> None:
        with SampleStream(settings, "policy") as stream:
            stream.settle(outcomes_of(stream.take(1)))

    with SampleStream(settings, "policy") as stream:
        abandon_commit(stream._committer.writer, monkeypatch, committed=False, on_wait=another)
        with pytest.raises(BusError) as refused:
            stream.settle(outcomes_of(stream.take(1)))
    assert refused.value.is_fenced is not settings.embedded  # which makes the transaction repeat nothing
    assert on_log(settings) == everyone([0])


def test_abandoned_settlement_keeps_the_position_of_a_newer_stream(
    settings: BusSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_samples(settings, make_samples(groups=range(2)))
    newer: list[SampleStream] = []
    with SampleStream(settings, "policy") as stream:
        abandon_commit(
            stream._committer.writer,
            monkeypatch,
            committed=False,
            on_wait=lambda: newer.append(SampleStream(settings, "policy")),
        )
        with pytest.raises(BusError) as refused:
            stream.settle(outcomes_of(stream.take(1)))
        assert refused.value.is_fenced is not settings.embedded  # which makes the transaction repeat nothing
        [left] = newer
        with left:
            left.settle(outcomes_of(left.take(2)))
    assert on_log(settings) == everyone(range(2))


def test_stream_that_hangs_at_its_start_keeps_the_position_of_a_newer_stream(
    settings: BusSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the stream would return groups that the newer stream settled after the start of the older."""
    if settings.embedded:
        pytest.skip("nothing is made again there")
    write_samples(settings, make_samples(groups=range(3)))
    newer: list[SampleStream] = []
    came: list[bool] = []
    committed_offsets = Writer.committed_offsets

    def amid(writer: Writer, reader: Reader, places: Sequence[Place]) -> dict[Place, int | None]:
        found = committed_offsets(writer, reader, places)
        if not came:
            came.append(True)
            newer.append(SampleStream(settings, "policy"))
            newer[0].settle(outcomes_of(newer[0].take(1)))
            abandon_commit(writer, monkeypatch, committed=False)
        return found

    monkeypatch.setattr(Writer, "committed_offsets", amid)
    with pytest.raises(BusError) as refused:
        SampleStream(settings, "policy")
    assert refused.value.is_fenced
    with newer[0] as stream:
        stream.settle(outcomes_of(stream.take(2)))
    assert on_log(settings) == everyone(range(3))


def test_stream_is_fresh_until_a_group_is_settled(settings: BusSettings) -> None:
    write_samples(settings, make_samples(groups=range(1)))
    for _ in range(2):
        with SampleStream(settings, "policy") as stream:
            assert stream.fresh
    with SampleStream(settings, "policy") as stream:
        stream.settle(outcomes_of(stream.take(1)))
    with SampleStream(settings, "policy") as stream:
        assert not stream.fresh


def test_closing_a_stream_waits_for_settlements_of_other_threads(
    settings: BusSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_samples(settings, make_samples(groups=range(2)))
    under_way, closes = Event(), Event()
    stream = SampleStream(settings, "policy")
    first, second = (stream.settlement(outcomes_of(stream.take(1))) for _ in range(2))
    writer = stream._committer.writer
    commit, close = writer.commit, stream._committer.close

    def slow_commit(*arguments: Any, **named: Any) -> None:
        under_way.set()
        assert closes.wait(60)
        commit(*arguments, **named)

    def told_close() -> None:
        closes.set()
        close()

    monkeypatch.setattr(writer, "commit", slow_commit)
    monkeypatch.setattr(stream._committer, "close", told_close)
    with ThreadPoolExecutor(1) as pool:
        settled = pool.submit(first.commit)
        assert under_way.wait(60)
        stream.close()
        settled.result()
    assert on_log(settings) == everyone([0])
    with pytest.raises(UsageError, match="close the publisher first"):
        second.commit()
    stream.close()
