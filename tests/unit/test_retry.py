"""Retries of a failed operation: growing waits, and broker errors that waiting does not remove."""

import pytest
from confluent_kafka import KafkaError
from hypothesis import given
from hypothesis import strategies as st

from rose.topics.backoff import Backoff
from rose.topics.errors import CALM_SECONDS, MISSING_SECONDS, BusError, RetryPolicy, TopicMissing, is_transient

FIRST, LONGEST, RESET = 0.5, 6.0, 20.0


@given(st.lists(st.floats(0.0, 3 * RESET), max_size=40))
def test_backoff_doubles_to_its_maximum_and_resets_after_a_long_success(calm: list[float]) -> None:
    """`calm` is the time that each attempt works before it fails."""
    backoff, now, before = Backoff(FIRST, LONGEST, reset_seconds=RESET), 0.0, 0.0
    for seconds in calm:
        now = max(now, backoff.until) + seconds
        was_calm = now - backoff.until >= RESET  # not `seconds`, because a sum of times is rounded
        wait = backoff.failed(now)
        assert wait == (FIRST if not before or was_calm else min(2 * before, LONGEST))
        assert (backoff.failures == 1) == (not before or was_calm)
        assert backoff.until == now + wait
        before = wait


def test_backoff_resets_after_a_success() -> None:
    backoff = Backoff(FIRST, LONGEST, reset_seconds=RESET)
    assert [backoff.failed(0.0) for _ in range(5)] == [0.5, 1.0, 2.0, 4.0, 6.0]
    backoff.succeeded()
    assert (backoff.failures, backoff.failed(0.0)) == (0, FIRST)


@pytest.mark.parametrize(
    ("code", "transient"),
    [
        (KafkaError._TIMED_OUT, True),
        (KafkaError._TRANSPORT, True),
        (KafkaError.NOT_COORDINATOR, True),
        (KafkaError.NOT_LEADER_FOR_PARTITION, True),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, False),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, False),
        (KafkaError._FENCED, False),
        (KafkaError.MSG_SIZE_TOO_LARGE, False),
    ],
)
def test_error_is_transient_if_it_ends_without_a_person(code: int, transient: bool) -> None:
    assert is_transient(KafkaError(code)) is transient
    if transient:
        assert not BusError("reading", KafkaError(code)).is_permanent


def test_error_that_librdkafka_marks_as_retriable_is_transient() -> None:
    assert is_transient(KafkaError(KafkaError.CONCURRENT_TRANSACTIONS, "wait", retriable=True))


@pytest.mark.parametrize(
    "code", [KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError._AUTHENTICATION, KafkaError.FENCED_INSTANCE_ID]
)
def test_loop_ends_at_an_error_that_only_a_person_can_remove(code: int) -> None:
    policy = RetryPolicy(1.0, 1.0)
    policy.on_success()
    with pytest.raises(BusError):
        policy.on_error(BusError("reading", KafkaError(code)), 0.0)


def test_loop_waits_for_a_missing_topic_only_if_it_has_worked_before_and_for_a_bounded_time() -> None:
    policy = RetryPolicy(1.0, 1.0)
    with pytest.raises(TopicMissing):
        policy.on_error(TopicMissing("t"), 0.0)
    policy.on_success()
    waits = [policy.on_error(TopicMissing("t"), 100.0 + now) for now in range(int(MISSING_SECONDS) + 1)]
    assert set(waits) == {1.0}
    with pytest.raises(TopicMissing):
        policy.on_error(TopicMissing("t"), 101.0 + MISSING_SECONDS)
    with pytest.raises(TopicMissing):
        policy.on_error(TopicMissing("t"), 103.0 + MISSING_SECONDS + CALM_SECONDS)
    policy.on_success()
    assert policy.on_error(TopicMissing("t"), 200.0) == 1.0


def test_topic_that_is_missing_now_and_then_is_waited_for_while_the_loop_works_in_between() -> None:
    policy = RetryPolicy(1.0, 1.0)
    for minute in range(30):
        policy.on_success()
        for second in range(0, 40, 8):
            policy.on_error(BusError("reading", KafkaError(KafkaError.NOT_COORDINATOR)), 60.0 * minute + second)
        policy.on_error(TopicMissing("t"), 60.0 * minute + 45.0)
