"""The present state of a run, folded from its log: the state behind `rose watch`, `rose status` and `rose up`.

Keeps true
- A pure fold. `now` is seconds on the reader's own clock, the time at which a record arrived here; silence is measured
  by that clock only.
- Records that were on the log before the start of reading give the state, and are not taken as a sign of life.
- How long a stage had been still before the start of reading is measured by two timestamps of the broker: that of the
  stage's last record, and that of a record that arrived since. No other clocks are compared. A run that was stopped in
  between counts as still only since its first process started again.
- Time in which the reader did not read is not counted as silence of any process.
- An executor is forgotten when the router would forget it: other executors sent heartbeats for FORGET_SECONDS after its
  time to live.
- A policy version counts if its manifest is trusted; the caller decides that, as every reader does.
"""

import math
from collections import Counter, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from rose.pipeline.monitor.diagnosis import SILENT_SECONDS
from rose.pipeline.monitor.facts import ExecutorFacts, RecentFailures, RoleFacts
from rose.pipeline.monitor.stage_clock import BrokerClock, RoleStarts, Stage, StageClock
from rose.pipeline.routing.liveness import FORGET_SECONDS
from rose.schemas.heartbeats import ExecutorState, RoleBegun, SlackHeartbeat
from rose.schemas.progress import Group, GroupState
from rose.schemas.prompts import group_id_of, is_evaluation, trajectory_id
from rose.schemas.record import Record
from rose.schemas.samples import Outcome, Sample, SampleOutcome
from rose.schemas.turns import TurnOutcome, TurnResult
from rose.schemas.weights import WeightManifest
from rose.topics.catalog import home_partition

RATE_SECONDS = 10.0
"""Period over which rates are averaged."""

RECENT_SAMPLES = 512
"""Number of finished trajectories over which success is averaged."""

RECENT_OUTCOMES = 64
"""Number of settled trajectories of which failures are counted."""

CURVE_POINTS = 400
"""Maximum number of policy versions in the success curve."""


@dataclass(slots=True)
class ExecutorRecord:
    """The newest heartbeat of an executor, and times derived from its heartbeats and results."""

    heartbeat: SlackHeartbeat
    at: float
    """When the heartbeat arrived; the start of reading if it was on the log before."""
    clock_off_seconds: float
    """The sender's clock minus this machine's clock, with the time of the delivery."""
    previous_start: tuple[int, int] | None = None
    """Slot and incarnation of the start before the present one under the same name."""
    rival_at: float = -math.inf
    """When a heartbeat of the previous start arrived after one of a newer start: two executors run under one name."""
    able_at: float = math.inf
    """Since when the executor has been able to accept one more turn, without a break; infinite if it is not able."""
    held_at: float = math.inf
    """Since when the executor has held turns, without a break; infinite if it holds none."""
    took_at: float = -math.inf
    """When the executor was last seen to hold a turn or to end one."""
    ended_at: float = -math.inf
    """When a turn of the executor was last seen to end."""


@dataclass(slots=True)
class RunState:
    """The state of a run. Give it records with their times of arrival; read its properties."""

    began: float
    """Start of reading, moved forward by each absence of the reader since."""
    homes: int = 1
    """Number of home partitions."""
    executors: dict[str, ExecutorRecord] = field(default_factory=dict)
    ends: Counter[Outcome] = field(default_factory=Counter)
    """Settled trajectories, by outcome."""
    turns: Counter[TurnOutcome] = field(default_factory=Counter)
    samples: int = 0
    step: int = 0
    """The newest optimizer step."""
    version: int = -1
    """The newest policy version on the log."""
    versions: int = 0
    """Policy versions on the log."""
    disbelieved: int = 0
    """Number of manifests on the log that are of another run, or not signed by the trusted key."""
    curve: deque[float] = field(default_factory=lambda: deque(maxlen=CURVE_POINTS))
    """Success of the recent trajectories at the time of each policy version."""
    _deferred: set[str] = field(default_factory=set)
    """Open groups whose turns are on hold."""
    _unsettled: dict[str, set[str]] = field(default_factory=dict)
    """Open groups with their trajectories that have no outcome."""
    _refused: dict[str, int] = field(default_factory=dict)
    """Refused groups with their sizes."""
    _decided_to: dict[int, int] = field(default_factory=dict)
    """The offset below which every prompt has a decision, by home."""
    _decided: dict[int, set[int]] = field(default_factory=dict)
    """The offsets of further prompts with a decision, by home."""
    _live: set[str] = field(default_factory=set)
    _recent: deque[tuple[bool | None, int]] = field(default_factory=lambda: deque(maxlen=RECENT_SAMPLES))
    _failures: deque[str | None] = field(default_factory=lambda: deque(maxlen=RECENT_OUTCOMES))
    """Reason of each of the recent outcomes that is a failure; None for other outcomes."""
    _turn_moments: deque[float] = field(default_factory=deque)
    stage_clock: StageClock = field(init=False)

    def __post_init__(self) -> None:
        clock = BrokerClock()
        self.stage_clock = StageClock(self.began, clock, RoleStarts(clock))

    def on_record(
        self,
        record: Record,
        now: float,
        *,
        fresh: bool = True,
        wall: float | None = None,
        stamp: float | None = None,
    ) -> None:
        """Fold a record into the state.

        `fresh`: the record arrived after the start of reading. `wall`: this machine's wall clock at the arrival, Unix
        seconds. `stamp`: the broker's timestamp, Unix seconds.
        """
        self._compare_clocks(now, stamp, fresh=fresh)
        match record:
            case SlackHeartbeat():
                off = record.sent_at - wall if wall is not None and fresh else 0.0
                at = now if fresh else self.began
                self.executors[record.worker] = _merge_states(
                    self.executors.get(record.worker), _state_of(record, at, off)
                )
            case TurnResult():
                self.turns[record.outcome] += 1
                if fresh and (state := self.executors.get(record.worker or "")) is not None:
                    state.took_at = state.ended_at = now
                if record.outcome is TurnOutcome.COMPLETED and fresh:
                    self._turn_moments.append(now)
            case Sample():
                self.samples += 1
                if not is_evaluation(record.group_id):
                    self._recent.append((record.success, len(record.turns)))
                self._on_stage_progress(Stage.SAMPLED, record.group_id, now, stamp, fresh=fresh)
            case Group():
                self._on_group(record)
                if not record.rewarded and not record.deferrals:  # otherwise the group was opened earlier
                    self._on_stage_progress(Stage.OPENED, record.group_id, now, stamp, fresh=fresh)
            case SampleOutcome():
                self.ends[record.outcome] += 1
                self._failures.append(record.reason if record.outcome is Outcome.INFRA_FAILED else None)
                if not is_evaluation(record.group_id):
                    self.step = max(self.step, record.step)
                # Outcomes of groups that are not open are ignored: groups are read before outcomes.
                self._unsettled.get(record.group_id, set()).discard(record.trajectory_id)
                self._on_stage_progress(Stage.SETTLED, record.group_id, now, stamp, fresh=fresh)
            case RoleBegun():
                self.stage_clock.role_starts.on_role_begun(record, now if fresh else None, stamp)
            case WeightManifest():
                self.versions += 1
                self._on_version(record.version)
            case _:
                pass

    def on_progress(
        self, trajectory_id: str, now: float, *, live: bool, fresh: bool = True, stamp: float | None = None
    ) -> None:
        """Fold the progress of a trajectory: it requests a turn, or has ended (not `live`)."""
        self._compare_clocks(now, stamp, fresh=fresh)
        (self._live.add if live else self._live.discard)(trajectory_id)
        self._on_stage_progress(Stage.APPLIED, group_id_of(trajectory_id), now, stamp, fresh=fresh)

    def add_absence(self, seconds: float) -> None:
        """Move all times forward: the reader did not read for `seconds` until now, and has records to catch up on."""
        self.began += seconds
        self.stage_clock.add_absence(seconds)
        for state in self.executors.values():
            state.at += seconds
            state.able_at += seconds
            state.held_at += seconds
            state.took_at += seconds
            state.ended_at += seconds

    @property
    def applied_at(self) -> float:
        """When a turn was last seen to be applied; before the start of reading if never."""
        return self.stage_clock.last_seen(Stage.APPLIED)

    def applied_seconds(self, now: float) -> float:
        """Seconds since a turn was applied, as far as that is known."""
        return self.stage_clock.seconds_still(now, Stage.APPLIED)

    def settled_seconds(self, now: float) -> float:
        """Seconds since an outcome, or a sample that the trainer could settle; samples arrive when trajectories end."""
        if self.stage_clock.last_seen(Stage.SETTLED, Stage.SAMPLED) >= self.began:
            return self.stage_clock.seconds_still(now, Stage.SETTLED, Stage.SAMPLED)
        before = self.stage_clock.seconds_still_before(now, Stage.SETTLED, Stage.SAMPLED, Stage.APPLIED)
        return now - self.began if before is None else before

    def opened_seconds(self, now: float, waiting_since: float | None) -> float:
        """Seconds since a group was opened, refused or settled, since an outcome made room, or since a prompt waits.

        `waiting_since`: the broker's timestamp of the prompt that waits longest, Unix seconds.
        """
        since = self.stage_clock.seconds_still(now, Stage.OPENED)
        if self.stage_clock.has_moved(Stage.SETTLED):
            since = min(since, self.stage_clock.seconds_still(now, Stage.SETTLED))
        return since if waiting_since is None else min(since, self.stage_clock.since_stamp(now, waiting_since))

    def able_seconds(self, now: float, workers: Collection[str] | None = None) -> float:
        """Longest time for which a live executor has been able to accept a turn; of `workers` only, if given."""
        known = [each for name, each in self.executors.items() if workers is None or name in workers]
        alive = [each for each in known if now - each.at <= each.heartbeat.ttl_seconds]
        return max((0.0, *(now - each.able_at for each in alive)))

    def turns_per_second(self, now: float) -> float:
        """Completed turns per second over the last RATE_SECONDS."""
        while self._turn_moments and self._turn_moments[0] < now - RATE_SECONDS:
            self._turn_moments.popleft()
        return len(self._turn_moments) / RATE_SECONDS

    def present_executors(self, now: float) -> list[ExecutorFacts]:
        """The executors by name, without those that announced their stop and have fallen silent."""
        self._forget()
        facts = [_facts(state, now) for _, state in sorted(self.executors.items())]
        return [each for each in facts if not (each.silent and each.state is ExecutorState.STOPPING)]

    @property
    def heard_from_all(self) -> bool:
        """Whether each executor on the log has sent a heartbeat since the start of reading, or announced its stop."""
        executors = self.executors.values()
        return all(each.at > self.began or each.heartbeat.state is ExecutorState.STOPPING for each in executors)

    @property
    def open_groups(self) -> int:
        """Number of open groups that count against the window: neither deferred nor of an evaluation."""
        return sum(bool(names) and not is_evaluation(group) for group, names in self._active())

    @property
    def in_a_turn(self) -> int:
        """Number of trajectories of open groups that have not ended, without those of deferred groups."""
        return sum(len(names & self._live) for _, names in self._active())

    @property
    def waiting_for_trainer(self) -> int:
        """Number of trajectories of open groups that have ended and have no outcome, without those of evaluations."""
        return sum(len(names - self._live) for group, names in self._unsettled.items() if not is_evaluation(group))

    @property
    def evaluating(self) -> int:
        """Number of trajectories of evaluations that have no outcome."""
        return sum(len(names) for group, names in self._unsettled.items() if is_evaluation(group))

    @property
    def refused(self) -> int:
        """Number of trajectories of refused prompts, which never get an outcome."""
        return sum(self._refused.values())

    @property
    def settled(self) -> int:
        """Number of trajectories with an outcome."""
        return self.ends.total()

    @property
    def failures(self) -> RecentFailures:
        """The failures among the recent outcomes."""
        reasons = Counter(each for each in self._failures if each is not None)
        usual = reasons.most_common(1)
        return RecentFailures(reasons.total(), len(self._failures), usual[0][0] if usual else "")

    @property
    def opened(self) -> int:
        """Number of trajectories that have an outcome or belong to an open group."""
        return self.settled + sum(len(names) for names in self._unsettled.values())

    @property
    def solved(self) -> float | None:
        """Share of the recent trajectories with known success that succeeded; None if success is known of none."""
        known = [solved for solved, _ in self._recent if solved is not None]
        return sum(known) / len(known) if known else None

    @property
    def turns_each(self) -> float:
        """Mean number of turns of the recent trajectories."""
        return sum(turns for _, turns in self._recent) / len(self._recent) if self._recent else 0.0

    def recent_role_starts(self, now: float) -> list[RoleFacts]:
        """The roles that have started recently, with the number of their starts."""
        return self.stage_clock.role_starts.recent(now)

    def open_groups_by_home(self) -> Counter[int]:
        """Number of open groups that count against the window, by home."""
        return Counter(self._home(name) for name, names in self._active() if names and not is_evaluation(name))

    def live_by_home(self) -> Counter[int]:
        """Number of trajectories of open groups that have not ended, by home, without those of deferred groups."""
        found: Counter[int] = Counter()
        for name, names in self._active():
            found[self._home(name)] += len(names & self._live)
        return found

    def has_decided(self, home: int, offset: int) -> bool:
        """Return whether the prompt at this offset has a decision: its group was opened, refused, or has ended."""
        return offset < self._decided_to.get(home, 0) or offset in self._decided.get(home, ())

    def _home(self, group_id: str) -> int:
        return home_partition(group_id, self.homes)

    def _on_stage_progress(self, stage: Stage, group_id: str, now: float, stamp: float | None, *, fresh: bool) -> None:
        self.stage_clock.on_progress(stage, self._home(group_id), now, stamp, fresh=fresh)

    def _compare_clocks(self, now: float, stamp: float | None, *, fresh: bool) -> None:
        if fresh and stamp is not None:
            self.stage_clock.clock.compare(now, stamp)

    def _forget(self) -> None:
        """Remove executors that are silent for long. Nothing is removed while no executor at all sends heartbeats."""
        last = max((state.at for state in self.executors.values()), default=self.began)
        for worker, state in list(self.executors.items()):
            if state.at + state.heartbeat.ttl_seconds + FORGET_SECONDS <= last:
                del self.executors[worker]

    def _decide(self, group: Group) -> None:
        home = self._home(group.group_id)
        decided_to = group.offset + 1 if group.decided_to is None else group.decided_to
        self._decided_to[home] = max(decided_to, self._decided_to.get(home, 0))
        own = set() if is_evaluation(group.group_id) else {group.offset}  # others are offsets of another topic
        ahead = self._decided.get(home, set()) | own
        self._decided[home] = {offset for offset in ahead if offset >= self._decided_to[home]}

    def _active(self) -> Iterator[tuple[str, set[str]]]:
        """Yield the open groups that are not deferred, with their trajectories without an outcome."""
        return ((name, names) for name, names in self._unsettled.items() if name not in self._deferred)

    def _on_group(self, group: Group) -> None:
        self._decide(group)
        (self._deferred.add if group.deferred else self._deferred.discard)(group.group_id)
        self._refused.pop(group.group_id, None)
        if group.state is GroupState.REFUSED:
            self._refused[group.group_id] = group.group_size
        if group.state is not GroupState.OPEN:
            self._unsettled.pop(group.group_id, None)
        elif group.group_id not in self._unsettled:
            names = {trajectory_id(group.group_id, index) for index in range(group.group_size)}
            self._unsettled[group.group_id] = names

    def _on_version(self, version: int) -> None:
        if version > self.version:
            self.version = version
            if self.solved is not None:
                self.curve.append(self.solved)


def _state_of(heartbeat: SlackHeartbeat, at: float, off: float) -> ExecutorRecord:
    holds = _held(heartbeat) > 0
    return ExecutorRecord(
        heartbeat,
        at,
        off,
        able_at=at if _has_capacity(heartbeat) else math.inf,
        held_at=at if holds else math.inf,
        took_at=at if holds else -math.inf,
    )


def _held(heartbeat: SlackHeartbeat) -> int:
    return heartbeat.rollout.running + heartbeat.rollout.waiting


def _merge_states(known: ExecutorRecord | None, newest: ExecutorRecord) -> ExecutorRecord:
    """Return the newest record, completed with what is known of earlier heartbeats under the same name."""
    if known is None:
        return newest
    newest.previous_start, newest.rival_at = known.previous_start, known.rival_at
    if _start(newest) == _start(known):
        newest.able_at = min(newest.able_at, known.able_at) if newest.able_at < math.inf else math.inf
        newest.held_at = min(newest.held_at, known.held_at) if newest.held_at < math.inf else math.inf
        newest.took_at, newest.ended_at = max(newest.took_at, known.took_at), known.ended_at
    else:
        newest.previous_start = _start(known)
        if _start(newest) == known.previous_start:
            newest.rival_at = newest.at
    return newest


def _has_capacity(heartbeat: SlackHeartbeat) -> bool:
    """Return whether the executor can accept one more turn."""
    ready = heartbeat.state is ExecutorState.READY and heartbeat.policy_version >= 0
    return ready and _held(heartbeat) < heartbeat.max_turns


def _start(state: ExecutorRecord) -> tuple[int, int]:
    return state.heartbeat.slot, state.heartbeat.incarnation


def _facts(state: ExecutorRecord, now: float) -> ExecutorFacts:
    heartbeat = state.heartbeat
    return ExecutorFacts(
        worker=heartbeat.worker,
        state=heartbeat.state,
        version=heartbeat.policy_version,
        refused_version=heartbeat.refused_version,
        refused_reason=heartbeat.refused_reason,
        silent_seconds=max(0.0, now - state.at),
        ttl_seconds=heartbeat.ttl_seconds,
        held=_held(heartbeat),
        slot=heartbeat.slot,
        ended_seconds=max(0.0, now - max(state.held_at, state.ended_at)) if _held(heartbeat) else 0.0,
        max_turns=heartbeat.max_turns,
        cuts=heartbeat.cuts,
        frozen=heartbeat.frozen,
        clock_off_seconds=state.clock_off_seconds,
        kv_used=1 - heartbeat.kv_bytes_free / heartbeat.kv_bytes_total if heartbeat.kv_bytes_total else 0.0,
        tokens_per_second=heartbeat.hardware.decode_tokens_per_second,
        swap_seconds=heartbeat.swap_seconds,
        paused_reason=heartbeat.paused_reason,
        rivals=now - state.rival_at < SILENT_SECONDS,
    )
