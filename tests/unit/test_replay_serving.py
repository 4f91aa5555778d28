"""Serving of recorded records: the merge of partitions by time, the pace, and refused namespaces."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.pipeline.cli.replay_serve import topics_named
from rose.pipeline.replay.serving import Pace, TimedMessage, TimeMerge, scratch_settings
from rose.schemas.errors import UsageError
from rose.topics.catalog import HEARTBEATS, REQUESTED
from rose.topics.records import Place, RawMessage
from rose.topics.settings import BusSettings

PLACES: list[Place] = [(REQUESTED, 0), (REQUESTED, 1), (HEARTBEATS, 0)]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=30))
def test_merge_keeps_each_partition_in_order_and_takes_the_earliest_first(written: list[tuple[int, int]]) -> None:
    merge, popped = TimeMerge(set(PLACES)), list[TimedMessage]()
    messages = [
        TimedMessage(float(at), PLACES[number], RawMessage(None, b"%d" % index))
        for index, (number, at) in enumerate(written)
    ]
    for message in messages:
        merge.add(message)
        while (first := merge.pop()) is not None:
            popped.append(first)
    for place in PLACES:
        merge.end(place)
    while (first := merge.pop()) is not None:
        popped.append(first)
    for place in PLACES:
        of_place = [message for message in messages if message.place == place]
        assert [message for message in popped if message.place == place] == of_place
    if all(earlier.at <= later.at for place in PLACES for earlier, later in _pairs(messages, place)):
        assert [message.at for message in popped] == sorted(message.at for message in messages)


def _pairs(messages: list[TimedMessage], place: Place) -> list[tuple[TimedMessage, TimedMessage]]:
    of_place = [message for message in messages if message.place == place]
    return list(pairwise(of_place))


def test_record_is_due_at_the_pace_of_the_log_or_faster() -> None:
    pace = Pace(first_at=100.0, began=5.0, speed=4.0)
    assert pace.wait_seconds(100.0, now=5.0) == 0
    assert pace.wait_seconds(108.0, now=5.5) == 1.5
    assert pace.wait_seconds(108.0, now=8.0) == -1


def test_own_namespace_is_refused_in_a_sentence() -> None:
    with pytest.raises(UsageError, match=r"--serve run\. is the run's own namespace: name another one"):
        scratch_settings(BusSettings("localhost:1", "run."), "run.")


def test_topics_are_named_in_full_or_without_their_frame() -> None:
    assert topics_named("turns.requested, rose.slack.heartbeats.v1") == [REQUESTED, HEARTBEATS]
    with pytest.raises(UsageError, match=r"there is no topic turns: choose from prompts\.submitted, turns\.requested"):
        topics_named("turns")
