"""Members of a group on a real broker: a member reads its assigned partitions while other members join, leave or
rejoin."""

import time
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition

from rose.schemas.wire import encode
from rose.topics.admin import create_topics
from rose.topics.catalog import PROMPTS, Partitions
from rose.topics.errors import TopicMissing
from rose.topics.idle_consumer import IdleConsumer
from rose.topics.local_broker import start_broker
from rose.topics.reader import Reader
from rose.topics.records import Envelope, Place
from rose.topics.settings import BusSettings
from tests.golden.examples import PROMPT
from tests.support.brokers import embedded_first, home_of, start
from tests.support.bus_fixtures import HOMES, WAIT_SECONDS, put, read_until


def test_new_assignment_of_a_paused_partition_is_read(settings: BusSettings) -> None:
    put(settings, [encode(PROMPT)])
    with closing(Reader(settings, "test", group="test", report_ends=True)) as reader:
        for again in range(3):
            reader.assign({(PROMPTS, 0): 0, (PROMPTS, 1): 0})
            assert read_until(reader, 1), f"nothing is read after assignment {again}"
            reader.pause([(PROMPTS, 0)])
            reader.assign({})
            reader.pause([(PROMPTS, 0)])  # pausing an unassigned partition does no harm


def test_new_group_assignment_is_read_after_all_partitions_were_paused(settings: BusSettings) -> None:
    """A full window pauses the prompts; then another member joins and leaves again."""

    def member(name: str) -> tuple[Reader, list[list[Place]]]:
        assignments: list[list[Place]] = []

        def assigned(places: list[Place]) -> dict[Place, int]:
            assignments.append(places)
            return dict.fromkeys(places, 0)

        session: dict[str, Any] = {"session.timeout.ms": 6000}
        reader = Reader(settings, name, group="members", member_id=name, **session)
        reader.subscribe([PROMPTS], on_assigned=assigned, on_revoked=lambda places: None)
        return reader, assignments

    def until(condition: object) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():  # type: ignore[operator]
            assert time.monotonic() < deadline
            for each in (first, *others):
                found.extend(item for item in each.read(100, 0.05) if isinstance(item, Envelope))

    found: list[Envelope] = []
    others: list[Reader] = []
    first, taken = member("first")
    until(lambda: taken and len(taken[-1]) == HOMES)
    first.pause([(PROMPTS, home) for home in range(HOMES)])
    other, others_taken = member("other")
    others.append(other)
    until(lambda: len(taken[-1]) == 1 and others_taken and len(others_taken[-1]) == 1)
    for home in range(HOMES):
        put(settings, [encode(PROMPT)], partition=home)
    until(lambda: {envelope.partition for envelope in found} == set(range(HOMES)))
    first.close()
    other.close()


def test_member_that_joins_soon_after_another_gets_partitions(settings: BusSettings) -> None:
    """The embedded broker forgets both members if the second joins just as its wait for others ends."""
    taken_in: list[str] = []

    def join(pair: int, name: str) -> Reader:
        def assigned(places: list[Place]) -> dict[Place, int]:
            taken_in.append(f"{pair} {name}")
            return {}

        reader = Reader(settings, name, group=f"pair-{pair}", member_id=f"{name}-{pair}")
        reader.subscribe([PROMPTS], on_assigned=assigned, on_revoked=lambda places: None)
        return reader

    members: list[Reader] = []
    for pair in range(8):
        first = join(pair, "first")
        first.read(1, 0.304 + 0.002 * pair)
        members += [first, join(pair, "second")]
    deadline = time.monotonic() + WAIT_SECONDS
    while len(set(taken_in)) < len(members):
        assert time.monotonic() < deadline, taken_in
        for member in members:
            member.read(1, 0.01)
    for member in members:
        member.close()


def test_rejoined_or_left_member_ignores_answers_to_its_former_membership(
    settings: BusSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to the first subscription may arrive just as the second is sent. The leaving consumer then reports it
    on its own thread."""
    subscriptions: list[tuple[IdleConsumer, dict[str, Any]]] = []
    reported_assignments: list[list[Place]] = []
    closed: list[IdleConsumer] = []

    def assigned(places: list[Place]) -> dict[Place, int]:
        reported_assignments.append(places)
        return {}

    monkeypatch.setattr(IdleConsumer, "subscribe", lambda self, _, **answers: subscriptions.append((self, answers)))
    monkeypatch.setattr(IdleConsumer, "close", lambda self: closed.append(self))
    with closing(Reader(replace(settings, embedded=True), "late", group="late", member_id="late")) as reader:
        reader.subscribe([PROMPTS], on_assigned=assigned, on_revoked=reported_assignments.append)
        reader._rejoin()
        (former, answers), (present, _) = subscriptions
        home = TopicPartition(settings.topic(PROMPTS), 0)
        answers["on_assign"](former, [home])
        answers["on_revoke"](former, [home])
        assert reported_assignments == []
        answers["on_assign"](present, [home])
        assert reported_assignments == [[(PROMPTS, 0)]]
    answers["on_assign"](present, [home])
    answers["on_revoke"](present, [home])
    assert reported_assignments == [[(PROMPTS, 0)]], "who has left is told nothing, though an assignment may lie unread"
    reader.close()
    assert closed.count(present) == 1, "a client that is closed twice at once may wait for ever"


@embedded_first
@pytest.mark.slow
def test_member_on_an_emptied_broker_reports_missing_topics_and_later_gets_partitions(
    broker_kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second member, for which there is no partition, joins once only."""
    monkeypatch.setattr("rose.topics.reader.UNASSIGNED_SECONDS", 1.0)
    assigned: dict[str, list[int]] = {"first": [], "second": []}

    def join(name: str) -> Reader:
        def on_assigned(places: list[Place]) -> dict[Place, int]:
            assigned[name].append(len(places))
            return {}

        reader = Reader(settings, name, group="members", member_id=name)
        reader.subscribe([PROMPTS], on_assigned=on_assigned, on_revoked=lambda places: None)
        return reader

    def read(*readers: Reader, reads: int = 1) -> None:
        for _ in range(reads):
            for reader in readers:
                reader.read(1, 0.1)

    deadline = time.monotonic() + 3 * WAIT_SECONDS
    one = Partitions(home=1, slots=1, samples=1, chunks=1)
    with start(broker_kind, tmp_path / "first") as broker:
        settings, port = broker.settings(), int(broker.bootstrap.rpartition(":")[2])
        create_topics(settings, one)
        first = join("first")
        while assigned["first"][-1:] != [1]:
            assert time.monotonic() < deadline
            read(first)
    with start_broker(tmp_path / "second", kafka_home=home_of(broker_kind), port=port), closing(first):
        with pytest.raises(TopicMissing):
            while time.monotonic() < deadline:
                read(first)
        assert assigned["first"][-1] == 0
        create_topics(settings, one)
        while assigned["first"][-1] != 1:
            assert time.monotonic() < deadline
            with suppress(TopicMissing):  # the client may have queued the error before the topic was there
                read(first)
        with closing(join("second")) as second:
            while len(assigned["second"]) == 0:
                assert time.monotonic() < deadline
                read(first, second)
            read(first, second, reads=20)
            assert sorted(taken[-1] for taken in assigned.values()) == [0, 1]
            assert len(assigned["second"]) == 1
