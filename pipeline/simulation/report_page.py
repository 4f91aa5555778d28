"""The report page of a simulation, from the code of the report of a live run.

Keeps true: the page shows a simulation as the log of a live run would. Times are seconds of the simulation.
"""

import math
from collections import Counter
from dataclasses import replace

import msgspec

from rose.pipeline.audit import Audit, InFlight
from rose.pipeline.report.history import LenderStatus, RunHistory, Swap, TrajectoryFact, TurnFact, VersionFact
from rose.pipeline.report.lending_statistics import LatencyBudgets, seconds_of_lending, summarise_lending
from rose.pipeline.report.summary import RunMetadata, Success, describe_machine, summarise
from rose.pipeline.report.write import PageTexts, report_html
from rose.pipeline.simulation.costs import simulated_cost
from rose.pipeline.simulation.fleet import Fleet
from rose.pipeline.simulation.recorder import Answered, MemoryDecision, Recorder
from rose.pipeline.simulation.recorder import Swap as RecordedSwap
from rose.pipeline.simulation.results import arm_figures, reusable_tokens, user_figures
from rose.pipeline.simulation.rollout import TurnFigures
from rose.schemas.samples import Outcome, Sample
from rose.schemas.turns import TurnTimes
from rose.workers.loadgen.requests import UserRequest


def simulation_page(fleet: Fleet, recorder: Recorder, *, name: str) -> str:
    """Return the page of a simulation that has ended, as HTML; `name` is that of the scenario and the arm."""
    history, served = simulated_history(fleet, recorder), user_requests(recorder)
    rows = seconds_of_lending(history, served, now=fleet.events.now)
    lending = fleet.scenario.lending
    summary = summarise(
        history,
        simulated_audit(fleet),
        RunMetadata(
            broker="none: everything is simulated",
            started_at=0.0,
            seconds=fleet.events.now,
            success=Success(),
            machine=describe_machine(),
        ),
        run=name,
        seed=fleet.scenario.seed,
        cost=simulated_cost(fleet),
        lending=None
        if lending is None
        else summarise_lending(
            history, served, rows, LatencyBudgets(ttft=lending.ttft_seconds, tpot=lending.tpot_seconds)
        ),
    )
    texts = PageTexts(
        headline=f"Simulated: {arm_figures(fleet).trajectories_per_hour:,.0f} trained trajectories an hour.",
        date="simulated",
        users=_users_text(fleet, len(served)),
    )
    configuration = msgspec.json.format(msgspec.json.encode(fleet.scenario), indent=2).decode()
    return report_html(summary, history, configuration=configuration, steps=_step_lines(fleet), rows=rows, texts=texts)


def _users_text(fleet: Fleet, shown: int) -> str:
    """Return where the requests of users come from, and how many there are if the recorder left some out."""
    figures, text = user_figures(fleet), "drawn from the distributions of the scenario"
    if figures is None or figures.requests == shown:
        return text
    return f"{text}, the first of {figures.requests:,}"


def simulated_history(fleet: Fleet, recorder: Recorder) -> RunHistory:
    """Return the history of a simulation that has ended."""
    turns, training = fleet.rollout.turns, fleet.scenario.training
    trajectory_turns = Counter(turn.trajectory for turn in turns)
    weight_bytes = max(executor.cost.weight_bytes for executor in fleet.executors.values())
    history = RunHistory(
        turns=[_turn(turn, reusable) for turn, reusable in zip(turns, reusable_tokens(turns), strict=True)],
        trajectories=[_trajectory(sample, trajectory_turns) for sample, _, _ in fleet.trainer.figures.settled],
        versions=[
            VersionFact(
                version=number,
                step=number,
                published_at=step.ended_at,
                bytes=math.ceil(weight_bytes * training.delta_bytes_share),
            )
            for number, step in enumerate(fleet.trainer.figures.steps, 1)
        ],
        swaps=[
            Swap(worker=each.worker, version=each.version, at=each.at, seconds=each.seconds)
            for each in recorder.entries
            if isinstance(each, RecordedSwap)
        ],
        lender_statuses=_lender_statuses(fleet, recorder),
    )
    history.turns.sort(key=lambda turn: turn.times.requested_at)
    history.trajectories.sort(key=lambda trajectory: trajectory.completed_at)
    return history


def user_requests(recorder: Recorder) -> list[UserRequest]:
    """Return the recorded requests of users as a load generator would log them."""
    return [_user_request(each) for each in recorder.entries if isinstance(each, Answered)]


def simulated_audit(fleet: Fleet) -> Audit:
    """Return where the trajectories of a simulation are; `Fleet.run` has proven that none is lost or doubled."""
    outcomes, live = fleet.trainer.figures.outcomes, len(fleet.rollout.live)
    requested = fleet.rollout.begun
    waiting = requested - live - outcomes.total()
    return Audit(
        requested=requested,
        trained=outcomes[Outcome.TRAINED],
        stale=outcomes[Outcome.STALE],
        filtered=outcomes[Outcome.FILTERED],
        infra_failed=outcomes[Outcome.INFRA_FAILED],
        surplus=outcomes[Outcome.SURPLUS],
        superseded=outcomes[Outcome.SUPERSEDED],
        in_flight=InFlight(not_opened=0, in_a_turn=live, waiting_for_trainer=waiting),
        lost=(),
        doubled=(),
        unasked=(),
    )


def _turn(turn: TurnFigures, reusable: int) -> TurnFact:
    times = {name: getattr(turn, name) for name in TurnTimes.__struct_fields__ if hasattr(turn, name)}
    return TurnFact(
        trajectory_id=turn.trajectory,
        turn=turn.turn,
        attempt=turn.attempts - 1,
        worker=turn.worker,
        version=turn.version,
        sampled_tokens=turn.new_tokens,
        context_tokens=turn.context_tokens,
        cached_tokens=turn.cached_tokens,
        reusable_tokens=reusable,
        times=TurnTimes(**times),
        environment_seconds=turn.environment_seconds,
    )


def _trajectory(sample: Sample, turns: Counter[str]) -> TrajectoryFact:
    return TrajectoryFact(
        trajectory_id=sample.trajectory_id,
        group_id=sample.group_id,
        reward=sample.reward,
        success=sample.success,
        failure=sample.failure,
        turns=turns[sample.trajectory_id],
        sampled_tokens=int(sample.info["sampled"]),
        first_version=-1,  # a simulated policy does not learn, so the page has no learning curve
        completed_at=sample.completed_at,
    )


def _lender_statuses(fleet: Fleet, recorder: Recorder) -> list[LenderStatus]:
    """Return a status of each lender at the beginning, and one after each swap and each change of its memory."""
    newest = {
        lender.name: LenderStatus(worker=lender.name, incarnation=1, at=0.0, version=-1, cuts=0, frozen=False)
        for lender in fleet.lenders
    }
    found = list(newest.values())
    for entry in recorder.entries:
        if entry.worker not in newest or not isinstance(entry, RecordedSwap | MemoryDecision):
            continue
        before = replace(newest[entry.worker], at=entry.at)
        if isinstance(entry, RecordedSwap):
            newest[entry.worker] = replace(before, version=entry.version)
        else:
            newest[entry.worker] = replace(before, cuts=before.cuts + entry.cuts, frozen=entry.frozen)
        found.append(newest[entry.worker])
    return found


def _user_request(answered: Answered) -> UserRequest:
    result = answered.result
    later = result.sampled_tokens - 1
    decode_seconds = result.finished_at - result.first_token_at
    return UserRequest(
        at=result.request.arrived_at,
        seconds=result.finished_at - result.request.arrived_at,
        prompt_tokens=result.request.context_tokens,
        tokens=result.sampled_tokens,
        first_token_seconds=result.first_token_at - result.request.arrived_at,
        token_seconds=decode_seconds / later if later else None,
    )


def _step_lines(fleet: Fleet) -> list[dict[str, float]]:
    """Return the lines of the trainer's step log that the page draws."""
    return [
        {
            "step": number,
            "waiting_seconds": step.collected_at - step.began_at,
            "training_seconds": step.ended_at - step.collected_at,
        }
        for number, step in enumerate(fleet.trainer.figures.steps, 1)
    ]
