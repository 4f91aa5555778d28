"""Follows a run: folds records into a `RunState`, adds snapshots of the broker, and gives the facts of both.

Keeps true
- Reading starts where the present state starts: open groups and their outcomes, live trajectories, a minute of
  heartbeats. Records before the end offsets at the start are history: they do not count as progress.
- Facts are as of the last poll. Time in which the reader itself did not run is not counted as silence of others.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from confluent_kafka import OFFSET_BEGINNING

from rose.pipeline.monitor.backlog import Backlog
from rose.pipeline.monitor.broker_probe import BrokerProbeThread, BrokerSnapshot
from rose.pipeline.monitor.facts import PATIENCE, Facts, Patience
from rose.pipeline.monitor.run_state import RECENT_OUTCOMES, RunState
from rose.schemas.progress import Group, GroupState
from rose.topics.catalog import (
    COMPLETED,
    GROUPS,
    HEARTBEATS,
    MANIFESTS,
    OUTCOMES,
    PROGRESS,
    PROMPTS,
    ROLE_STARTS,
    SAMPLES,
    Topic,
)
from rose.topics.errors import BusError, TopicMissing
from rose.topics.log_reader import read_to_end
from rose.topics.queries import noop
from rose.topics.reader import Reader
from rose.topics.records import EndOfPartition, Envelope, Place
from rose.topics.settings import BusSettings
from rose.workers.evaluator.config import EvaluationConfig
from rose.workers.weights.trust import Trust, UntrustedReason

if TYPE_CHECKING:
    from rose.pipeline.config.load import Config

CLIENT = "rose-watch"

HEARTBEATS_SECONDS = 60.0
"""Heartbeats that are older at the start of reading are not read."""

BATCH = 2_000
"""Maximum number of records of one poll."""

ABSENCE_SECONDS = 0.5
"""Time between two polls, apart from the wait for records, above which the reader was absent."""


class RunFollower:
    """The state of a run as it changes. Call `poll` often, and `close` at the end."""

    def __init__(
        self,
        settings: BusSettings,
        *,
        trust: Trust,
        whole: bool,
        window_groups: int,
        max_lag_versions: int,
        patience: Patience = PATIENCE,
        evaluation: EvaluationConfig | None = None,
        on_wait: Callable[[], None] = noop,
    ) -> None:
        """Start to follow the run.

        `trust` decides which versions count. `whole` reads the run from its beginning, so that its counts are complete.
        `window_groups` is the window of one worker. `evaluation`: None if no version is evaluated. `on_wait` is called
        every few seconds until reading has begun; an exception from it ends the wait.

        Raises BrokerUnreachable, TopicMissing or BusError.
        """
        self._trust = trust
        self._window_groups = window_groups
        self._max_lag_versions = max_lag_versions
        self._patience = patience
        self._evaluation = evaluation or EvaluationConfig()
        self._probe = BrokerProbeThread(settings)
        self._reader = Reader(settings, CLIENT, report_ends=True, on_wait=on_wait)
        self.run_state = RunState(began=time.monotonic())
        self._backlog = Backlog(self.run_state, window_groups)
        self._applied_snapshot: BrokerSnapshot | None = None
        """The newest snapshot that was folded."""
        self._history: dict[Place, int] = {}
        self._behind: set[Place] = set()
        try:
            self._assign(settings, on_wait, whole=whole)
        except BaseException:
            self.close()
            raise
        self._looked_at = self._answered_at = time.monotonic()

    @property
    def caught_up(self) -> bool:
        """Whether all records that were there at the start have been read."""
        return not self._behind

    @property
    def snapshot(self) -> BrokerSnapshot | None:
        """The broker's newest answers; None before the first."""
        return self._probe.latest

    @property
    def known_seconds(self) -> float:
        """Time for which the broker's answers have been known."""
        return self._looked_at - self._backlog.began if self._applied_snapshot is not None else 0.0

    @property
    def broker_error(self) -> str | None:
        """Error of the broker's last answer; None if it succeeded."""
        return self._probe.last_error

    @property
    def unanswered_seconds(self) -> float:
        """Since the broker last answered a query or delivered a record, without absences of the reader."""
        return self._looked_at - max(self._probe.answered_at, self._answered_at)

    def poll(self, seconds: float) -> None:
        """Fold the records that arrive, waiting at most `seconds` for them. Raises TopicMissing or BusError."""
        found = self._reader.read(BATCH, seconds)
        now = time.monotonic()
        absence = max(0.0, now - self._looked_at - seconds - ABSENCE_SECONDS)
        self.run_state.add_absence(absence)
        self._backlog.add_absence(absence)
        answered_at = max(self._answered_at, self._probe.answered_at)
        self._answered_at = now if found else min(now, answered_at + absence)
        self._looked_at = now
        for item in found:
            if isinstance(item, EndOfPartition):
                self._behind.discard((item.topic, item.partition))
            elif isinstance(item, Envelope):
                self._on_envelope(item)
        snapshot = self.snapshot
        if snapshot is not None and snapshot is not self._applied_snapshot and self.caught_up:
            self._backlog.on_snapshot(
                snapshot.without(self.run_state.has_decided), now if absence else min(now, snapshot.at)
            )
            self._applied_snapshot = snapshot

    def facts(self, *, later: float = 0.0) -> Facts:
        """Return the facts of the last poll, or those `later` seconds after it if nothing moves until then."""
        now, view, snapshot = self._looked_at, self.run_state, self.snapshot
        known = (snapshot or BrokerSnapshot(at=now)).without(view.has_decided)
        workers, then, able = known.environment_workers, now + later, view.able_seconds(now)
        executors = self._backlog.executors(now, later=later)
        return Facts(
            executors=executors,
            role_starts=view.recent_role_starts(now),
            newest_version=view.version,
            disbelieved=view.disbelieved,
            max_lag_versions=self._max_lag_versions,
            environment_workers=workers,
            foreign_clients=known.foreign_clients,
            homes=known.homes,
            homes_owned=known.homes_owned,
            routers=known.routers,
            prompts_waiting=known.prompts_waiting,
            held_homes=self._backlog.held_homes(),
            held_seconds=self._backlog.held_seconds(then),
            open_groups=view.open_groups,
            window_groups=self._window_groups * workers if workers else None,
            in_a_turn=view.in_a_turn,
            waiting_for_trainer=view.waiting_for_trainer,
            evaluating=view.evaluating,
            evaluation_due=self._evaluation.is_due(view.version),
            results_waiting=known.lag.get(COMPLETED, 0),
            openable=self._backlog.openable,
            opened_seconds=view.opened_seconds(then, min(known.waiting_stamps.values(), default=None)),
            workers_seconds=max(0.0, then - self._probe.workers_at),
            applied_seconds=view.applied_seconds(then),
            dispatched_seconds=then - self._probe.dispatched_at,
            able_seconds=able + later if able else 0.0,
            settled_seconds=view.settled_seconds(then),
            failures=view.failures,
            home_facts=list(self._backlog.homes(now, later=later)),
            cells=list(self._backlog.cell_facts(executors, now, later=later)),
            patience=self._patience,
            dead_letters=known.dead_letters,
        )

    def close(self) -> None:
        """End the probe and close the reader."""
        self._probe.close()
        self._reader.close()

    def _on_envelope(self, envelope: Envelope) -> None:
        place = envelope.topic, envelope.partition
        fresh = envelope.offset >= self._history.get(place, 0)
        now, stamp = self._looked_at, broker_timestamp(envelope)
        if envelope.topic is PROGRESS:
            self.run_state.on_progress(envelope.key, now, live=envelope.record is not None, fresh=fresh, stamp=stamp)
            return
        record = envelope.record
        if envelope.topic is MANIFESTS:
            judged = self._trust.verify(envelope)
            self.run_state.disbelieved += isinstance(judged, UntrustedReason)
            record = None if isinstance(judged, UntrustedReason) else judged
        if record is not None:
            self.run_state.on_record(record, now, fresh=fresh, wall=time.time(), stamp=stamp)

    def _assign(self, settings: BusSettings, on_wait: Callable[[], None], *, whole: bool) -> None:
        self.run_state.homes = self._reader.partition_count(PROMPTS)
        self._backlog.cells = self._reader.partition_count(HEARTBEATS)
        topics = (HEARTBEATS, MANIFESTS, GROUPS, PROGRESS, OUTCOMES, COMPLETED, SAMPLES)
        places: list[Place] = [(topic, part) for topic in topics for part in range(self._reader.partition_count(topic))]
        with suppress(TopicMissing, BusError):  # a broker with the topics or rights of 0.2.0
            places += [(ROLE_STARTS, part) for part in range(self._reader.partition_count(ROLE_STARTS))]
        bounds = self._reader.all_watermarks(places)
        self._history = {place: end for place, (_, end) in bounds.items()}
        partitions = [place for place in places if place[0] is HEARTBEATS]
        recent = self._reader.offsets_at(partitions, time.time() - HEARTBEATS_SECONDS)
        open_from = self._open_groups_from(settings, on_wait)
        begins: dict[Place, int] = {}
        for place, (low, end) in bounds.items():
            begins[place] = _begin_offset(
                place[0], low, end, whole=whole, recent=recent.get(place, end), open_from=open_from
            )
        self._behind = {place for place, begin in begins.items() if begin < bounds[place][1]}
        self._reader.assign(begins)

    def _open_groups_from(self, settings: BusSettings, on_wait: Callable[[], None]) -> int | None:
        """Fold the groups, and return the lowest offset of outcomes of open groups; None if no group is open."""
        newest: dict[str, tuple[Group, float | None]] = {}
        begins = {(GROUPS, part): OFFSET_BEGINNING for part in range(self._reader.partition_count(GROUPS))}
        for envelope in read_to_end(settings, begins, client_id=CLIENT, on_wait=on_wait):
            if isinstance(envelope.record, Group):
                newest[envelope.record.group_id] = envelope.record, broker_timestamp(envelope)
        opened = [group for group, _ in newest.values() if group.state is GroupState.OPEN]
        for group, stamp in newest.values():
            self.run_state.on_record(group, self.run_state.began, fresh=False, stamp=stamp)
        return min((group.outcomes_from for group in opened), default=None)


def follow_run(
    config: "Config", settings: BusSettings, *, whole: bool, on_wait: Callable[[], None] = noop
) -> RunFollower:
    """Return a follower of this configuration's run. Raises UsageError and the errors of `RunFollower`."""
    environment, trainer = config.settings.environment, config.settings.trainer
    return RunFollower(
        settings,
        trust=config.trust(settings),
        whole=whole,
        window_groups=environment.window_groups,
        max_lag_versions=config.settings.router.max_lag_versions,
        patience=Patience(
            step_seconds=environment.step_timeout_seconds,
            turn_seconds=environment.turn_patience_seconds,
            training_seconds=trainer.hung_seconds,
        ),
        evaluation=config.settings.evaluation,
        on_wait=on_wait,
    )


def broker_timestamp(envelope: Envelope) -> float | None:
    """Return the broker's timestamp of a record in Unix seconds; None if the writer has set it."""
    return envelope.timestamp_seconds if envelope.stamped_by_broker else None


def _begin_offset(topic: Topic, low: int, end: int, *, whole: bool, recent: int, open_from: int | None) -> int:
    """Return the offset from which a partition is read."""
    if topic is HEARTBEATS:
        return recent
    if topic in (MANIFESTS, PROGRESS, ROLE_STARTS):
        return low
    if topic is GROUPS:
        return end
    if whole:
        return low
    if topic is OUTCOMES:
        return max(low, min(end if open_from is None else open_from, end - RECENT_OUTCOMES))
    return end
