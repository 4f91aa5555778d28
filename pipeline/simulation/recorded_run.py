"""A recorded run as the input of a simulation: what its trajectories did, on which fleet, and how fast.

Keeps true
- A trajectory does what it did: the same observations, the same number of sampled tokens in each turn, the same times
  of its environment. What it waits for is simulated.
- Groups with a trajectory that failed, ended early or is not whole on the log are left out and counted: what the
  trajectory would have done is not known.
- Groups of evaluations are left out and counted: no training step settled them.
- What the simulation does not model is measured: the time of a record on the bus, the time that a training step takes
  and that a version takes to the engines, and the delay between a version and the first turn of a group that it made
  room for.
- An executor belongs to the fleet if it was there for at least half of the time.
- Heartbeats of an executor that moved lie in the partitions of several cells. So each of its inboxes is followed by
  itself, and the order between partitions does not matter.

A fold over samples, outcomes and heartbeats, each partition in the order of the log. Pure.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import fmean, median
from typing import NamedTuple

from rose.pipeline.simulation.fitted_engine import ComputedTurn
from rose.pipeline.simulation.rollout import TurnFigures
from rose.pipeline.simulation.trainer import StepFigures
from rose.pipeline.simulation.trajectory_plans import PlannedTurn, TrajectoryPlan
from rose.schemas.heartbeats import BUILDING_REASON, ExecutorState, SlackHeartbeat, WorkerClass
from rose.schemas.prompts import is_evaluation
from rose.schemas.record import Record
from rose.schemas.samples import Ending, Outcome, Sample, SampleOutcome, SampleTurn
from rose.schemas.turns import TurnTimes
from rose.workers.lender.recording import ROW_SECONDS, Row

RECORDS_OF_A_TURN = 3
"""Request, dispatch and result."""

PRESENT_SHARE = 0.5
"""Least share of the run in which an executor of the fleet was there."""


class EngineModel(NamedTuple):
    """The features of engines that are equally fast."""

    worker_class: WorkerClass
    device: str
    devices: int


class EngineKind(NamedTuple):
    """The features of engines that are simulated alike."""

    model: EngineModel
    max_turns: int
    kv_bytes_per_token: int


class RecordedStep(NamedTuple):
    """A training step."""

    version: int
    """The policy version that it published."""
    figures: StepFigures
    groups: list[str]
    """Those of its groups that are simulated."""


@dataclass(slots=True)
class _Trajectory:
    """The facts of a finished trajectory."""

    name: str
    group_size: int
    plan: TrajectoryPlan | None
    """None if it failed."""
    tokens: int
    completed_at: float
    turns: list[TurnFigures]
    computed: list[ComputedTurn]
    hops: list[float]
    """Seconds on the bus of each turn that one attempt has ended."""


@dataclass(slots=True)
class _Stream:
    """The heartbeats of an executor with one inbox."""

    sent_at: float
    version: int = -1
    serving_busy: bool = False
    busy_seconds: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True)
class _Worker:
    """The contents of the heartbeats of an executor."""

    worker_class: WorkerClass
    streams: dict[int, _Stream] = field(default_factory=dict)
    """Its heartbeats by inbox."""
    device: str = ""
    devices: int = 1
    max_turns: int = 0
    kv_bytes_per_token: int = 1
    kv_bytes: int = 0
    """Largest KV memory."""
    present_seconds: float = 0.0
    swap_seconds: float = 0.0
    """Seconds of all swaps of versions."""
    waking_since: float | None = None
    rows: list[Row] = field(default_factory=list)


class RecordedRun:
    """Folds the records of a run."""

    def __init__(self, since: float, until: float) -> None:
        """`since`, `until`: Unix seconds; groups count that began and ended in between."""
        self._since = since
        self._until = until
        self._groups: defaultdict[str, dict[str, _Trajectory]] = defaultdict(dict)
        self._outcomes: dict[str, SampleOutcome] = {}
        self._workers: dict[str, _Worker] = {}
        self._served_at: dict[int, float] = {}
        """When the first executor served a version."""
        self._swaps: list[float] = []
        self._wakes: list[float] = []
        """Seconds in which a guest was built and took the newest version."""

    def add(self, record: Record) -> None:
        """Add a record; kinds of records that are not used are ignored."""
        match record:
            case Sample():
                self._groups[record.group_id].setdefault(record.trajectory_id, _trajectory(record))
            case SampleOutcome():
                self._outcomes.setdefault(record.trajectory_id, record)
            case SlackHeartbeat() if self._since <= record.sent_at <= self._until:
                self._add_heartbeat(record)
            case _:
                pass

    def _add_heartbeat(self, heartbeat: SlackHeartbeat) -> None:
        now = heartbeat.sent_at
        worker = self._workers.setdefault(heartbeat.worker, _Worker(heartbeat.worker_class))
        stream = worker.streams.setdefault(heartbeat.slot, _Stream(now))
        gap = now - stream.sent_at
        if 0.0 < gap <= heartbeat.ttl_seconds:  # after a longer gap the executor was away
            worker.present_seconds += gap
            stream.seconds += gap
            stream.busy_seconds += gap * stream.serving_busy
        stream.sent_at = max(now, stream.sent_at)
        serving = heartbeat.serving
        stream.serving_busy = bool(serving.running or serving.waiting)
        if heartbeat.paused_reason == BUILDING_REASON and worker.waking_since is None:
            worker.waking_since = now
        if heartbeat.state is ExecutorState.READY:
            if worker.waking_since is not None:
                self._wakes.append(now - worker.waking_since)
                worker.waking_since = None
            worker.device, worker.devices = heartbeat.hardware.device, heartbeat.devices
            worker.max_turns = max(worker.max_turns, heartbeat.max_turns)
            worker.kv_bytes = max(worker.kv_bytes, heartbeat.kv_bytes_total)
            worker.kv_bytes_per_token = max(1, heartbeat.kv_bytes_per_token)
            version = heartbeat.policy_version
            self._served_at[version] = min(now, self._served_at.get(version, now))
            if version != stream.version:
                stream.version = version
                self._swaps.append(heartbeat.swap_seconds)
                worker.swap_seconds += heartbeat.swap_seconds
        if worker.worker_class is WorkerClass.SERVING and stream.seconds >= ROW_SECONDS:
            worker.rows.append(_row(worker, stream, heartbeat))
            stream.seconds = stream.busy_seconds = 0.0

    def groups(self) -> tuple[list[str], int]:
        """Return the groups of this stretch of time in the order of their first requests, and how many are left out."""
        found, left_out = [], 0
        for name, members in self._groups.items():
            begins = [each.turns[0].requested_at if each.turns else each.completed_at for each in members.values()]
            ends = [each.completed_at for each in members.values()]
            if not self._since <= min(begins) or not max(ends) <= self._until:
                continue
            whole = len(members) == next(iter(members.values())).group_size
            if whole and not is_evaluation(name) and all(each.plan is not None for each in members.values()):
                found.append((min(begins), name))
            else:
                left_out += 1
        return [name for _, name in sorted(found)], left_out

    def members(self, group: str) -> list[_Trajectory]:
        """Return the trajectories of a group in the order of their index."""
        return sorted(self._groups[group].values(), key=lambda each: int(each.name.rpartition(":")[2]))

    def turns(self, groups: Sequence[str]) -> list[TurnFigures]:
        """Return the applied turns of groups, in the order in which they were applied."""
        found = [turn for group in groups for each in self._groups[group].values() for turn in each.turns]
        return sorted(found, key=lambda turn: turn.applied_at)

    def computed_turns(self) -> Iterator[ComputedTurn]:
        """Yield every computed turn on the log."""
        for members in self._groups.values():
            for each in members.values():
                yield from each.computed

    def kind(self, name: str) -> EngineKind | None:
        """Return the kind of an executor; None if it was never ready."""
        worker = self._workers.get(name)
        if worker is None or not worker.max_turns:
            return None
        model = EngineModel(worker.worker_class, worker.device, worker.devices)
        return EngineKind(model, worker.max_turns, worker.kv_bytes_per_token)

    def fleet(self, begin: float, end: float) -> dict[EngineKind, list[str]]:
        """Return the executors that were there for at least half of the time between `begin` and `end`, by kind."""
        found: defaultdict[EngineKind, list[str]] = defaultdict(list)
        for name, worker in self._workers.items():
            kind = self.kind(name)
            if kind is not None and worker.present_seconds >= PRESENT_SHARE * (end - begin):
                found[kind].append(name)
        return dict(found)

    def kv_tokens(self, names: Sequence[str]) -> int:
        """Return the largest KV memory of each executor, in tokens; the mean over the executors."""
        workers = [self._workers[name] for name in names]
        return round(fmean(worker.kv_bytes / worker.kv_bytes_per_token for worker in workers))

    def swap_share(self, model: EngineModel) -> float:
        """Return the share of the recorded time in which engines of a model stood still for new versions."""
        kinds = {name: self.kind(name) for name in self._workers}
        workers = [self._workers[name] for name, kind in kinds.items() if kind is not None and kind.model == model]
        seconds = sum(worker.present_seconds for worker in workers)
        return min(1.0, sum(worker.swap_seconds for worker in workers) / seconds) if seconds else 0.0

    def serving_share(self) -> float:
        """Return the share of the recorded time in which a lending server had requests of its own."""
        rows = [row for rows in self.load().values() for row in rows]
        seconds = sum(row.seconds for row in rows)
        return 1.0 - sum(row.idle_seconds for row in rows) / seconds if seconds else 0.0

    def load(self) -> dict[str, list[Row]]:
        """Return the load of each lending server, as `rose lend --observe --record` writes it."""
        return {name: sorted(worker.rows) for name, worker in self._workers.items() if worker.rows}

    def steps(self, groups: Sequence[str]) -> list[RecordedStep]:
        """Return the training steps that settled whole groups of these, in order of time.

        The log of a run that goes on may have some outcomes of a group already, and not the others yet.
        """
        by_step: defaultdict[int, list[str]] = defaultdict(list)
        for group in groups:
            outcomes = [self._outcomes.get(name) for name in self._groups[group]]
            settled = {None if record is None else record.step for record in outcomes}
            if len(settled) == 1 and (step_number := settled.pop()) is not None:
                by_step[step_number].append(group)
        found, before = [], 0.0
        for version, members in sorted(by_step.items()):
            trajectories = [each for group in members for each in self._groups[group].values()]
            settlement = [self._outcomes[each.name] for each in trajectories]
            trained = {record.trajectory_id for record in settlement if record.outcome is Outcome.TRAINED}
            begin = before or min(each.turns[0].requested_at for each in trajectories)
            step = StepFigures(
                began_at=begin,
                collected_at=max(begin, *(each.completed_at for each in trajectories)),
                ended_at=max(record.recorded_at for record in settlement),
                tokens=sum(each.tokens for each in trajectories if each.name in trained),
                trained=len(trained),
                correct=sum(each.name in trained and bool(each.plan and each.plan.solved) for each in trajectories),
            )
            before = step.ended_at
            found.append(RecordedStep(version, step, members))
        return found

    def window_groups(self, groups: Sequence[str]) -> int:
        """Return the most groups that were open or waited for the trainer at once."""
        changes = []
        for group in groups:
            members = self._groups[group].values()
            settled = [record.recorded_at for each in members if (record := self._outcomes.get(each.name)) is not None]
            changes.append((min(each.turns[0].requested_at for each in members), 1))
            if settled:
                changes.append((max(settled), -1))
        most = now = 0
        for _, change in sorted(changes):
            now += change
            most = max(most, now)
        return most

    def plans(self, groups: Sequence[str], steps: Sequence[RecordedStep], window: int) -> list[list[TrajectoryPlan]]:
        """Return what the trajectories of each group did.

        The first turn comes as long after the moment at which the group could be opened as it did. `window`: groups
        that are open or wait for the trainer at once.
        """
        begin = min(turn.requested_at for turn in self.turns(groups))
        room = list(accumulate((len(step.groups) for step in steps), initial=window))
        found = []
        for number, group in enumerate(groups):
            behind = bisect_right(room, number)  # steps that must end before the group is opened
            opened = steps[behind - 1].figures.ended_at if 0 < behind <= len(steps) else begin
            found.append([_from_opening(each, opened) for each in self.members(group)])
        return found

    def hop_seconds(self, groups: Sequence[str]) -> float:
        """Return the median time of a record on the bus: a router that was replaced delays few turns for seconds."""
        hops = [hop for group in groups for each in self._groups[group].values() for hop in each.hops]
        return max(0.0, median(hops)) / RECORDS_OF_A_TURN if hops else 0.0

    def version_seconds(self, ends: Mapping[int, float]) -> tuple[float, float]:
        """Return the mean seconds from the end of a training step until an executor served its version, and of a swap.

        `ends`: when the steps ended, by the version that they published.
        """
        served = self._served_at
        delays = [max(0.0, served[version] - end) for version, end in ends.items() if version in served]
        return fmean(delays) if delays else 0.0, fmean(self._swaps) if self._swaps else 0.0

    def wake_seconds(self) -> float | None:
        """Return the mean seconds from the wake of a lender until it took turns; None if none was woken."""
        return fmean(self._wakes) if self._wakes else None


def _row(worker: _Worker, stream: _Stream, heartbeat: SlackHeartbeat) -> Row:
    return Row(
        unix_seconds=heartbeat.sent_at,
        seconds=stream.seconds,
        idle_seconds=max(0.0, stream.seconds - stream.busy_seconds),
        running=heartbeat.serving.running,
        waiting=heartbeat.serving.waiting,
        kv_bytes_held=0,
        kv_bytes_most=0,
        kv_bytes_total=max(1, worker.kv_bytes),
    )


def on_the_bus(times: TurnTimes) -> float:
    """Return the seconds of a turn on the bus: to the inbox, without the wait for room, and back to the worker.

    `times`: of the first attempt, because a turn is queued anew before each attempt. Clocks that differ cancel out.
    """
    there = times.queued_at - times.requested_at + times.received_at - times.dispatched_at
    return there + times.applied_at - times.finished_at


def _trajectory(sample: Sample) -> _Trajectory:
    planned, known = [], 0
    later = [*(turn.times.requested_at for turn in sample.turns[1:]), sample.completed_at]
    for turn, next_at in zip(sample.turns, later, strict=bool(sample.turns)):
        waited = max(0.0, next_at - turn.times.applied_at)  # the environment's step, and what its worker adds
        planned.append(PlannedTurn(turn.start - known, turn.end - turn.start, waited))
        known = turn.end
    failed = bool(sample.failure) or not sample.turns or sample.ended in (Ending.SURPLUS, Ending.STALE)
    return _Trajectory(
        name=sample.trajectory_id,
        group_size=sample.group_size,
        plan=None
        if failed
        else TrajectoryPlan(tuple(planned), 0.0, sample.turns[0].sampling.max_tokens, bool(sample.success)),
        tokens=len(sample.loss_mask),
        completed_at=sample.completed_at,
        turns=[_figures(sample, turn) for turn in sample.turns],
        computed=[_computed(turn) for turn in sample.turns if turn.times.first_token_at],
        hops=[on_the_bus(turn.times) for turn in sample.turns if not turn.attempt],
    )


def _from_opening(trajectory: _Trajectory, opened: float) -> TrajectoryPlan:
    assert trajectory.plan is not None
    return trajectory.plan._replace(reset_seconds=max(0.0, trajectory.turns[0].requested_at - opened))


def _computed(turn: SampleTurn) -> ComputedTurn:
    times = turn.times
    return ComputedTurn(
        worker=turn.worker,
        scheduled_at=times.scheduled_at,
        first_token_at=times.first_token_at,
        finished_at=times.finished_at,
        context_tokens=turn.start,
        prefill_tokens=max(0, turn.start - turn.cached_tokens),
        new_tokens=turn.end - turn.start,
        whole=turn.attempt == 0,
    )


def _figures(sample: Sample, turn: SampleTurn) -> TurnFigures:
    times = turn.times
    spans = [span.version for span in sample.spans if span.start < turn.end and span.end > turn.start]
    return TurnFigures(
        trajectory=sample.trajectory_id,
        turn=turn.turn,
        worker=turn.worker,
        attempts=turn.attempt + 1,
        context_tokens=turn.start,
        cached_tokens=turn.cached_tokens,
        new_tokens=turn.end - turn.start,
        requested_at=times.requested_at,
        queued_at=times.queued_at,
        dispatched_at=times.dispatched_at,
        received_at=times.received_at,
        scheduled_at=times.scheduled_at,
        first_token_at=times.first_token_at,
        finished_at=times.finished_at,
        applied_at=times.applied_at,
        version=min(spans, default=-1),
        environment_seconds=turn.environment_seconds,
        device_seconds={},
    )
