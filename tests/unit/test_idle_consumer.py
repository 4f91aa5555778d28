"""Rests of an idle reader: it waits for every answer, and a rest is short compared with the silence before it."""

import math

from hypothesis import given
from hypothesis import strategies as st

from rose.topics.idle_consumer import MAX_REST_SECONDS, MIN_SILENCE_SECONDS, REST_FRACTION, IdleBackoff

NAMES = [("requested", 0), ("requested", 1), ("prompts", 0)]
SECONDS = st.floats(0, 10)


def awake_at_the_end(now: float = 0.0) -> IdleBackoff:
    idle_rest = IdleBackoff(now)
    idle_rest.add(NAMES)
    for name in NAMES:
        idle_rest.on_end(name)
    return idle_rest


@given(st.sets(st.sampled_from(NAMES)), SECONDS)
def test_consumer_rests_once_all_partitions_are_at_their_end(ended: set[tuple[str, int]], later: float) -> None:
    idle_rest = IdleBackoff(0.0)
    idle_rest.add(NAMES)
    for name in ended:
        idle_rest.on_end(name)
    due = idle_rest.due_seconds(later)
    assert due == (max(0.0, MIN_SILENCE_SECONDS - later) if ended == set(NAMES) else math.inf)


@given(st.sampled_from(NAMES), SECONDS, SECONDS)
def test_record_postpones_the_rest_until_its_partition_ends_again(
    name: tuple[str, int], record_at: float, later: float
) -> None:
    idle_rest = awake_at_the_end()
    idle_rest.on_record(name, record_at)
    assert idle_rest.due_seconds(record_at + later) == math.inf
    idle_rest.on_end(name)
    assert idle_rest.due_seconds(record_at + later) == max(0.0, record_at + MIN_SILENCE_SECONDS - (record_at + later))


@given(st.floats(MIN_SILENCE_SECONDS, 10))
def test_rest_is_proportional_to_the_preceding_silence(silence: float) -> None:
    idle_rest = awake_at_the_end()
    idle_rest.rest(silence)
    rest = idle_rest.due_seconds(silence)
    assert 0 < rest <= min(MAX_REST_SECONDS, REST_FRACTION * silence) + 1e-12
    assert idle_rest.due_seconds(silence + MAX_REST_SECONDS) == 0


def test_every_partition_must_report_its_end_again_after_a_rest() -> None:
    idle_rest = awake_at_the_end()
    idle_rest.rest(1.0)
    idle_rest.wake()
    for name in NAMES:
        assert idle_rest.due_seconds(2.0) == math.inf
        idle_rest.on_end(name)
    assert idle_rest.due_seconds(2.0) == 0


def test_paused_partition_is_not_awaited() -> None:
    idle_rest = awake_at_the_end()
    idle_rest.wake()
    idle_rest.remove(NAMES[:2])
    idle_rest.on_end(NAMES[2])
    assert idle_rest.due_seconds(1.0) == 0
    idle_rest.add(NAMES[:2])
    assert idle_rest.due_seconds(1.0) == math.inf
    idle_rest.remove(NAMES)
    assert idle_rest.due_seconds(1.0) == math.inf, "it reads nothing"
