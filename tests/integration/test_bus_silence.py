"""A frozen broker: a waiting client calls back during the wait, and stops waiting when told to."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from threading import Event
from typing import Any

import pytest
from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from rose.topics import admin, queries
from rose.topics.admin import connect, create_topics
from rose.topics.catalog import CATALOG, PROMPTS
from rose.topics.dead_letters import dead_lettered_places
from rose.topics.errors import BusError
from rose.topics.local_broker import Broker
from rose.topics.log_reader import read_to_end, read_whole_topics
from rose.topics.queries import offset_in
from rose.topics.reader import Reader
from rose.topics.records import InvalidMessage, Place, RawMessage
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from tests.golden.examples import PROMPT
from tests.support.brokers import EMBEDDED, any_broker
from tests.support.bus_fixtures import PARTITIONS, with_topics
from tests.support.waiting import until

CALLS = 3

pytestmark = pytest.mark.slow


class QueryAborted(Exception):
    """Raised by the callback of a test."""


@pytest.fixture
def settings(own_broker: Broker) -> Iterator[BusSettings]:
    yield with_topics(own_broker.settings())
    own_broker.send_signal(signal.SIGCONT)


READINGS: list[Callable[[BusSettings, Callable[[], None]], object]] = [
    lambda settings, on_wait: dead_lettered_places(settings, PROMPTS, on_wait=on_wait),
    lambda settings, on_wait: list(read_to_end(settings, {(PROMPTS, 0): 0}, on_wait=on_wait)),
]


@any_broker
@pytest.mark.parametrize("read", READINGS, ids=["letters", "log"])
def test_replay_ends_when_its_caller_stops(
    settings: BusSettings, own_broker: Broker, read: Callable[[BusSettings, Callable[[], None]], object]
) -> None:
    """The stop also ends a started replay, which nothing else would end before the broker returns."""
    with closing(Writer(settings, "test")) as writer:
        writer.dead_letter(InvalidMessage(PROMPTS, 0, 0, RawMessage(b"g", b"v", ()), "spoiled"), "spoiled")
        writer.write(PROMPTS, PROMPT, key="g", partition=0)
        writer.flush()
    calls = 0

    def on_wait() -> None:
        nonlocal calls
        calls += 1
        own_broker.send_signal(signal.SIGSTOP)
        if calls == CALLS:
            raise QueryAborted

    def given_up() -> bool:
        nonlocal calls
        calls = 0
        own_broker.send_signal(signal.SIGCONT)
        try:
            read(settings, on_wait)
        except QueryAborted:
            return True
        return False  # everything had arrived before the broker was frozen

    until(given_up)


def owner(settings: BusSettings, **more: Callable[[], bool | None]) -> Writer:
    return Writer(settings, "test", transactional_id="test", **more)  # type: ignore[arg-type]


def test_writer_that_takes_over_a_name_calls_back_until_the_broker_returns(
    settings: BusSettings, own_broker: Broker
) -> None:
    last, calls = owner(settings), 0
    last.begin()
    last.write(PROMPTS, PROMPT, key="g", partition=0)

    def on_wait() -> None:
        nonlocal calls
        calls += 1
        if calls == CALLS:
            own_broker.send_signal(signal.SIGCONT)

    own_broker.send_signal(signal.SIGSTOP)
    with closing(owner(settings, on_wait=on_wait)) as present:
        assert calls >= CALLS
        present.begin()
        present.write(PROMPTS, PROMPT, key="g", partition=1)
        present.commit()
        with pytest.raises(BusError):
            last.commit()
    last.close()
    assert [envelope.partition for envelope in read_whole_topics(settings, [PROMPTS])] == [1]


@any_broker
def test_stopping_writer_takes_over_no_name(settings: BusSettings, own_broker: Broker) -> None:
    own_broker.send_signal(signal.SIGSTOP)
    with pytest.raises(BusError, match="is not needed any more"):
        owner(settings, still_needed=lambda: False)


@pytest.mark.parametrize("broker_kind", [EMBEDDED], indirect=True)
def test_writer_stopped_during_the_owner_query_takes_over_no_name(
    settings: BusSettings, own_broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, leaves = Reader.committed, Event()

    def frozen(reader: Reader, places: Sequence[Place]) -> dict[Place, int | None]:
        own_broker.send_signal(signal.SIGSTOP)
        leaves.set()
        return ask(reader, places)

    monkeypatch.setattr(Reader, "committed", frozen)
    with pytest.raises(BusError, match="is not needed any more"):
        owner(settings, still_needed=lambda: not leaves.is_set())


QUESTIONS: list[Callable[[Reader], object]] = [
    lambda reader: reader.committed([(PROMPTS, 0)]),
    lambda reader: reader.watermarks((PROMPTS, 0)),
    lambda reader: reader.all_watermarks([(PROMPTS, 0), (PROMPTS, 1)]),
    lambda reader: reader.partition_count(PROMPTS),
]


@any_broker
@pytest.mark.parametrize("ask", QUESTIONS, ids=["committed", "watermarks", "all_watermarks", "partitions"])
def test_query_ends_when_its_caller_stops(
    settings: BusSettings, own_broker: Broker, ask: Callable[[Reader], object]
) -> None:
    def on_wait() -> None:
        raise QueryAborted

    with closing(Reader(settings, "test", group="test", on_wait=on_wait)) as reader:
        ask(reader)
        own_broker.send_signal(signal.SIGSTOP)
        with pytest.raises(QueryAborted):
            ask(reader)
        own_broker.send_signal(signal.SIGCONT)
        ask(reader)


@any_broker
def test_topic_creation_is_retried_after_a_silent_broker(own_broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker had answered before: a broker that never answered is reported at once."""
    monkeypatch.setattr(queries, "WATERMARKS_SECONDS", 4.0)
    calls = 0

    class Thawing(AdminClient):  # type: ignore[misc]
        def list_topics(self, *arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            own_broker.send_signal(signal.SIGSTOP if calls == 1 else signal.SIGCONT)
            return super().list_topics(*arguments, **named)

    settings = own_broker.settings()
    connect(settings)
    monkeypatch.setattr(admin, "connect", lambda settings: Thawing(settings.client("test")))
    try:
        assert len(create_topics(settings, PARTITIONS)) == len(CATALOG)
    finally:
        own_broker.send_signal(signal.SIGCONT)
    assert calls > 1


@any_broker
def test_silent_leader_is_not_taken_for_an_answering_leader(settings: BusSettings, own_broker: Broker) -> None:
    """confluent-kafka raises no error in this case."""
    client = connect(settings)
    place = TopicPartition(settings.topic(PROMPTS), 0)

    def query(seconds: float) -> int:
        return offset_in(client.list_offsets({place: OffsetSpec.latest()}, request_timeout=seconds)[place])

    assert query(30.0) == 0
    own_broker.send_signal(signal.SIGSTOP)
    with pytest.raises(KafkaException, match="imed out"):
        query(1.0)
