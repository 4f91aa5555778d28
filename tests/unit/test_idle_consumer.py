"""The pace of an idle reader: it waits for every answer, and a rest is short beside the silence before it."""

import math

from hypothesis import given
from hypothesis import strategies as st

from rose.topics.idle_consumer import MAX_REST_SECONDS, MIN_SILENCE_SECONDS, REST_FRACTION, IdleBackoff

NAMES = [("requested", 0), ("requested", 1), ("prompts", 0)]
SECONDS = st.floats(0, 10)


def awake_at_the_end(now: float = 0.0) -> IdleBackoff:
    pace = IdleBackoff(now)
    pace.add(NAMES)
    for name in NAMES:
        pace.on_end(name)
    return pace


@given(st.sets(st.sampled_from(NAMES)), SECONDS)
def test_it_rests_once_all_it_reads_has_ended(ended: set[tuple[str, int]], later: float) -> None:
    pace = IdleBackoff(0.0)
    pace.add(NAMES)
    for name in ended:
        pace.on_end(name)
    due = pace.due_seconds(later)
    assert due == (max(0.0, MIN_SILENCE_SECONDS - later) if ended == set(NAMES) else math.inf)


@given(st.sampled_from(NAMES), SECONDS, SECONDS)
def test_a_record_puts_rest_off_until_its_partition_has_ended_again(
    name: tuple[str, int], heard: float, later: float
) -> None:
    pace = awake_at_the_end()
    pace.on_record(name, heard)
    assert pace.due_seconds(heard + later) == math.inf
    pace.on_end(name)
    assert pace.due_seconds(heard + later) == max(0.0, heard + MIN_SILENCE_SECONDS - (heard + later))


@given(st.floats(MIN_SILENCE_SECONDS, 10))
def test_a_rest_is_a_share_of_the_silence_before_it(silence: float) -> None:
    pace = awake_at_the_end()
    pace.rest(silence)
    rest = pace.due_seconds(silence)
    assert 0 < rest <= min(MAX_REST_SECONDS, REST_FRACTION * silence) + 1e-12
    assert pace.due_seconds(silence + MAX_REST_SECONDS) == 0


def test_after_a_rest_every_partition_must_answer_anew() -> None:
    pace = awake_at_the_end()
    pace.rest(1.0)
    pace.wake()
    for name in NAMES:
        assert pace.due_seconds(2.0) == math.inf
        pace.on_end(name)
    assert pace.due_seconds(2.0) == 0


def test_what_the_application_paused_is_not_awaited() -> None:
    pace = awake_at_the_end()
    pace.wake()
    pace.remove(NAMES[:2])
    pace.on_end(NAMES[2])
    assert pace.due_seconds(1.0) == 0
    pace.add(NAMES[:2])
    assert pace.due_seconds(1.0) == math.inf
    pace.remove(NAMES)
    assert pace.due_seconds(1.0) == math.inf, "it reads nothing"
