"""Answers to "what if": the trajectories of a recorded run on the simulated fleet, as it was and with changes.

Keeps true
- Both arms run the recorded trajectories. `recorded` has the fleet, the settings and the measured delays of the run;
  `what_if` differs by the changes alone.
- The first comparison is `recorded` with the log itself: it says how far the simulation can be trusted.
- A change of what the log determines, the tasks and the number of steps, is refused.

Seconds, unless a name says otherwise.
"""

import tomllib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rose.pipeline.accounting.cost import CostReport, TrainerStep, Usage, cost_of
from rose.pipeline.accounting.prices import Prices
from rose.pipeline.simulation.cost_model import write_profile
from rose.pipeline.simulation.costs import simulated_cost
from rose.pipeline.simulation.fitted_engine import WEIGHT_BYTES, ComputedTurn, FittedEngine, fit_engine
from rose.pipeline.simulation.fleet import Fleet
from rose.pipeline.simulation.latency_histogram import LatencyHistogram
from rose.pipeline.simulation.lender import HEADROOM_SHARE
from rose.pipeline.simulation.recorded_run import EngineKind, EngineModel, RecordedRun, RecordedStep
from rose.pipeline.simulation.results import measured
from rose.pipeline.simulation.rollout import TurnFigures
from rose.pipeline.simulation.scenario import (
    Control,
    Elastic,
    Lending,
    Pool,
    PriceList,
    Routing,
    Scenario,
    Tasks,
    Training,
    Users,
)
from rose.pipeline.simulation.trainer import StepFigures
from rose.pipeline.simulation.trajectory_plans import TrajectoryPlan
from rose.schemas.errors import RoseError, UsageError
from rose.schemas.heartbeats import WorkerClass
from rose.workers.lender.admission import Promise
from rose.workers.lender.recording import HEADER, encode_row

FIXED = ("tasks", "seed", "name", "training.steps", "training.algorithm")
"""Fields of a scenario that the log determines."""

RECORDED, WHAT_IF = "recorded", "what_if"
"""Names of the arms."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of a run that its records do not hold."""

    name: str
    step_tokens: int
    max_staleness: int
    max_lag_versions: int
    promise: Promise
    control: Control
    cells: int
    heartbeat_seconds: float
    prices: Prices


class RunFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a run, recorded or simulated."""

    seconds: float
    """From the first request until the last batch was complete."""
    step_seconds: float
    """Mean time of a training step without the warm-up, as in `rose simulate`."""
    rollout_seconds: float
    """Mean time until the batch of a step was complete."""
    wait_p50: float
    """From the request of a turn until an engine began to compute it."""
    wait_p99: float
    cached_share: float
    """Share of the context tokens that were in the prefix cache."""
    lent_share: float
    """Share of the turns that lenders ended."""
    turns: list[int]
    """Turns by executor, in ascending order."""
    correct: int
    device_seconds_per_answer: float | None
    cost_per_answer: float | None
    currency: str


@dataclass(frozen=True)
class Replica:
    """A recorded run, ready to be simulated."""

    scenario: Scenario
    plans: list[list[TrajectoryPlan]]
    step_groups: list[int]
    """Groups of each training step."""
    log: RunFigures
    engines: dict[EngineModel, FittedEngine]
    """The fitted figures."""
    left_out_groups: int
    """Groups of evaluations, and those that failed, ended early or are not whole on the log."""
    left_out_executors: int
    """Executors that were there for less than half of the time, or whose kind cannot be simulated beside the others."""

    def simulate(self, scenario: Scenario) -> Fleet:
        """Return a fleet that runs the recorded trajectories under a scenario; the caller runs the fleet.

        Raises UsageError if the scenario opens fewer groups at once than a recorded step has.
        """
        if scenario.window_groups < max(self.step_groups):
            raise UsageError(
                f"--what-if training.window_groups={scenario.window_groups}: a step of the run has "
                f"{max(self.step_groups)} groups, so at least as many must be open at once"
            )
        return Fleet(scenario, plans=self.plans, step_groups=self.step_groups)


def replica_of(run: RecordedRun, settings: RunSettings, usage: Usage, folder: Path) -> Replica:
    """Return a recorded run as the input of simulations.

    Args:
        run: The records.
        settings: The settings of the run.
        usage: Usage of the run, for the cost on the log.
        folder: Where the profiles and the recorded load of servers are written; simulations read them.

    Raises:
        RoseError: The log has too little of the run.
    """
    groups, left_out = run.groups()
    if not groups:
        raise RoseError("no group began and ended in this time: give a longer stretch, or wait until groups have ended")
    steps = run.steps(groups)
    per_step = max((len(step.groups) for step in steps), default=len(groups))
    turns = run.turns(groups)
    begin, end = min(turn.requested_at for turn in turns), max(turn.applied_at for turn in turns)
    present = run.fleet(begin, end)
    if not present:
        raise RoseError(
            "the log has no heartbeats of that time: they are kept for topics.heartbeats_retention_seconds; set it "
            "longer than the run, before the run"
        )
    fitted = _fit(run, present, settings.step_tokens)
    lent = max((kind for kind in present if _lends(kind)), key=lambda kind: len(present[kind]), default=None)
    figures = [step.figures for step in steps]
    window = max(run.window_groups(groups) if steps else 0, per_step)
    scenario = Scenario(
        name=settings.name,
        dedicated=tuple(
            _pool(run, kind, names, fitted[kind.model], settings, folder)
            for kind, names in present.items()
            if not _lends(kind)
        ),
        lending=None if lent is None else _lending(run, lent, present[lent], fitted[lent.model], settings, folder),
        users=None if lent is None else _users(run, run.kv_tokens(present[lent]), folder),
        tasks=Tasks(groups=per_step, group_size=len(run.members(groups[0]))),
        training=_training(run, steps, settings, window),
        elastic=Elastic(how="none" if lent is None else "lend"),
        control=msgspec.structs.replace(settings.control, known_wake_seconds=run.wake_seconds()),
        routing=Routing(max_lag_versions=settings.max_lag_versions),
        cells=settings.cells,
        hop_seconds=run.hop_seconds(groups),
        heartbeat_seconds=settings.heartbeat_seconds,
        prices=_price_list(settings.prices),
    )
    counted = figures or [_whole(turns, begin)]
    trajectories = {turn.trajectory for turn in turns}
    simulated = {name for kind, names in present.items() if not _lends(kind) or kind == lent for name in names}
    lenders = {turn.worker for turn in turns if (kind := run.kind(turn.worker)) is not None and _lends(kind)}
    return Replica(
        scenario=scenario,
        plans=run.plans(groups, steps, scenario.window_groups),
        step_groups=[len(step.groups) for step in steps] or [len(groups)],
        log=_figures(
            turns,
            counted,
            lenders,
            cost_of(_usage_of(usage, trajectories, begin, end, counted), settings.prices),
            scenario.open_steps,
        ),
        engines=fitted,
        left_out_groups=left_out,
        left_out_executors=len({turn.worker for turn in turns} - simulated),
    )


def changed(scenario: Scenario, changes: Iterable[str]) -> Scenario:
    """Return a scenario with changes such as `routing.policy=round_robin` or `dedicated.0.count=3`.

    Raises:
        UsageError: A change names no field, a field that the log determines, or a value that the field cannot have.
    """
    fields = msgspec.json.decode(msgspec.json.encode(scenario))
    for change in changes:
        path, equals, text = change.partition("=")
        if not equals or not path:
            raise UsageError(f"--what-if {change} is no change: write it as routing.policy=round_robin")
        if any(path == each or path.startswith(f"{each}.") for each in FIXED):
            raise UsageError(f"--what-if {path} is what the log has: change the fleet, its settings or the trainer's")
        _set(fields, path, _value(text), change)
    try:
        return msgspec.convert(fields, Scenario, strict=True)
    except msgspec.ValidationError as error:
        raise UsageError(f"--what-if {' '.join(changes)}: {error}") from error


def _set(fields: dict[str, Any], path: str, value: Any, change: str) -> None:
    *parents, last = path.split(".")
    at: Any = fields
    for name in parents:
        at = _child(at, name, change)
    if isinstance(at, list):
        _child(at, last, change)
        at[int(last)] = value
    elif isinstance(at, dict):
        at[last] = value
    else:
        raise _no_field(change)


def _child(at: Any, name: str, change: str) -> Any:
    if isinstance(at, list) and name.isdecimal() and int(name) < len(at):
        return at[int(name)]
    if isinstance(at, dict) and name in at:
        return at[name]
    raise _no_field(change)


def _no_field(change: str) -> UsageError:
    return UsageError(f"--what-if {change} names no field of this run: docs/reference/scenarios.md lists the fields")


def _value(text: str) -> Any:
    """Return the value that a text is in TOML; other texts are strings."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def simulated_figures(fleet: Fleet) -> RunFigures:
    """Return the figures of a simulation that has ended."""
    lenders = {lender.name for lender in fleet.lenders}
    steps, open_steps = fleet.trainer.figures.steps, fleet.scenario.open_steps
    return _figures(fleet.rollout.turns, steps, lenders, simulated_cost(fleet), open_steps)


def _figures(
    turns: Sequence[TurnFigures], steps: Sequence[StepFigures], lenders: set[str], cost: CostReport, open_steps: int
) -> RunFigures:
    waits, by_worker = LatencyHistogram(), defaultdict[str, int](int)
    for turn in turns:
        waits.add(max(0.0, turn.scheduled_at - turn.requested_at))
        by_worker[turn.worker] += 1
    counted = measured(steps, open_steps)
    return RunFigures(
        seconds=steps[-1].collected_at - min(turn.requested_at for turn in turns),
        step_seconds=(counted[-1].ended_at - counted[0].began_at) / len(counted),
        rollout_seconds=sum(step.collected_at - step.began_at for step in counted) / len(counted),
        wait_p50=waits.percentile(0.5),
        wait_p99=waits.percentile(0.99),
        cached_share=sum(turn.cached_tokens for turn in turns) / max(1, sum(turn.context_tokens for turn in turns)),
        lent_share=sum(turn.worker in lenders for turn in turns) / len(turns),
        turns=sorted(by_worker.values()),
        correct=sum(step.correct for step in steps),
        device_seconds_per_answer=cost.device_seconds_per_correct,
        cost_per_answer=cost.cost_per_correct,
        currency=cost.currency,
    )


def _whole(turns: Sequence[TurnFigures], begin: float) -> StepFigures:
    """Return a run without a trainer as one step."""
    end = max(turn.applied_at for turn in turns)
    return StepFigures(began_at=begin, collected_at=end, ended_at=end)


def _usage_of(usage: Usage, trajectories: set[str], begin: float, end: float, steps: Sequence[StepFigures]) -> Usage:
    """Return the usage of some trajectories between two moments, with the trainer as one device."""
    return Usage(
        attempts=[each for each in usage.attempts if each.trajectory_id in trajectories],
        answers={name: each for name, each in usage.answers.items() if name in trajectories},
        held=[
            each._replace(begin=max(begin, each.begin), end=min(end, each.end))
            for each in usage.held
            if each.begin < end and each.end > begin
        ],
        trainer=[
            TrainerStep(
                step.ended_at, step.ended_at - step.collected_at, step.collected_at - step.began_at, TRAINER_DEVICES
            )
            for step in steps
        ],
    )


def _lends(kind: EngineKind) -> bool:
    return kind.model.worker_class is WorkerClass.SERVING


def _fit(run: RecordedRun, present: Iterable[EngineKind], step_tokens: int) -> dict[EngineModel, FittedEngine]:
    """Fit the engines of each model. An engine stands still for new versions, a guest while its server has requests.

    Lenders that computed too few turns are taken to be as fast as dedicated engines on the same device.
    Raises RoseError if nothing says how fast a model of engine is.
    """
    turns: defaultdict[EngineModel, list[ComputedTurn]] = defaultdict(list)
    for turn in run.computed_turns():
        if (kind := run.kind(turn.worker)) is not None:
            turns[kind.model].append(turn)
    found: dict[EngineModel, FittedEngine] = {}
    for model in sorted({kind.model for kind in present}, key=lambda model: model.worker_class.value):
        lends = model.worker_class is WorkerClass.SERVING
        stalled = min(1.0, run.swap_share(model) + (run.serving_share() if lends else 0.0))
        own = model._replace(worker_class=WorkerClass.DEDICATED)  # fitted before: "dedicated" comes before "serving"
        engine = fit_engine(turns[model], step_tokens=step_tokens, stalled_share=stalled) or found.get(own)
        if engine is None:
            raise RoseError(
                f"the engines on {model.device} computed {len(turns[model])} turns in this time: too few to learn how "
                "fast they are; give a longer stretch of time"
            )
        found[model] = engine
    return found


def _write(folder: Path, name: str, text: str) -> str:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return str(file)


def _pool(
    run: RecordedRun,
    kind: EngineKind,
    names: Sequence[str],
    engine: FittedEngine,
    settings: RunSettings,
    folder: Path,
) -> Pool:
    profile = engine.profile(
        card=kind.model.device,
        devices=kind.model.devices,
        kv_tokens=run.kv_tokens(names),
        kv_bytes_per_token=kind.kv_bytes_per_token,
    )
    file = _write(folder, f"dedicated-{names[0]}.toml", write_profile(profile))
    return Pool(profile=file, count=len(names), max_turns=kind.max_turns, step_tokens=settings.step_tokens)


def _lending(
    run: RecordedRun,
    kind: EngineKind,
    names: Sequence[str],
    guest: FittedEngine,
    settings: RunSettings,
    folder: Path,
) -> Lending:
    """Return the lending servers: serving is taken to be as fast as the guest.

    The guest had at most what serving's headroom leaves of its KV memory.
    """
    profile = guest.profile(
        card=kind.model.device,
        devices=kind.model.devices,
        kv_tokens=round(run.kv_tokens(names) / (1.0 - HEADROOM_SHARE)),
        kv_bytes_per_token=kind.kv_bytes_per_token,
        wake_seconds=run.wake_seconds() or 0.0,
    )
    file = _write(folder, "lending.toml", write_profile(profile))
    promise = settings.promise
    return Lending(
        serving_profile=file,
        guest_profile=file,
        count=len(names),
        max_turns=kind.max_turns,
        step_tokens=settings.step_tokens,
        dial=promise.dial,
        ttft_seconds=promise.ttft_seconds,
        tpot_seconds=promise.tpot_seconds,
        yield_seconds=promise.yield_seconds,
    )


def _users(run: RecordedRun, kv_tokens: int, folder: Path) -> Users | None:
    """Return users that keep servers of `kv_tokens` as busy as they were; None if no server had a request.

    Their requests are of usual lengths, and shorter where the KV memory is small.
    """
    recordings = []
    for number, rows in enumerate(run.load().values()):
        text = f"{HEADER}\n" + "".join(map(encode_row, rows))
        recordings.append(_write(folder, f"serving-{number}.csv", text))
    busy = any(row.idle_seconds < row.seconds for rows in run.load().values() for row in rows)
    if not busy:
        return None
    usual = Users(busy=0.0)
    return Users(
        recording=tuple(recordings),
        prompt_tokens=max(1, min(usual.prompt_tokens, kv_tokens // 16)),
        new_tokens=max(1, min(usual.new_tokens, kv_tokens // 64)),
    )


def _training(run: RecordedRun, steps: Sequence[RecordedStep], settings: RunSettings, window: int) -> Training:
    transfer, swap = run.version_seconds({step.version: step.figures.ended_at for step in steps})
    trained = [step.figures.ended_at - step.figures.collected_at for step in steps]
    return Training(
        steps=max(1, len(steps)),
        mode="asynchronous",
        max_staleness=settings.max_staleness,
        window_groups=window,
        parameters=1.0,
        gpus=TRAINER_DEVICES,
        fixed_seconds=sum(trained) / max(1, len(trained)),
        delta_bytes_share=1.0,
        link_bytes_per_second=WEIGHT_BYTES / max(transfer, SHORTEST_TRANSFER),
        swap_seconds=swap,
    )


def _price_list(prices: Prices) -> PriceList | None:
    if prices.dedicated is None or prices.borrowed is None or prices.trainer is None:
        return None
    return PriceList(
        currency=prices.currency,
        dedicated=prices.dedicated,
        borrowed=prices.borrowed,
        trainer=prices.trainer,
        dedicated_by_device=prices.dedicated_by_device,
        borrowed_by_device=prices.borrowed_by_device,
    )


TRAINER_DEVICES = 1
"""Devices of the trainer: the log does not say how many."""

SHORTEST_TRANSFER = 1e-3
"""Seconds; a shorter transfer of a version is not told from none."""
