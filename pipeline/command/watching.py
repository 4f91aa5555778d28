"""Looking at a run: records folded into a `View`, soundings of the broker, and the facts that both give.

Keeps true
- Reading begins where the present state begins: open groups and their outcomes, live trajectories, a minute of
  heartbeats. What lies before the end that the topics had at the start is history: it moves nothing.
- Facts are as of the last look. A reader that was held up, or its machine, takes its own absence for nobody's silence.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from confluent_kafka import OFFSET_BEGINNING

from pipeline.command.facts import PATIENCE, Facts, Patience
from pipeline.command.places import Places
from pipeline.command.soundings import Sounding, SoundingThread
from pipeline.command.view import View
from schemas.progress import Group, GroupState
from topics.catalog import (
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
from topics.errors import BusError, TopicMissing
from topics.log_reader import read_to_end
from topics.queries import noop
from topics.reader import Reader
from topics.records import EndOfPartition, Envelope, Place
from topics.settings import BusSettings
from workers.weights.trust import Doubt, Trust

if TYPE_CHECKING:
    from pipeline.command.config import Config

CLIENT = "rose-watch"

HEARTBEATS_SECONDS = 60.0
"""Executors that were silent for longer before the looking began are not known."""

BATCH = 2_000
"""Records taken at once."""

ABSENCE_SECONDS = 0.5
"""Between two looks: what is longer, besides the time that a look waits for records, was an absence."""


class Watch:
    """A run as it goes on. `read` it often; `close` it."""

    def __init__(
        self,
        settings: BusSettings,
        *,
        trust: Trust,
        whole: bool,
        window_groups: int,
        max_lag_versions: int,
        patience: Patience = PATIENCE,
        meanwhile: Callable[[], None] = noop,
    ) -> None:
        """`trust`: whose versions count. `whole`: from the run's beginning, so that its counts are complete.
        `window_groups`: of one worker. `patience`: how long each kind of work may take. `meanwhile` is called every few
        seconds until the reading has begun; what it raises ends that.

        Raises BrokerUnreachable, TopicMissing or BusError.
        """
        self._trust = trust
        self._window_groups = window_groups
        self._max_lag_versions = max_lag_versions
        self._patience = patience
        self._soundings = SoundingThread(settings)
        self._reader = Reader(settings, CLIENT, report_ends=True, on_wait=meanwhile)
        self.view = View(began=time.monotonic())
        self._places = Places(self.view, window_groups)
        self._sounded: Sounding | None = None
        """The newest answers that were taken in."""
        self._history: dict[Place, int] = {}
        self._behind: set[Place] = set()
        try:
            self._assign(settings, meanwhile, whole=whole)
        except BaseException:
            self.close()
            raise
        self._looked_at = self._answered_at = time.monotonic()

    @property
    def caught_up(self) -> bool:
        """Whether all that was there at the beginning has been read."""
        return not self._behind

    @property
    def sounding(self) -> Sounding | None:
        """The broker's newest answers; None until the first."""
        return self._soundings.latest

    @property
    def asked_seconds(self) -> float:
        """For how long the broker's answers are known, beside the log."""
        return self._looked_at - self._places.began if self._sounded is not None else 0.0

    @property
    def trouble(self) -> str:
        """Why the broker's last answer failed; empty if it did not."""
        return self._soundings.trouble

    @property
    def unanswered_seconds(self) -> float:
        """Since the broker last answered, to a question or with something new to read; absences do not count."""
        return self._looked_at - max(self._soundings.answered_at, self._answered_at)

    def read(self, seconds: float) -> None:
        """Take in what came, waiting for it so long at most. Raises TopicMissing or BusError."""
        found = self._reader.read(BATCH, seconds)
        now = time.monotonic()
        absence = max(0.0, now - self._looked_at - seconds - ABSENCE_SECONDS)
        self.view.absent(absence)
        self._places.absent(absence)
        answered_at = max(self._answered_at, self._soundings.answered_at)
        self._answered_at = now if found else min(now, answered_at + absence)
        self._looked_at = now
        for item in found:
            if isinstance(item, EndOfPartition):
                self._behind.discard((item.topic, item.partition))
            elif isinstance(item, Envelope):
                self._take(item)
        sounding = self.sounding
        if sounding is not None and sounding is not self._sounded and self.caught_up:
            self._places.sounded(sounding.without(self.view.has_decided), now if absence else min(now, sounding.at))
            self._sounded = sounding

    def facts(self, *, later: float = 0.0) -> Facts:
        """What was known at the last look; as it will be `later`, in seconds, if nothing moves until then."""
        now, view, sounding = self._looked_at, self.view, self.sounding
        known = (sounding or Sounding(at=now)).without(view.has_decided)
        workers, then, able = known.environment_workers, now + later, view.able_seconds(now)
        executors = self._places.executors(now, later=later)
        return Facts(
            executors=executors,
            begun=view.begun(now),
            newest_version=view.version,
            disbelieved=view.disbelieved,
            max_lag_versions=self._max_lag_versions,
            environment_workers=workers,
            homes=known.homes,
            homes_owned=known.homes_owned,
            routers=known.routers,
            prompts_waiting=known.prompts_waiting,
            held_homes=self._places.held_homes(),
            held_seconds=self._places.held_seconds(then),
            open_groups=view.open_groups,
            window_groups=self._window_groups * workers if workers else None,
            in_a_turn=view.in_a_turn,
            waiting_for_trainer=view.waiting_for_trainer,
            results_waiting=known.lag.get(COMPLETED, 0),
            openable=self._places.openable,
            opened_seconds=view.opened_seconds(then, min(known.waiting_stamps.values(), default=None)),
            workers_seconds=max(0.0, then - self._soundings.workers_at),
            applied_seconds=view.applied_seconds(then),
            dispatched_seconds=then - self._soundings.dispatched_at,
            able_seconds=able + later if able else 0.0,
            settled_seconds=view.settled_seconds(then),
            home_facts=list(self._places.homes(now, later=later)),
            cells=list(self._places.cell_facts(executors, now, later=later)),
            patience=self._patience,
            letters=known.letters,
        )

    def close(self) -> None:
        self._soundings.close()
        self._reader.close()

    def _take(self, envelope: Envelope) -> None:
        place = envelope.topic, envelope.partition
        fresh = envelope.offset >= self._history.get(place, 0)
        now, stamp = self._looked_at, stamp_of(envelope)
        if envelope.topic is PROGRESS:
            self.view.progress(envelope.key, now, live=envelope.record is not None, fresh=fresh, stamp=stamp)
            return
        record = envelope.record
        if envelope.topic is MANIFESTS:
            judged = self._trust.judge(envelope)
            self.view.disbelieved += isinstance(judged, Doubt)
            record = None if isinstance(judged, Doubt) else judged
        if record is not None:
            self.view.take(record, now, fresh=fresh, wall=time.time(), stamp=stamp)

    def _assign(self, settings: BusSettings, meanwhile: Callable[[], None], *, whole: bool) -> None:
        self.view.homes, self._places.cells = (
            self._reader.partition_count(PROMPTS),
            self._reader.partition_count(HEARTBEATS),
        )
        topics = (HEARTBEATS, MANIFESTS, GROUPS, PROGRESS, OUTCOMES, COMPLETED, SAMPLES)
        places: list[Place] = [(topic, part) for topic in topics for part in range(self._reader.partition_count(topic))]
        with suppress(TopicMissing, BusError):  # a broker whose topics or rights are of 0.2.0
            places += [(ROLE_STARTS, part) for part in range(self._reader.partition_count(ROLE_STARTS))]
        bounds = self._reader.all_watermarks(places)
        self._history = {place: end for place, (_, end) in bounds.items()}
        beats = [place for place in places if place[0] is HEARTBEATS]
        recent = self._reader.offsets_at(beats, time.time() - HEARTBEATS_SECONDS)
        open_from = self._open_groups_from(settings, meanwhile)
        begins: dict[Place, int] = {}
        for place, (low, end) in bounds.items():
            begins[place] = _begin(place[0], low, end, whole=whole, recent=recent.get(place, end), open_from=open_from)
        self._behind = {place for place, begin in begins.items() if begin < bounds[place][1]}
        self._reader.assign(begins)

    def _open_groups_from(self, settings: BusSettings, meanwhile: Callable[[], None]) -> int | None:
        """Take the groups in; the offset from which the outcomes of the open ones lie, None where none is open."""
        newest: dict[str, tuple[Group, float | None]] = {}
        begins = {(GROUPS, part): OFFSET_BEGINNING for part in range(self._reader.partition_count(GROUPS))}
        for envelope in read_to_end(settings, begins, client_id=CLIENT, on_wait=meanwhile):
            if isinstance(envelope.record, Group):
                newest[envelope.record.group_id] = envelope.record, stamp_of(envelope)
        opened = [group for group, _ in newest.values() if group.state is GroupState.OPEN]
        for group, stamp in newest.values():
            self.view.take(group, self.view.began, fresh=False, stamp=stamp)
        return min((group.outcomes_from for group in opened), default=None)


def watch_of(config: "Config", settings: BusSettings, *, whole: bool, meanwhile: Callable[[], None] = noop) -> Watch:
    """A watch of this configuration's run. Raises UsageError, and what `Watch` does."""
    environment, trainer = config.settings.environment, config.settings.trainer
    return Watch(
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
        meanwhile=meanwhile,
    )


def stamp_of(envelope: Envelope) -> float | None:
    """The broker's stamp of a record; None where its writer has stamped it."""
    return envelope.timestamp_seconds if envelope.stamped_by_broker else None


def _begin(topic: Topic, low: int, end: int, *, whole: bool, recent: int, open_from: int | None) -> int:
    """The offset at which to begin with a partition."""
    if topic is HEARTBEATS:
        return recent
    if topic in (MANIFESTS, PROGRESS, ROLE_STARTS):
        return low
    if topic is GROUPS:
        return end
    if whole:
        return low
    if topic is OUTCOMES and open_from is not None:
        return max(low, min(open_from, end))
    return end
