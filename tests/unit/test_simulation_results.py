"""Figures of simulations, ratios between arms, checks, and the trace."""

import re
from collections import Counter, defaultdict
from contextlib import nullcontext
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest

from rose.pipeline.accounting.cost import cost_of
from rose.pipeline.accounting.prices import Prices
from rose.pipeline.report.lending_statistics import LatencyBudgets, seconds_of_lending, summarise_lending
from rose.pipeline.simulation.comparison import run_arms
from rose.pipeline.simulation.costs import simulated_usage
from rose.pipeline.simulation.fleet import Fleet
from rose.pipeline.simulation.latency_histogram import LatencyHistogram
from rose.pipeline.simulation.recorder import Answered, MemoryDecision, Recorder
from rose.pipeline.simulation.report_page import (
    simulated_audit,
    simulated_history,
    simulation_page,
    user_requests,
)
from rose.pipeline.simulation.results import (
    ArmFigures,
    ScenarioResult,
    arm_figures,
    checks,
    compare,
    encode_turns,
    measured,
    reused_share,
)
from rose.pipeline.simulation.rollout import TurnFigures
from rose.pipeline.simulation.scenario import Failure, Scenario, load_scenario
from rose.pipeline.simulation.trace import encode_trace
from rose.pipeline.simulation.trainer import StepFigures
from tests.support.simulated_scenario import write_scenario
from tests.support.simulation_fixtures import scenario


@cache
def tiny() -> dict[str, Scenario]:
    with TemporaryDirectory() as folder:
        return load_scenario(write_scenario(Path(folder)))


@cache
def finished() -> tuple[ScenarioResult, dict[str, Fleet], Recorder]:
    """Return the result of the small scenario, its fleets, and the recorder of `rose`."""
    fleets: dict[str, Fleet] = {}
    recorder = Recorder()
    result = run_arms(
        "tiny",
        tiny(),
        watch=lambda name, fleet, ends_at: nullcontext(),
        ended=fleets.__setitem__,
        recorders={"rose": recorder},
    )
    return result, fleets, recorder


def test_first_of_several_steps_is_warm_up() -> None:
    result, fleets, _ = finished()
    fleet, figures = fleets["rose"], result.arms["rose"]
    _, second = fleet.trainer.figures.steps
    assert figures.measured_steps == 1
    assert figures.step_seconds == second.ended_at - second.began_at
    assert figures.rollout_seconds == second.collected_at - second.began_at
    assert figures.trajectories_per_hour == pytest.approx(3600 * second.trained / figures.step_seconds)
    assert figures.turns == sum(turn.requested_at >= second.began_at for turn in fleet.rollout.turns)
    assert sum(figures.turns_by_kind.values()) == figures.turns


@pytest.mark.parametrize(
    ("steps", "open_steps", "counted"), [(1, 1, [0]), (4, 1, [1, 2, 3]), (6, 2, [2, 3, 4, 5]), (7, 2, [3, 4, 5, 6])]
)
def test_warm_up_is_left_out_and_rounds_of_uneven_steps_are_whole(
    steps: int, open_steps: int, counted: list[int]
) -> None:
    all_steps = [StepFigures(began_at=float(number)) for number in range(steps)]
    assert [step.began_at for step in measured(all_steps, open_steps)] == counted


def test_throughput_of_an_asynchronous_trainer_does_not_depend_on_the_number_of_steps() -> None:
    """The groups of two steps run at once, so every second step waits for nothing."""
    alike = {"turns_spread": 0.0, "trajectory_spread": 0.0, "turn_spread": 0.0}
    room = [{"profile": "qwen3-8b-h800-tp1", "count": 2, "max_turns": 64}]
    found = []
    for steps in (4, 5, 9):
        training = {"mode": "asynchronous", "max_staleness": 1, "steps": steps}
        fleet = Fleet(scenario(dedicated=room, tasks=alike, training=training))
        fleet.run()
        found.append(arm_figures(fleet).step_seconds)
    assert found == pytest.approx([found[-1]] * 3, rel=0.06)


def test_only_step_is_measured() -> None:
    scenario = tiny()["fixed"]
    fleet = Fleet(msgspec.structs.replace(scenario, training=msgspec.structs.replace(scenario.training, steps=1)))
    fleet.run()
    figures = arm_figures(fleet)
    assert figures.measured_steps == 1
    assert figures.turns == len(fleet.rollout.turns)


def test_ratios_are_those_of_rose_over_the_arm() -> None:
    result, _, _ = finished()
    ours, theirs, over = result.arms["rose"], result.arms["fixed"], result.over["fixed"]
    assert over.throughput == ours.trajectories_per_hour / theirs.trajectories_per_hour > 1.0
    assert over.rollout == theirs.rollout_seconds / ours.rollout_seconds > 1.0
    assert set(result.over) == {"fixed", "spot"}


def test_lent_time_is_that_of_engines_outside_of_the_rollouts() -> None:
    result, fleets, _ = finished()
    assert result.arms["fixed"].lent_gpu_hours == 0.0
    for arm, kind in (("rose", "lender"), ("spot", "moved")):
        lent = [each.engine.busy_seconds for name, each in fleets[arm].executors.items() if name.startswith(kind)]
        assert result.arms[arm].lent_gpu_hours == pytest.approx(sum(lent) / 3600)
        assert result.arms[arm].turns_by_kind[kind] > 0


def test_users_of_an_arm_that_never_lends_see_what_serving_alone_shows() -> None:
    """Serving alone is simulated by itself, for the time of the arm."""
    result, _, _ = finished()
    fixed, rose = result.arms["fixed"], result.arms["rose"]
    assert fixed.users == fixed.alone
    assert (fixed.ttft_of_alone, fixed.tpot_of_alone) == (1.0, 1.0)
    assert rose.users is not None and rose.alone is not None
    assert rose.alone.requests == rose.users.requests < fixed.users.requests  # type: ignore[union-attr]


def test_latencies_of_servers_are_merged_over_all_tokens() -> None:
    """One server has 999 fast tokens, another has one slow token: the p99 of all is fast, the mean of p99s is not."""
    fast, slow, together = LatencyHistogram(), LatencyHistogram(), LatencyHistogram()
    fast.add(0.01, 999)
    slow.add(1.0)
    together.add(0.01, 999)
    together.add(1.0)
    fast.merge(slow)
    assert fast.percentile(0.99) == together.percentile(0.99) == pytest.approx(0.01, rel=0.01)
    assert (fast.count, fast.mean()) == (together.count, together.mean())


def turn(number: int, version: int, *, context: int, cached: int) -> TurnFigures:
    values: dict[str, Any] = dict.fromkeys(TurnFigures.__slots__, 0.0)
    values |= {"trajectory": "g:0", "turn": number, "version": version, "new_tokens": 10, "device_seconds": {}}
    return TurnFigures(**values | {"context_tokens": context, "cached_tokens": cached})


def test_reuse_counts_only_what_the_turn_before_computed_under_the_same_version() -> None:
    first, second = turn(0, 1, context=90, cached=64), turn(1, 1, context=150, cached=80)
    other_version = turn(2, 2, context=200, cached=0)
    assert reused_share([first]) == 0.0
    assert reused_share([first, second, other_version]) == 80 / 100
    assert reused_share([first, turn(1, 1, context=150, cached=140)]) == 1.0, "an observation is not reusable"


def with_ratios(name: str, **changes: float) -> tuple[ScenarioResult, dict[str, Scenario]]:
    """Return the result with other figures for `rose`, and the arms."""
    result, _, _ = finished()
    arms = dict(result.arms)
    arms["rose"] = msgspec.structs.replace(arms["rose"], **changes)
    return compare(name, tiny(), arms), tiny()


def test_check_takes_the_worst_setting() -> None:
    fixed = finished()[0].arms["fixed"]
    good, arms = with_ratios("good", trajectories_per_hour=2 * fixed.trajectories_per_hour, ttft_of_alone=1.0)
    bad, _ = with_ratios("bad", trajectories_per_hour=1.2 * fixed.trajectories_per_hour, ttft_of_alone=1.2)
    found = {check.name: check for check in checks([good, bad], {"good": arms, "bad": arms})}
    assert found["fixed"].value == pytest.approx(1.2) and not found["fixed"].met
    assert found["fixed"].details == pytest.approx({"good/fixed": 2.0, "bad/fixed": 1.2})
    assert found["promise"].value == 1.2 and not found["promise"].met
    passed = {check.name: check for check in checks([good], {"good": arms})}
    assert passed["fixed"].met and passed["promise"].met


def test_ratio_of_an_arm_with_moved_engines_is_that_of_rollouts() -> None:
    spot = finished()[0].arms["spot"]
    result, arms = with_ratios("tiny", trajectories_per_hour=1e9, rollout_seconds=spot.rollout_seconds / 1.1)
    (elastic,) = [check for check in checks([result], {"tiny": arms}) if check.name == "elastic"]
    assert elastic.value == pytest.approx(1.1) and not elastic.met


def test_arm_without_a_figure_of_a_paper_is_not_checked() -> None:
    arms = {arm: msgspec.structs.replace(scenario, paper={}) for arm, scenario in tiny().items()}
    result = compare("tiny", arms, finished()[0].arms)
    assert {check.name for check in checks([result], {"tiny": arms})} == {"promise"}


def test_promise_is_checked_in_the_strict_policy_only() -> None:
    scenarios = dict(tiny())
    lending = scenarios["rose"].lending
    assert lending is not None
    scenarios["rose"] = msgspec.structs.replace(scenarios["rose"], lending=msgspec.structs.replace(lending, dial=0.1))
    found = checks([finished()[0]], {"tiny": scenarios})
    assert "promise" not in {check.name for check in found}


@pytest.mark.parametrize(("late", "met"), [(15.0, True), (15.5, False)])
def test_arm_with_failures_may_end_later_by_the_stated_time(late: float, met: bool) -> None:
    result, _, _ = finished()
    failure = Failure(what="executors_die", at_seconds=1, for_seconds=10, recovers_within_seconds=5)
    scenarios = {**tiny(), "dies": msgspec.structs.replace(tiny()["rose"], failures=(failure,))}
    ours = result.arms["rose"]
    dies = msgspec.structs.replace(ours, simulated_seconds=ours.simulated_seconds + late)
    found = checks([compare("tiny", scenarios, {**result.arms, "dies": dies})], {"tiny": scenarios})
    (recovery,) = [check for check in found if check.name == "recovery"]
    assert recovery.met is met
    assert recovery.details == pytest.approx({"tiny/dies": late - 15.0})


def test_turns_have_a_line_each_with_their_stations_in_order() -> None:
    _, fleets, _ = finished()
    lines = [msgspec.json.decode(line) for line in encode_turns("tiny", "rose", fleets["rose"].rollout.turns)]
    assert len(lines) == len(fleets["rose"].rollout.turns) > 0
    assert len({(line["trajectory"], line["turn"]) for line in lines}) == len(lines)
    stations = ("requested", "queued", "dispatched", "received", "scheduled", "first_token", "finished", "applied")
    for line in lines:
        times = [line[f"{station}_at"] for station in stations]
        assert times == sorted(times) and times[0] > 0.0
        assert (line["scenario"], line["arm"]) == ("tiny", "rose")


def test_recording_changes_nothing() -> None:
    result, _, recorder = finished()
    assert recorder.entries
    fleet = Fleet(tiny()["rose"])
    fleet.run()
    figures = result.arms["rose"]
    assert arm_figures(fleet) == ArmFigures(
        **{**msgspec.structs.asdict(figures), "alone": None, "ttft_of_alone": None, "tpot_of_alone": None}
    )


def test_recorder_keeps_no_more_than_its_limit() -> None:
    recorder = Recorder(most=2)
    for at in range(5):
        recorder.add(MemoryDecision("lender-0", float(at), 1, False))
    assert [entry.at for entry in recorder.entries] == [0.0, 1.0]  # type: ignore[union-attr]
    assert recorder.left_out == 3


def test_report_shows_the_simulation_as_a_log_would() -> None:
    result, fleets, recorder = finished()
    fleet, figures = fleets["rose"], result.arms["rose"]
    history, served, audit = simulated_history(fleet, recorder), user_requests(recorder), simulated_audit(fleet)
    assert audit.clean and audit.settled == sum(figures.outcomes.values()) > 0
    assert len(history.turns) == len(fleet.rollout.turns) and len(history.trajectories) == audit.settled
    first_attempts = [turn.bus_seconds for turn in history.turns if not turn.attempt]
    assert first_attempts == pytest.approx([3 * fleet.scenario.hop_seconds] * len(first_attempts))
    assert history.lenders == {"lender-0", "lender-1", "lender-2"}
    assert figures.users is not None and len(served) == figures.users.requests
    promised = LatencyBudgets(ttft=0.5, tpot=0.15)
    lending = summarise_lending(history, served, seconds_of_lending(history, served, now=fleet.events.now), promised)
    assert lending is not None
    assert lending.kept == pytest.approx(figures.users.kept)
    assert lending.undrawn == 0 and lending.turns > 0
    first = sorted(each.first_token_seconds or 0.0 for each in served)
    assert figures.users.ttft_p50 == pytest.approx(first[(len(first) - 1) // 2], rel=0.01)


def test_device_time_is_that_of_the_engines_and_of_the_trainer() -> None:
    result, fleets, _ = finished()
    fleet = fleets["rose"]
    cost = cost_of(simulated_usage(fleet), Prices())
    seconds: Counter[str] = Counter()
    for line in cost.lines:
        seconds[line.device_class] += line.device_seconds  # type: ignore[assignment]
    lenders = sum(lender.engine.busy_seconds for lender in fleet.lenders)
    assert seconds["dedicated"] == pytest.approx(fleet.events.now), "one card, held all the time"
    assert seconds["borrowed"] == pytest.approx(lenders, rel=1e-3), "turns under way included"
    assert seconds["trainer"] == pytest.approx(fleet.events.now * fleet.scenario.training.gpus)
    assert cost.trained == result.arms["rose"].outcomes["trained"]
    assert cost.correct >= result.arms["rose"].correct > 0


def fate_seconds(fleet: Fleet) -> Counter[tuple[str, str]]:
    lines = cost_of(simulated_usage(fleet), Prices()).lines
    return Counter({(line.device_class, line.fate): line.device_seconds for line in lines})


def test_gpus_of_the_trainer_that_run_rollouts_cost_once() -> None:
    training = {
        "mode": "asynchronous",
        "max_staleness": 1,
        "steps": 4,
        "lends_gpus": 2,
        "gpus": 2,
        "fixed_seconds": 8.0,
    }
    fleet = Fleet(scenario(training=training))
    fleet.run()
    seconds = fate_seconds(fleet)
    rollouts = sum(fleet.executors[f"trainer-{number}"].engine.busy_seconds for number in range(2))
    assert rollouts > 0.0
    assert seconds.total() == pytest.approx(4 * fleet.events.now), "two dedicated GPUs and two of the trainer"
    assert seconds["trainer", "waiting"] < fleet.events.now


def test_attempt_whose_answer_was_not_applied_is_lost() -> None:
    stop = {"what": "heartbeats_stop", "at_seconds": 20.0, "share": 0.5, "for_seconds": 10.0}
    fleet = Fleet(scenario(failures=[stop], dedicated=[{"profile": "qwen3-8b-h800-tp1", "count": 2, "max_turns": 8}]))
    fleet.run()
    usage = simulated_usage(fleet)
    assert sum(attempt.device_seconds for attempt in usage.attempts if not attempt.kept) > 0.0
    answered = [each for executor in fleet.executors.values() for each in executor.attempts]
    kept = [one for one, attempt in zip(answered, usage.attempts, strict=True) if attempt.kept]
    tokens = sum(each.tokens - each.tokens_before for each in kept)
    assert tokens == sum(turn.new_tokens for turn in fleet.rollout.turns)


def test_report_page_says_that_it_is_simulated() -> None:
    _, fleets, recorder = finished()
    page = simulation_page(fleets["rose"], recorder, name="tiny, rose")
    text = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert "Simulated: " in text and "trained trajectories an hour" in text
    assert "none was lost and none counted twice" in text
    for untrue in ("real users", "Kafka", "1970", "Held-out"):
        assert untrue not in text
    assert 'id="learning"' not in text, "a simulated policy does not learn"
    for chart in ("lending", "occupancy", "timeline", "latency", "steps", "cost_fates"):
        assert f'id="{chart}"' in text


def test_report_page_says_how_many_requests_a_full_recorder_has() -> None:
    _, fleets, recorder = finished()
    part = Recorder(len(recorder.entries) // 2)
    for entry in recorder.entries:
        part.add(entry)
    page = simulation_page(fleets["rose"], part, name="tiny, rose")
    assert f"answered {len(user_requests(part)):,} requests" in page
    assert f", the first of {len(user_requests(recorder)):,}" in page
    assert "the first of" not in simulation_page(fleets["rose"], recorder, name="tiny, rose")


@pytest.mark.parametrize("frozen", [False, True])
def test_cuts_and_freezes_of_a_lender_add_up(frozen: bool) -> None:
    _, fleets, _ = finished()
    recorder = Recorder()
    for at, cuts in ((1.0, 2), (2.0, 3)):
        recorder.add(MemoryDecision("lender-1", at, cuts, frozen))
    statuses = [each for each in simulated_history(fleets["rose"], recorder).lender_statuses if each.at]
    assert [(each.at, each.cuts, each.frozen) for each in statuses] == [(1.0, 2, frozen), (2.0, 5, frozen)]


def trace() -> dict[str, Any]:
    _, fleets, recorder = finished()
    pieces = encode_trace(recorder, fleets["rose"].trainer.figures.steps)
    found: dict[str, Any] = msgspec.json.decode(b"".join(pieces))
    return found


def test_slices_of_a_track_do_not_overlap() -> None:
    """A viewer shows overlapping slices of a track as nested calls."""
    tracks: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in trace()["traceEvents"]:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in tracks.values():
        slices.sort()
        assert all(end <= begin + 1 for (_, end), (begin, _) in pairwise(slices))


def test_trace_has_every_turn_and_the_steps_of_trainer_and_serving() -> None:
    _, fleets, recorder = finished()
    events = trace()["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    slices = [event for event in events if event["ph"] == "X"]
    completed = {
        tuple(event["name"].rsplit("/", 2)[:2])
        for event in slices
        if event.get("args", {}).get("outcome") == "completed"
    }
    assert completed == {(each.trajectory, str(each.turn)) for each in fleets["rose"].rollout.turns}
    kinds = Counter((names[event["pid"]].partition("-")[0], event["name"]) for event in slices)
    assert kinds["lender", "guest computes"] and kinds["lender", "prefill"] and kinds["lender", "decode"]
    assert kinds["trainer", "step 1: collects"] == kinds["trainer", "step 2: trains and publishes"] == 1
    instants = Counter(event["name"] for event in events if event["ph"] == "i")
    assert instants["version 1"] > 1, "the trainer and the executors that serve it"
    assert any(isinstance(entry, Answered) for entry in recorder.entries)


def test_strict_guest_never_computes_while_serving_does() -> None:
    """The two are written by different parts: by serving's steps, and by the pauses of the guest."""
    events = [event for event in trace()["traceEvents"] if event["ph"] == "X" and "dur" in event]
    spans: defaultdict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for event in events:
        if event["name"] in ("guest computes", "prefill", "decode"):
            kind = "guest" if event["name"] == "guest computes" else "serving"
            spans[event["pid"]].append((event["ts"], event["ts"] + event["dur"], kind))
    assert spans
    for each in spans.values():
        each.sort()
        for (_, end, kind), (begin, _, other) in pairwise(each):
            assert kind == other or end <= begin + 1
