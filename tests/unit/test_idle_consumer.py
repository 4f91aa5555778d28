"""The pace of an idle reader: it waits for every answer, and a rest is short beside the silence before it."""

import math

from hypothesis import given
from hypothesis import strategies as st

from rose.topics.local_broker.idle_consumer import MAX_REST_SECONDS, MIN_SILENCE_SECONDS, REST_FRACTION, IdleBackoff

NAMES = [("requested", 0), ("requested", 1), ("prompts", 0)]
SECONDS = st.floats(0, 10)


def awake_at_the_end(now: float = 0.0) -> IdleBackoff:
    pace = IdleBackoff(now)
    pace.add(NAMES)
    for name in NAMES:
        pace.on_end(name)
    return pace


@given(st.sets(st.sampled_from(NAMES)), SECONDS)
def test_consumer_rests_once_all_partitions_are_at_their_end(ended: set[tuple[str, int]], later: float) -> None:
    pace = IdleBackoff(0.0)
    pace.add(NAMES)
    for name in ended:
        pace.on_end(name)
    due = pace.due_seconds(later)
    assert due == (max(0.0, MIN_SILENCE_SECONDS - later) if ended == set(NAMES) else math.inf)


@given(st.sampled_from(NAMES), SECONDS, SECONDS)
def test_record_postpones_the_rest_until_its_partition_ends_again(
    name: tuple[str, int], heard: float, later: float
) -> None:
    pace = awake_at_the_end()
    pace.on_record(name, heard)
    assert pace.due_seconds(heard + later) == math.inf
    pace.on_end(name)
    assert pace.due_seconds(heard + later) == max(0.0, heard + MIN_SILENCE_SECONDS - (heard + later))


@given(st.floats(MIN_SILENCE_SECONDS, 10))
def test_rest_is_proportional_to_the_preceding_silence(silence: float) -> None:
    pace = awake_at_the_end()
    pace.rest(silence)
    rest = pace.due_seconds(silence)
    assert 0 < rest <= min(MAX_REST_SECONDS, REST_FRACTION * silence) + 1e-12
    assert pace.due_seconds(silence + MAX_REST_SECONDS) == 0


def test_every_partition_must_report_its_end_again_after_a_rest() -> None:
    pace = awake_at_the_end()
    pace.rest(1.0)
    pace.wake()
    for name in NAMES:
        assert pace.due_seconds(2.0) == math.inf
        pace.on_end(name)
    assert pace.due_seconds(2.0) == 0


def test_paused_partition_is_not_awaited() -> None:
    pace = awake_at_the_end()
    pace.wake()
    pace.remove(NAMES[:2])
    pace.on_end(NAMES[2])
    assert pace.due_seconds(1.0) == 0
    pace.add(NAMES[:2])
    assert pace.due_seconds(1.0) == math.inf
    pace.remove(NAMES)
    assert pace.due_seconds(1.0) == math.inf, "it reads nothing"
