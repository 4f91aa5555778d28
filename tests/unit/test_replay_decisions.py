"""Replay of a captured log: the same decisions, a changed constant, and records that are gone."""

import math

import pytest

from rose.pipeline.replay.decisions import CoreReplay, replay_core
from rose.pipeline.replay.differences import describe_replays
from rose.pipeline.replay.recorded_cores import recorded_cores
from rose.pipeline.routing import placement, router
from rose.schemas.turns import TurnDispatch
from rose.topics.catalog import COMPLETED, HEARTBEATS, JOURNAL, REQUESTED
from tests.support.captured_log import CapturedLog


def replayed(log: CapturedLog, **bounds: float) -> CoreReplay:
    (core,) = recorded_cores(log.journals())
    return replay_core(core, log, explained=2, **bounds)


def text(replay: CoreReplay) -> str:
    return "\n".join(describe_replays([replay], 0))


def test_captured_demo_has_no_differing_decision() -> None:
    replay = replayed(CapturedLog())
    assert replay.differences == []
    assert text(replay) == "266 decisions, no difference"


def test_changed_constant_shows_at_the_first_turn_that_it_places_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "REMAINING_FRACTION", 0.0)
    replay = replayed(CapturedLog())
    moved = next(each for each in replay.differences if each.moves)
    assert moved.logged is not None and moved.made is not None and moved.made.costs is not None
    logged, made = moved.logged.record, moved.made.record
    assert isinstance(logged, TurnDispatch) and isinstance(made, TurnDispatch)
    assert min(moved.made.costs, key=moved.made.costs.__getitem__) == made.worker != logged.worker
    shown = text(replay)
    assert f"{made.request.trajectory_id} turn {made.request.turn} attempt {made.attempt}" in shown
    assert f"log:  {logged.worker} for" in shown and f"core: {made.worker} for" in shown


def test_differences_of_a_changed_constant_begin_where_the_term_first_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = replayed(CapturedLog())
    monkeypatch.setattr(router, "EXPIRY_SECONDS", 0.2)
    assert replayed(CapturedLog()).differences == whole.differences == [], "no executor fell silent in this run"
    monkeypatch.setattr(placement, "DISPLACEMENT", 3.0)
    first = replayed(CapturedLog()).differences[0]
    assert first.logged is not None and first.made is not None
    assert isinstance(first.logged.record, TurnDispatch)
    assert (first.logged.record.request.turn, first.logged.partition) == (0, first.made.partition)
    assert "cost.risk_seconds" in text(replayed(CapturedLog()))


def test_bounds_of_time_select_decisions_and_not_inputs() -> None:
    (core,) = recorded_cores(CapturedLog().journals())
    middle = (core.began_at / 1e6 + core.ended_at) / 2
    before, after = replayed(CapturedLog(), until=middle), replayed(CapturedLog(), since=middle)
    assert before.compared and after.compared
    assert before.compared + after.compared == 266
    assert before.differences == after.differences == []


@pytest.mark.parametrize("topic", [HEARTBEATS, REQUESTED], ids=lambda topic: topic.name)
def test_replay_ends_at_the_first_record_that_is_gone_and_names_it(topic: object) -> None:
    log = CapturedLog()
    if topic is HEARTBEATS:
        log.drop(HEARTBEATS, 0, before=100)
    else:
        log.drop(REQUESTED, 1, before=30)
    replay = replayed(log)
    assert replay.differences == []
    assert replay.compared < 266
    assert "is not on the log any more" in replay.gap and replay.gap in text(replay)


@pytest.mark.parametrize("partition", [0, 1])
@pytest.mark.parametrize("before", range(1, 40, 3))
def test_decisions_before_a_record_that_is_gone_are_compared_and_do_not_differ(partition: int, before: int) -> None:
    log = CapturedLog()
    log.drop(COMPLETED, partition, before=before)
    replay = replayed(log)
    assert (replay.differences, bool(replay.gap)) == ([], True)


def test_core_whose_start_is_gone_is_not_compared() -> None:
    log = CapturedLog()
    log.drop(JOURNAL, 0, before=2)
    replay = replayed(log)
    assert (replay.compared, replay.gap) == (0, "its start is not on the log any more")
    assert replay.core.ended_at == math.inf, "it may have decided at any time since its start"
    assert replay.core.journaled
