"""The audit of a log: the conservation law, folded over the records that the broker keeps.

Every trajectory that was requested has one outcome, or a place where it is.

Keeps true
- `requested = trained + stale + filtered + infra_failed + surplus + superseded + evaluated + in flight`, or the audit
  is not clean and names the trajectories for which the equation does not hold.
- The fold does not depend on the order of topics: only the order within a partition counts.
- A group is requested once: by its own record, which outlives its prompt, otherwise by the first prompt with its id in
  its home partition that is no dead letter. A prompt in another partition requests a group only while its home has
  nothing of the group, so a forwarded prompt requests it once, and not at all if its copy was refused.
- Records that are older than the retention of the log cause no finding.
- The audit only reads the log: no process's memory and no committed offset. It reads no contexts: live trajectories are
  known by key, and of a sample only the trajectory id is decoded.
- A run in progress gives no false findings. Topics are read in the order in which a trajectory passes them, prompts
  last: a change during the reading can move a trajectory on, but cannot make it look lost or unasked.
- A transaction becomes visible partition by partition, so a finding counts only if a second reading repeats it.
- A dead letter requests nothing and ends nothing: it is the outcome of its message.

`Ledger` is pure: a fold over records; `inspect_log` reads the log.

Example (a prompt of 3)
    g:0 has a sample and a TRAINED outcome                 -> trained
    g:1 has a sample                                       -> in flight, waiting for the trainer
    g:2 has a tombstone of its progress, and nothing else  -> lost
"""

import time
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field

import msgspec

from rose.schemas.errors import RecordError, RoseError
from rose.schemas.progress import Group, GroupState
from rose.schemas.prompts import Prompt, trajectory_id
from rose.schemas.samples import Outcome, SampleOutcome
from rose.schemas.wire import decode
from rose.topics.catalog import (
    DEAD_LETTER_SOURCES,
    GROUPS,
    OUTCOMES,
    PROGRESS,
    PROMPTS,
    SAMPLES,
    Topic,
    home_partition,
)
from rose.topics.dead_letters import DeadLetterIndex, dead_lettered_places
from rose.topics.log_reader import KeyedMessage, read_keyed_messages, topic_starts
from rose.topics.reader import Reader
from rose.topics.settings import BusSettings

PromptPosition = tuple[int, int]
"""Partition and offset of a prompt."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """Numbers of trajectories without an outcome, by place."""

    not_opened: int
    in_a_turn: int
    """Opened and not ended: a turn is requested, running, or being applied."""
    waiting_for_trainer: int

    @property
    def total(self) -> int:
        """Number of trajectories that are on their way."""
        return self.not_opened + self.in_a_turn + self.waiting_for_trainer


@dataclass(frozen=True, slots=True)
class Audit:
    """Numbers of trajectories by outcome, and the trajectories that break the conservation law."""

    requested: int
    trained: int
    stale: int
    filtered: int
    infra_failed: int
    surplus: int
    superseded: int
    in_flight: InFlight
    lost: tuple[str, ...]
    """Opened or ended trajectories without sample, outcome and progress."""
    doubled: tuple[str, ...]
    """Trajectories with two outcomes or two samples."""
    unasked: tuple[str, ...]
    """Trajectories with a sample or an outcome, but without a prompt."""
    evaluated: int = 0
    """Number of trajectories of evaluations, but for those that failed."""

    @property
    def settled(self) -> int:
        """Number of trajectories with an outcome."""
        return sum(int(getattr(self, outcome.value)) for outcome in Outcome)

    @property
    def clean(self) -> bool:
        """Whether the conservation law holds."""
        return self.requested == self.settled + self.in_flight.total and not (self.lost or self.doubled or self.unasked)

    def trajectories(self) -> dict[str, int]:
        """Return the terms of the law by name, as in `summary.json`."""
        ends = {outcome.value: int(getattr(self, outcome.value)) for outcome in Outcome}
        return {"requested": self.requested, **ends, "in_flight": self.in_flight.total}


@dataclass(slots=True)
class _TrajectoryRecord:
    """The records of one trajectory."""

    live: bool | None = None
    """True: the newest record is its progress; False: it is a tombstone; None: there is neither."""
    samples: int = 0
    outcomes: list[SampleOutcome] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _PromptRecord:
    """A prompt on the log."""

    group_id: str
    size: int
    at_home: bool


class Ledger:
    """Folds records into an Audit. Give it each topic's records in the order of their offsets."""

    def __init__(self) -> None:
        self._prompts: dict[PromptPosition, _PromptRecord] = {}
        self._dead: set[PromptPosition] = set()
        self._groups: dict[str, Group] = {}
        self._known_at_home: set[str] = set()
        self._seen: dict[str, _TrajectoryRecord] = {}

    def on_prompt(self, group_id: str, size: int, *, place: PromptPosition, at_home: bool) -> None:
        """Fold a prompt; `at_home`: it is in the home partition of its group."""
        self._prompts[place] = _PromptRecord(group_id, size, at_home)
        if at_home:
            self._known_at_home.add(group_id)

    def on_dead_prompt(self, place: PromptPosition) -> None:
        """Fold a dead letter of the prompt at this place: the prompt requests nothing."""
        self._dead.add(place)

    def on_group(self, group_id: str, record: Group | None) -> None:
        """Fold the home's record of a group; None is a tombstone: the home has forgotten the group."""
        if record is None:
            self._groups.pop(group_id, None)
        else:
            self._groups[group_id] = record

    def on_progress(self, trajectory: str, *, live: bool) -> None:
        """Fold the progress of a trajectory; not `live`: a tombstone has ended its progress."""
        self._of(trajectory).live = live

    def on_sample(self, trajectory: str) -> None:
        """Count a sample of a trajectory."""
        self._of(trajectory).samples += 1

    def on_outcome(self, record: SampleOutcome) -> None:
        """Add an outcome of a trajectory."""
        self._of(record.trajectory_id).outcomes.append(record)

    def audit(self, *, outcomes_from: int = 0, forgotten_before: float = 0.0) -> Audit:
        """Return the audit of the records so far.

        `outcomes_from`: the first offset of the outcomes that the log keeps. `forgotten_before`: groups that were
        settled before this time (Unix seconds) may be missing on the log.
        """
        requested = self._requested(outcomes_from)
        ends: Counter[Outcome] = Counter()
        places: Counter[str] = Counter()
        lost, doubled = [], []
        for trajectory, group_known in requested.items():
            seen = self._seen.get(trajectory, _TrajectoryRecord())
            if len(seen.outcomes) > 1 or seen.samples > 1:
                doubled.append(trajectory)
            if seen.outcomes:
                ends[seen.outcomes[0].outcome] += 1
            elif (place := _place(seen, group_known=group_known)) is not None:
                places[place] += 1
            else:
                lost.append(trajectory)
        return Audit(
            requested=len(requested),
            **{outcome.value: ends[outcome] for outcome in Outcome},
            in_flight=InFlight(places["not_opened"], places["in_a_turn"], places["waiting_for_trainer"]),
            lost=tuple(lost),
            doubled=tuple(doubled),
            unasked=self._unasked(requested, forgotten_before),
        )

    def _of(self, trajectory: str) -> _TrajectoryRecord:
        return self._seen.setdefault(trajectory, _TrajectoryRecord())

    def _requested(self, outcomes_from: int) -> dict[str, bool]:
        """Return every requested trajectory, and whether its group was opened."""
        requested: dict[str, bool] = {}
        for group in self._groups.values():
            if group.state is GroupState.REFUSED:
                continue
            aged = group.outcomes_from < outcomes_from  # some of its outcomes may be deleted
            for name in _names(group.group_id, group.group_size):
                if not aged or name in self._seen:
                    requested[name] = True
        waiting: set[str] = set()
        for place, prompt in sorted(self._prompts.items()):
            if prompt.group_id not in waiting and self._asks(place, prompt):
                waiting.add(prompt.group_id)
                requested |= dict.fromkeys(_names(prompt.group_id, prompt.size), False)
        return requested

    def _asks(self, place: PromptPosition, prompt: _PromptRecord) -> bool:
        """Return whether the prompt waits to open its group."""
        if place in self._dead:
            return False
        group = self._groups.get(prompt.group_id)
        if not prompt.at_home:
            return group is None and prompt.group_id not in self._known_at_home
        return group is None or (group.state is GroupState.REFUSED and group.offset != place[1])

    def _unasked(self, requested: Iterable[str], forgotten_before: float) -> tuple[str, ...]:
        known = set(requested)
        return tuple(
            sorted(
                name
                for name, seen in self._seen.items()
                if name not in known
                and (seen.outcomes or seen.samples)
                and not any(outcome.recorded_at < forgotten_before for outcome in seen.outcomes)
            )
        )


def _names(group_id: str, size: int) -> Iterable[str]:
    return (trajectory_id(group_id, index) for index in range(size))


def _place(seen: _TrajectoryRecord, *, group_known: bool) -> str | None:
    """Return the place of a trajectory without an outcome; None if it is lost."""
    if seen.samples:
        return "waiting_for_trainer"
    if seen.live:
        return "in_a_turn"
    if seen.live is None and not group_known:
        return "not_opened"
    return None


CLIENT = "rose-audit"

PASSED_IN_ORDER = (GROUPS, PROGRESS, SAMPLES, OUTCOMES, PROMPTS)
"""A trajectory of a group has progress, then a sample, then an outcome; each of these has, or had, a prompt."""

AGAIN_SECONDS = 1.0
"""Pause between a reading with findings and the second reading."""


class SampleName(msgspec.Struct, frozen=True):
    """The fields of a sample that the audit decodes."""

    trajectory_id: str


@dataclass(frozen=True, slots=True)
class LogAudit:
    """The audit of a log, with the extent of the log."""

    audit: Audit
    since: float | None
    """Timestamp in Unix seconds of the oldest record that was read; None if there was no record."""
    dead_letters: dict[Topic, int]
    """Number of dead letters by topic, of the topics that have any."""


def audit_log(settings: BusSettings) -> Audit:
    """Return the audit of the log. Raises TopicMissing or BusError."""
    return inspect_log(settings).audit


def inspect_log(settings: BusSettings) -> LogAudit:
    """Return the audit of the log with its extent. Raises TopicMissing or BusError."""
    found = _read(settings)
    if not found.audit.clean:
        time.sleep(AGAIN_SECONDS)  # topics are read one after the other: records written meanwhile may appear in part
        found = _read(settings)
    return found


def _read(settings: BusSettings) -> LogAudit:
    ledger = Ledger()
    dead_samples = dead_lettered_places(settings, SAMPLES, client_id=CLIENT)
    oldest: list[float] = []
    begins = {topic: topic_starts(settings, [topic], client_id=CLIENT) for topic in PASSED_IN_ORDER}
    for topic in PASSED_IN_ORDER:
        for message in read_keyed_messages(settings, begins[topic], client_id=CLIENT):
            oldest = [min([message.timestamp_seconds, *oldest])]
            if message.topic is not SAMPLES or (message.partition, message.offset) not in dead_samples:
                _apply(ledger, message, homes=len(begins[PROMPTS]))
    dead_letters = DeadLetterIndex(settings, *DEAD_LETTER_SOURCES, client_id=CLIENT)
    dead_letters.read()
    for place in dead_letters.places(PROMPTS):
        ledger.on_dead_prompt(place)
    with closing(Reader(settings, CLIENT)) as reader:
        outcomes_from = reader.watermarks((OUTCOMES, 0))[0]
    forgotten_before = time.time() - settings.retention.outcomes
    counts = {topic: count for topic in DEAD_LETTER_SOURCES if (count := dead_letters.count(topic))}
    audit = ledger.audit(outcomes_from=outcomes_from, forgotten_before=forgotten_before)
    return LogAudit(audit, oldest[0] if oldest else None, counts)


def _apply(ledger: Ledger, message: KeyedMessage, *, homes: int) -> None:
    """Fold one message. An invalid message is skipped: it is a dead letter, or will be."""
    value = message.raw.value
    try:
        if message.topic is PROGRESS:
            ledger.on_progress(message.key, live=value is not None)
        elif message.topic is GROUPS:
            ledger.on_group(message.key, None if value is None else decode(Group, value, message.raw.headers))
        elif value is None:
            return
        elif message.topic is SAMPLES:
            ledger.on_sample(_sample_names.decode(value).trajectory_id)
        elif message.topic is OUTCOMES:
            ledger.on_outcome(decode(SampleOutcome, value, message.raw.headers))
        else:
            prompt = decode(Prompt, value, message.raw.headers)
            at_home = home_partition(prompt.group_id, homes) == message.partition
            place = message.partition, message.offset
            ledger.on_prompt(prompt.group_id, prompt.group_size, place=place, at_home=at_home)
    except (RecordError, msgspec.DecodeError):
        return


_sample_names = msgspec.msgpack.Decoder(SampleName)


class AuditFailed(RoseError):
    """The conservation law does not hold on the log."""
