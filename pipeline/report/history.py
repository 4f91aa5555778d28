"""History of a run from its log: turns, trajectories, policy versions, and when workers activated the versions.

Keeps true: a pure fold; the same records give the same history, whatever the order of topics.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain

from rose.pipeline.accounting.usage import UsageLedger
from rose.schemas.arrays import count
from rose.schemas.evaluations import EvaluationResult
from rose.schemas.heartbeats import ExecutorState, SlackHeartbeat, WorkerClass
from rose.schemas.prompts import is_evaluation
from rose.schemas.record import Record
from rose.schemas.sampled_tokens import VersionSpan
from rose.schemas.samples import Ending, Sample, SampleOutcome, SampleTurn
from rose.schemas.turns import TurnOutcome, TurnResult, TurnTimes
from rose.schemas.weights import WeightManifest
from rose.topics.catalog import COMPLETED, EVALUATION_RESULTS, HEARTBEATS, MANIFESTS, OUTCOMES, SAMPLES
from rose.topics.errors import TopicMissing
from rose.topics.log_reader import read_whole_topics
from rose.topics.records import Envelope
from rose.topics.settings import BusSettings

CLIENT = "rose-report"

RAN = (TurnOutcome.COMPLETED, TurnOutcome.PREEMPTED)
"""Outcomes of attempts that have sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFact:
    """One applied turn, from its sample."""

    trajectory_id: str
    turn: int
    attempt: int
    worker: str
    version: int
    """The policy version of its first token; -1 if it sampled none."""
    sampled_tokens: int
    context_tokens: int
    cached_tokens: int
    reusable_tokens: int
    """Tokens that the previous turn had computed under the same policy version: the hits of a perfect cache."""
    times: TurnTimes
    environment_seconds: float

    @property
    def bus_seconds(self) -> float:
        """Time on the bus: from the request to the router, from the router to the inbox, and from the engine back."""
        times = self.times
        to_router, to_inbox = times.queued_at - times.requested_at, times.received_at - times.dispatched_at
        return to_router + to_inbox + times.applied_at - times.finished_at

    @property
    def room_seconds(self) -> float:
        """Time in the router until an executor had room."""
        return self.times.dispatched_at - self.times.queued_at

    @property
    def queue_seconds(self) -> float:
        """Time in the engine before the prefill began."""
        return self.times.scheduled_at - self.times.received_at

    @property
    def prefill_seconds(self) -> float:
        """Seconds from the scheduling of the turn to its first token."""
        return self.times.first_token_at - self.times.scheduled_at

    @property
    def decode_seconds(self) -> float:
        """Seconds from the first token of the turn to its end."""
        return self.times.finished_at - self.times.first_token_at


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryFact:
    """One finished trajectory."""

    trajectory_id: str
    group_id: str
    reward: float | None
    success: bool | None
    failure: str
    turns: int
    sampled_tokens: int
    """Number of sampled tokens; a surplus trajectory has those of the turn that was stopped, too."""
    first_version: int
    """The policy version of its first token; -1 if it sampled none."""
    completed_at: float
    surplus: bool = False
    """Whether it was ended early because enough others of its group had ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFact:
    """A policy version on the log."""

    version: int
    step: int
    published_at: float
    bytes: int
    """Size of the payloads of its chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """The activation of a policy version by a worker."""

    worker: str
    version: int
    at: float
    """Time of the first heartbeat with the version, Unix seconds."""
    seconds: float
    """Pause of the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LenderStatus:
    """The status of a lender from its heartbeats, one for each change. A lender that falls silent is not frozen."""

    worker: str
    incarnation: int
    at: float
    """Unix seconds."""
    version: int
    cuts: int
    """Number of cuts since its start."""
    frozen: bool


@dataclass(slots=True)
class RunHistory:
    """The history of a run; each list is in the order of time."""

    turns: list[TurnFact] = field(default_factory=list)
    trajectories: list[TrajectoryFact] = field(default_factory=list)
    versions: list[VersionFact] = field(default_factory=list)
    swaps: list[Swap] = field(default_factory=list)
    lender_statuses: list[LenderStatus] = field(default_factory=list)
    """Status changes of the lenders."""
    outcomes: dict[str, SampleOutcome] = field(default_factory=dict)
    """Outcomes by trajectory id."""
    evaluations: list[EvaluationResult] = field(default_factory=list)
    """Results of evaluations; their trajectories are not among `trajectories`."""

    @property
    def lenders(self) -> set[str]:
        """The workers of the serving class, which lend."""
        return {standing.worker for standing in self.lender_statuses}

    def by_version(self) -> dict[int, list[TrajectoryFact]]:
        """Return the trajectories with known success by the policy version under which they began.

        Unlike the steps that trained on the trajectories, this does not depend on which of them ended first.
        """
        versions: dict[int, list[TrajectoryFact]] = {}
        for trajectory in self.trajectories:
            if trajectory.success is not None and not trajectory.failure and trajectory.first_version >= 0:
                versions.setdefault(trajectory.first_version, []).append(trajectory)
        return dict(sorted(versions.items()))

    @property
    def span_seconds(self) -> tuple[float, float]:
        """Unix seconds of the first and the last event; zeros if there was none."""
        moments = [turn.times.requested_at for turn in self.turns] + [turn.times.applied_at for turn in self.turns]
        moments += [version.published_at for version in self.versions]
        return (min(moments), max(moments)) if moments else (0.0, 0.0)


def read_history(settings: BusSettings, usage: UsageLedger) -> RunHistory:
    """Read the history of all records that the log keeps, and add the records to `usage`.

    Raises TopicMissing or BusError.
    """
    topics = [SAMPLES, OUTCOMES, HEARTBEATS, MANIFESTS, COMPLETED]
    envelopes = chain(_evaluation_results(settings), read_whole_topics(settings, topics, client_id=CLIENT))
    return fold_history(usage.watch(envelope.record for envelope in envelopes if envelope.record is not None))


def _evaluation_results(settings: BusSettings) -> Iterator[Envelope]:
    """Yield the results of evaluations; a log of an earlier version has none."""
    with suppress(TopicMissing):
        yield from read_whole_topics(settings, [EVALUATION_RESULTS], client_id=CLIENT)


def fold_history(records: Iterable[Record]) -> RunHistory:
    """Fold the history from records; a sample that appears twice counts once."""
    history = RunHistory()
    known: set[str] = set()
    proven: dict[str, tuple[int, int]] = {}
    lenders: dict[str, SlackHeartbeat] = {}
    stopped: dict[tuple[str, int], int] = {}
    for record in records:
        if isinstance(record, SlackHeartbeat) and record.worker_class is WorkerClass.SERVING:
            history.lender_statuses += _changed_status(lenders.get(record.worker), record)
            lenders[record.worker] = record
        match record:
            case Sample() if record.trajectory_id not in known:
                known.add(record.trajectory_id)
                history.turns.extend(_turns(record))
                if not is_evaluation(record.group_id):
                    history.trajectories.append(_trajectory(record))
            case TurnResult() if record.outcome in RAN:
                turn = record.trajectory_id, record.turn
                stopped[turn] = max(stopped.get(turn, 0), count(record.tokens))
            case SampleOutcome():
                history.outcomes.setdefault(record.trajectory_id, record)
            case EvaluationResult():
                history.evaluations.append(record)
            case WeightManifest():
                history.versions.append(_version(record))
            case SlackHeartbeat() if proven.get(record.worker) != (record.incarnation, record.policy_version):
                proven[record.worker] = (record.incarnation, record.policy_version)
                if record.policy_version >= 0:
                    history.swaps.append(_swap(record))
            case _:
                pass
    history.turns.sort(key=lambda turn: turn.times.requested_at)
    history.lender_statuses += [
        _silent_status(heartbeat) for heartbeat in lenders.values() if _lender_status(heartbeat).frozen
    ]
    history.trajectories = [_with_stopped_turn(each, stopped) for each in history.trajectories]
    history.trajectories.sort(key=lambda trajectory: trajectory.completed_at)
    history.versions.sort(key=lambda version: version.published_at)
    history.evaluations.sort(key=lambda result: result.completed_at)
    history.swaps.sort(key=lambda swap: swap.at)
    history.lender_statuses.sort(key=lambda standing: standing.at)
    return history


def _turns(sample: Sample) -> Iterable[TurnFact]:
    before: SampleTurn | None = None
    for turn in sample.turns:
        version = _version_at(sample.spans, turn.start)
        reusable = before.end if before is not None and _version_at(sample.spans, before.end - 1) == version else 0
        yield TurnFact(
            trajectory_id=sample.trajectory_id,
            turn=turn.turn,
            attempt=turn.attempt,
            worker=turn.worker,
            version=version,
            sampled_tokens=turn.end - turn.start,
            context_tokens=turn.start,
            cached_tokens=turn.cached_tokens,
            reusable_tokens=reusable,
            times=turn.times,
            environment_seconds=turn.environment_seconds,
        )
        before = turn


def _version_at(spans: tuple[VersionSpan, ...], token: int) -> int:
    return next((span.version for span in spans if span.start <= token < span.end), -1)


def _trajectory(sample: Sample) -> TrajectoryFact:
    return TrajectoryFact(
        trajectory_id=sample.trajectory_id,
        group_id=sample.group_id,
        reward=sample.reward,
        success=sample.success,
        failure=sample.failure,
        turns=len(sample.turns),
        sampled_tokens=sum(turn.end - turn.start for turn in sample.turns),
        first_version=sample.spans[0].version if sample.spans else -1,
        completed_at=sample.completed_at,
        surplus=sample.ended is Ending.SURPLUS,
    )


def _with_stopped_turn(trajectory: TrajectoryFact, tokens: Mapping[tuple[str, int], int]) -> TrajectoryFact:
    """Add the tokens of the turn under way to a surplus trajectory, whose sample has the turns before it.

    `tokens`: by turn.
    """
    if not trajectory.surplus:
        return trajectory
    more = tokens.get((trajectory.trajectory_id, trajectory.turns), 0)
    return replace(trajectory, sampled_tokens=trajectory.sampled_tokens + more)


def _version(manifest: WeightManifest) -> VersionFact:
    return VersionFact(
        version=manifest.version,
        step=manifest.step,
        published_at=manifest.published_at,
        bytes=manifest.payload_bytes,
    )


def _lender_status(heartbeat: SlackHeartbeat) -> LenderStatus:
    return LenderStatus(
        worker=heartbeat.worker,
        incarnation=heartbeat.incarnation,
        at=heartbeat.sent_at,
        version=heartbeat.policy_version,
        cuts=heartbeat.cuts,
        frozen=heartbeat.frozen and heartbeat.state is not ExecutorState.STOPPING,
    )


def _changed_status(before: SlackHeartbeat | None, heartbeat: SlackHeartbeat) -> Iterator[LenderStatus]:
    """Yield the status changes of a heartbeat; a silence before it ends a freeze."""
    stood = None if before is None else _lender_status(before)
    if (
        before is not None
        and stood is not None
        and stood.frozen
        and heartbeat.sent_at > before.sent_at + before.ttl_seconds
    ):
        yield (stood := _silent_status(before))
    standing = _lender_status(heartbeat)
    if stood is None or replace(standing, at=stood.at) != stood:
        yield standing


def _silent_status(heartbeat: SlackHeartbeat) -> LenderStatus:
    """Return the status after the last heartbeat: a lender that was killed or stopped is not frozen."""
    return replace(_lender_status(heartbeat), at=heartbeat.sent_at + heartbeat.ttl_seconds, frozen=False)


def _swap(heartbeat: SlackHeartbeat) -> Swap:
    return Swap(
        worker=heartbeat.worker, version=heartbeat.policy_version, at=heartbeat.sent_at, seconds=heartbeat.swap_seconds
    )
