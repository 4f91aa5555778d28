"""Reactions of a worker to errors, external ends, and its sweeps."""

import heapq
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError

from rose.topics.catalog import PROMPTS
from rose.topics.errors import CALM_SECONDS, MISSING_SECONDS, BusError, TopicMissing
from rose.topics.records import Place
from rose.topics.settings import BusSettings
from rose.workers.environments import membership
from rose.workers.environments.log_cleaner import EVERY_SECONDS, SOON_SECONDS, LogCleaner
from rose.workers.environments.membership import (
    FENCED_SECONDS,
    FENCED_TIMES,
    LONGEST_WAIT_SECONDS,
    Membership,
    RecoveryPolicy,
    WorkerFenced,
)

MOVING = (
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError._TIMED_OUT,
    KafkaError._MAX_POLL_EXCEEDED,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError._STATE,
    KafkaError.CONCURRENT_TRANSACTIONS,
)


def bus_error(code: int) -> BusError:
    return BusError("doing something", KafkaError(code))


@pytest.mark.parametrize("code", MOVING)
def test_transient_broker_errors_are_retried_with_backoff_forever(code: int) -> None:
    policy = RecoveryPolicy("w0")
    waits = [policy.on_error(bus_error(code), float(now), began_at=float(now)) for now in range(200)]
    assert waits == sorted(waits) and waits[0] < 0.1 and waits[-1] == LONGEST_WAIT_SECONDS
    assert policy.on_error(bus_error(code), 199 + waits[-1] + CALM_SECONDS, began_at=0.0) == waits[0], "a new row"


@pytest.mark.parametrize("code", [KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError._AUTHENTICATION])
def test_permanent_error_ends_the_worker(code: int) -> None:
    with pytest.raises(BusError):
        RecoveryPolicy("w0").on_error(bus_error(code), 0.0, began_at=0.0)


def test_missing_topic_ends_a_new_worker_and_not_a_running_worker() -> None:
    with pytest.raises(TopicMissing):
        RecoveryPolicy("w0").on_error(TopicMissing("t"), 0.0, began_at=0.0)
    policy = RecoveryPolicy("w0")
    policy.on_success()
    for now in range(int(MISSING_SECONDS)):
        policy.on_error(TopicMissing("t"), float(now), began_at=0.0)
    with pytest.raises(TopicMissing):
        policy.on_error(TopicMissing("t"), MISSING_SECONDS + 1, began_at=0.0)


@pytest.mark.parametrize("code", [KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED])
def test_repeated_fencing_means_a_duplicate_name_and_single_fencing_does_not(code: int) -> None:
    policy = RecoveryPolicy("w0")
    for now in range(10):
        # frozen: the broker ended the session
        policy.on_error(bus_error(code), 100.0 * now + 12.0, began_at=100.0 * now)
        policy.on_error(bus_error(code), 100.0 * now + 13.0, began_at=100.0 * now)
    for now in range(10):
        policy.on_error(bus_error(code), 2000 + FENCED_SECONDS * now, began_at=2000 + FENCED_SECONDS * now)
    for second in range(FENCED_TIMES - 1):
        policy.on_error(bus_error(code), 4000.0 + second, began_at=4000.0 + second)
    with pytest.raises(WorkerFenced, match="another environment worker was started as 'w0'"):
        policy.on_error(bus_error(code), 4010.0, began_at=4010.0)


def test_two_short_lived_duplicates_do_not_end_a_worker() -> None:
    """Each duplicate fences twice: its query is repeated while the open transaction is aborted."""
    policy = RecoveryPolicy("w0")
    for at in (0.0, 0.5, 1.0, 1.5):
        policy.on_error(bus_error(KafkaError._FENCED), at, began_at=at)


@pytest.mark.parametrize("recovers_in", [0.5, 20.0])
def test_one_of_two_duplicate_workers_ends_at_any_recovery_time(recovers_in: float) -> None:
    """Each worker takes the name when it recovers, and learns at its next transaction that the other has taken it."""
    policy, owner = {name: RecoveryPolicy("w0") for name in ("first", "second")}, "first"
    due = [(0.0, "first", "writes"), (1.0, "second", "recovers")]
    with pytest.raises(WorkerFenced):
        while due[0][0] < FENCED_SECONDS:
            now, name, does = heapq.heappop(due)
            if does == "recovers":
                owner = name
                heapq.heappush(due, (now + recovers_in, name, "writes"))
            elif owner == name:
                heapq.heappush(due, (now + 0.1, name, "writes"))
            else:
                wait = policy[name].on_error(bus_error(KafkaError._FENCED), now, began_at=now)
                heapq.heappush(due, (now + wait, name, "recovers"))


def test_sweep_runs_soon_after_a_recovery_and_then_rarely() -> None:
    sweeper = LogCleaner(BusSettings("127.0.0.1:9"), "w0")
    due = [now for now in range(0, 2000, 10) if sweeper.is_due(float(now))]
    assert due == [SOON_SECONDS, SOON_SECONDS + EVERY_SECONDS, SOON_SECONDS + 2 * EVERY_SECONDS, 1830.0]
    sweeper.request_soon()
    assert not sweeper.is_due(2000.0) and sweeper.is_due(2000.0 + SOON_SECONDS)


class HalfAssigned:
    """A reader whose group assigns the prompts of four homes and no results."""

    def __init__(self, *_: object, **__: object) -> None:
        self.joined = 0

    def subscribe(
        self, _topics: object, *, on_assigned: Callable[[list[Place]], Mapping[Place, int]], **_: Any
    ) -> None:
        on_assigned([(PROMPTS, number) for number in range(4)])

    def read(self, _limit: int, _timeout_seconds: float) -> list[object]:
        return []

    def join_again(self) -> None:
        self.joined += 1


@pytest.mark.parametrize(("clients", "joined"), [(["rose-w0"], 1), (["rose-w0", "my-etl"], 0)])
def test_worker_with_one_of_two_topics_joins_again_unless_a_foreign_member_has_the_other(
    clients: list[str], joined: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = [SimpleNamespace(client_id=name) for name in clients]
    for name, stand_in in (
        ("Reader", HalfAssigned),
        ("new_client", lambda *_: None),
        ("partition_count", lambda *_: 4),
        ("group_members", lambda *_: members),
    ):
        monkeypatch.setattr(membership, name, stand_in)
    member = Membership(BusSettings("127.0.0.1:1"), "w0", "group", on_wait=lambda: None)
    member.join()
    for _ in range(3):
        member.read(1, 0.0)
    assert member.homes == [] and isinstance(member.reader, HalfAssigned)
    assert member.reader.joined == joined, "asked once in a while"
