"""A simulated run loses nothing and overfills nobody, whatever fails; the seed alone decides what happens."""

import itertools
from typing import Any

import msgspec
import pytest

from rose.pipeline.routing.router import Router
from rose.pipeline.simulation.fleet import Fleet
from rose.schemas.errors import UsageError
from rose.schemas.heartbeats import SlackHeartbeat
from rose.schemas.samples import Outcome
from tests.support.simulation_fixtures import PROFILE, scenario

LENDING: dict[str, Any] = {
    "lending": {"serving_profile": PROFILE, "guest_profile": PROFILE, "count": 3, "max_turns": 4},
    "elastic": {"how": "lend"},
    "users": {"busy": 0.1},
}
ROUTING = ["rose", "round_robin", "session", "least_load"]
FAILURES = ["executors_die", "lenders_leave", "heartbeats_stop", "router_freezes", "router_dies", "link_slow"]


def run(**changes: Any) -> Fleet:
    """Run a small fleet. The fleet itself checks conservation and offers at the end."""
    fleet = Fleet(scenario(**changes))
    fleet.run()
    assert fleet.overfilled == 0
    settled = [sample.trajectory_id for sample, _, _ in fleet.trainer.figures.settled]
    assert len(settled) == len(set(settled)) == sum(fleet.trainer.figures.outcomes.values())
    assert sum(step.trained for step in fleet.trainer.figures.steps) <= len(settled)
    return fleet


def sampled(fleet: Fleet) -> dict[tuple[str, int], int]:
    """Sampled tokens of each applied turn."""
    return {(turn.trajectory, turn.turn): turn.new_tokens for turn in fleet.rollout.turns}


def test_same_seed_gives_the_same_run_and_another_seed_another_one() -> None:
    def facts(seed: int) -> tuple[Any, ...]:
        fleet = run(seed=seed, **LENDING)
        steps = [msgspec.json.encode(step) for step in fleet.trainer.figures.steps]
        return fleet.events.now, fleet.events.handled, steps, fleet.rollout.turns, fleet.trainer.figures.settled

    first = facts(1)
    assert first == facts(1)
    assert first[3] != facts(2)[3]


def test_trajectories_do_the_same_on_every_fleet_and_under_every_router() -> None:
    arms: list[dict[str, Any]] = [{}, LENDING, {**LENDING, "routing": {"policy": "least_load"}, "cells": 2}]
    arms += [{"routing": {"policy": routing}} for routing in ROUTING[1:]]
    arms += [{"training": {"mode": "asynchronous", "max_staleness": 2}}]
    turns = [sampled(run(**arm)) for arm in arms]
    common = set.intersection(*(set(each) for each in turns))
    assert len(common) > 20
    for each in turns:
        assert {key: each[key] for key in common} == {key: turns[0][key] for key in common}


@pytest.mark.parametrize("routing", ROUTING)
@pytest.mark.parametrize("what", FAILURES)
def test_failure_loses_no_trajectory_and_no_sampled_token(what: str, routing: str) -> None:
    failures = [
        {"what": what, "at_seconds": at, "share": 0.7, "for_seconds": 6.0} for at in (3.0, 8.0, 16.0, 17.5, 30.0)
    ]
    whole = sampled(run(training={"steps": 1}, **LENDING))
    fleet = run(failures=failures, routing={"policy": routing}, training={"steps": 1}, **LENDING)
    found = sampled(fleet)
    assert len(found) == len(fleet.rollout.turns), "a turn was applied twice"
    common = set(found) & set(whole)
    assert len(common) > 20 and all(found[key] == whole[key] for key in common)


@pytest.mark.parametrize(
    ("failure", "sentence"),
    [
        ({"what": "router_freezes", "at_seconds": 1e6}, "never happened: the run ended after"),
        ({"what": "executors_die", "at_seconds": 2.0, "share": 0.1}, "affects no engine"),
        ({"what": "lenders_leave", "at_seconds": 2.0}, "affects no engine"),
    ],
)
def test_failure_that_fails_nothing_is_refused(failure: dict[str, Any], sentence: str) -> None:
    """An arm with such a failure would seem to recover."""
    with pytest.raises(UsageError, match=sentence):
        Fleet(scenario(failures=[failure], training={"steps": 1})).run()


@pytest.mark.parametrize("what", ["router_freezes", "router_dies"])
def test_router_that_stood_still_meets_the_records_of_an_executor_in_order(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: dict[tuple[str, int], list[float]] = {}
    on_event = Router.on_event

    def noted(router: Router, event: Any, now: float) -> list[Any]:
        if isinstance(event, SlackHeartbeat):
            met.setdefault((event.worker, event.incarnation), []).append(event.sent_at)
        return on_event(router, event, now)

    monkeypatch.setattr(Router, "on_event", noted)
    times_of_failures = (3.01, 6.03, 9.05, 12.07, 15.09)
    run(failures=[{"what": what, "at_seconds": at, "for_seconds": 2.06} for at in times_of_failures])
    assert met and all(times == sorted(times) for times in met.values())


def test_router_that_takes_a_cell_over_knows_the_turns_that_run() -> None:
    """A turn that an executor holds ends there, and no turn is computed twice."""
    failures = [{"what": "router_dies", "at_seconds": at, "for_seconds": 4.0} for at in (5.0, 12.0)]
    fleet = run(failures=failures, training={"steps": 1})
    assert {turn.attempts for turn in fleet.rollout.turns} == {1}
    asked_meanwhile = [turn for turn in fleet.rollout.turns if 5.0 < turn.requested_at < 8.0]
    assert asked_meanwhile and all(turn.dispatched_at >= 9.0 for turn in asked_meanwhile)


def test_every_executor_takes_turns_again_after_a_failure() -> None:
    failures = [{"what": "executors_die", "at_seconds": at, "share": 1.0, "for_seconds": 3.0} for at in (2.0, 6.0)]
    fleet = run(failures=failures, training={"steps": 4}, **LENDING)
    assert {turn.worker for turn in fleet.rollout.turns if turn.applied_at > 15.0} == set(fleet.executors)


def test_turns_are_on_the_clock_in_order() -> None:
    fleet = run(**LENDING)
    for turn in fleet.rollout.turns:
        assert turn.requested_at <= turn.scheduled_at < turn.finished_at < turn.applied_at
        assert turn.cached_tokens < turn.context_tokens
    ordered = sorted(fleet.rollout.turns, key=lambda turn: (turn.trajectory, turn.turn))
    for before, after in itertools.pairwise(ordered):
        if before.trajectory == after.trajectory:
            assert after.turn == before.turn + 1 and before.applied_at <= after.requested_at
            assert before.context_tokens < after.context_tokens


def test_device_seconds_of_all_turns_are_the_busy_seconds_of_the_engines() -> None:
    fleet = run()
    charged = sum(sum(turn.device_seconds.values()) for turn in fleet.rollout.turns)
    assert charged == pytest.approx(sum(each.engine.busy_seconds for each in fleet.executors.values()), rel=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"elastic": {"how": "whole", "allocation_seconds": 2.0}},
        {"training": {"lends_gpus": 2, "toggle_seconds": 1.0}},
        {"training": {"algorithm": "dapo"}, "tasks": {"groups": 4, "hardness": 0.5}},
        {"training": {"mode": "asynchronous", "max_staleness": 3}},
        {"cells": 3},
        {"tasks": {"groups": 4, "members_ratio": 1.5}},
        {"tasks": {"groups": 4, "members_ratio": 1.5}, "routing": {"policy": "least_load"}},
        {"lending": {**LENDING["lending"], "dial": 1.0}},
    ],
)
def test_way_of_running_loses_no_trajectory(changes: dict[str, Any]) -> None:
    fleet = run(**{**LENDING, **changes})
    assert len(fleet.trainer.figures.steps) == 2


def test_surplus_trajectories_end_early_and_leave_no_turn_behind() -> None:
    fleet = run(**{**LENDING, "tasks": {"groups": 4, "group_size": 4, "members_ratio": 1.5}})
    outcomes = fleet.trainer.figures.outcomes
    assert outcomes[Outcome.SURPLUS] == outcomes.total() // 3
    assert outcomes[Outcome.TRAINED] + outcomes[Outcome.FILTERED] == 2 * outcomes[Outcome.SURPLUS]
    withdrawn = sum(cell.router.counters.withdrawn for cell in fleet.cells if isinstance(cell.router, Router))
    assert 0 < withdrawn <= outcomes[Outcome.SURPLUS]


def test_moved_engines_are_held_only_while_they_run_rollouts() -> None:
    elastic = {"how": "whole", "allocation_seconds": 5.0, "engine_requests": 8}
    fleet = run(**{**LENDING, "elastic": elastic})
    own = [each for name, each in fleet.executors.items() if name.startswith("dedicated")]
    moved = [each for name, each in fleet.executors.items() if name.startswith("moved")]
    assert all(each.held_times(fleet.events.now) == [(0.0, fleet.events.now)] for each in own)
    times = [time for each in moved for time in each.held_times(fleet.events.now)]
    assert times and all(begin >= 5.0 for begin, _ in times)
    assert all(each.held_times(fleet.events.now) for each in moved if each.attempts)


def test_engine_on_the_trainers_gpus_comes_back_once_after_each_time_that_the_trainer_waits() -> None:
    """The trainer waits and trains again before an engine is ready: what was begun for the wait before is void."""
    training = {"mode": "asynchronous", "max_staleness": 2, "steps": 12, "lends_gpus": 2, "fixed_seconds": 2.0}
    tasks = {"groups": 1, "group_size": 4, "turns": 2}
    fleet = run(training={**training, "parameters": 1.0}, tasks=tasks)
    for number in range(2):
        executor = fleet.executors[f"trainer-{number}"]
        assert executor.incarnation == len(executor.held_times(fleet.events.now)) > 1


def test_engines_are_as_busy_with_users_as_the_scenario_says() -> None:
    """Requests go to idle engines, so several engines are busier than one at the same load of each."""
    lending = {**LENDING["lending"], "count": 12}
    fleet = Fleet(scenario(lending=lending, users={"busy": 0.5}))
    fleet.events.run_until(lambda: fleet.events.now >= 3000.0, latest=4000.0)
    busy = sum(serving.engine.busy_seconds for serving in fleet.serving) / 12 / fleet.events.now
    assert busy == pytest.approx(0.5, abs=0.06)


def test_servers_are_as_busy_with_long_prompts_as_the_scenario_says() -> None:
    """Many prompts are cut off: the rate must count with the lengths that are sent."""
    users = {"busy": 0.3, "prompt_tokens": 12_000, "minute_peak": 1.0, "second_peak": 1.0}
    fleet = Fleet(scenario(lending={**LENDING["lending"], "count": 4}, users=users))
    fleet.events.run_until(lambda: fleet.events.now >= 3000.0, latest=4000.0)
    busy = sum(serving.engine.busy_seconds for serving in fleet.serving) / 4 / fleet.events.now
    assert busy == pytest.approx(0.3, abs=0.03)


def test_dispatch_after_the_end_of_its_trajectory_has_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(scenario())
    works = []
    decided = fleet.rollout.work_of
    dispatches = []

    def work_of(dispatch: Any) -> Any:
        dispatches.append(dispatch)
        works.append(decided(dispatch))
        return works[-1]

    monkeypatch.setattr(fleet.rollout, "work_of", work_of)
    fleet.run()
    ended = [number for number, each in enumerate(dispatches) if each.request.trajectory_id not in fleet.rollout.live]
    assert ended
    for number in ended:
        assert decided(dispatches[number]) == works[number]
