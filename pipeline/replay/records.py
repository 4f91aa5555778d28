"""The records of one trajectory: found on the log, and ordered by episode, turn and attempt.

Keeps true
- Of topics that are partitioned by home, only the home partition is read, from `CLOCKS_APART_SECONDS` before the
  timestamp of the prompt. Records of other groups are not decoded.
- A prompt is found wherever it is: in its home partition, or in another one before it is forwarded.
- Nothing is left out: every attempt of every turn is there, with each dispatch and each result, applied or not.
- Episodes are separate: a trajectory that started again, because the log no longer had its group, has two episodes. A
  result belongs to the request with the same `requested_at`.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field

import msgspec

from rose.schemas.errors import UsageError
from rose.schemas.progress import Group, GroupState, TrajectoryProgress
from rose.schemas.prompts import Prompt
from rose.schemas.record import Record
from rose.schemas.samples import Ending, Sample, SampleOutcome, SampleTurn
from rose.schemas.turns import TurnDispatch, TurnRequest, TurnResult
from rose.topics.catalog import (
    COMPLETED,
    DISPATCHED,
    GROUPS,
    OUTCOMES,
    PROGRESS,
    PROMPTS,
    REQUESTED,
    SAMPLES,
    Topic,
    home_partition,
)
from rose.topics.dead_letters import DeadLetter, read_dead_letters
from rose.topics.log_reader import CLOCKS_APART_SECONDS, KeyedMessage, read_keyed_messages, topic_starts
from rose.topics.reader import Reader
from rose.topics.records import Place
from rose.topics.settings import BusSettings

ENDED = {
    Ending.DONE: "done",
    Ending.MAX_TURNS: "cut off by max_turns",
    Ending.CONTEXT: "cut off by the end of its context",
    Ending.SURPLUS: "ended early: enough others of its group had ended",
    Ending.STALE: "ended early: a token was too old to be trained on",
}
"""Text for the end of a trajectory that did not fail; no entry if the sample does not give the end."""


@dataclass(slots=True)
class Attempt:
    """One execution of a turn, as recorded on the log."""

    dispatches: list[TurnDispatch] = field(default_factory=list)
    """More than one if the attempt was told to stop, or if a router restarted and dispatched it again."""
    results: list[TurnResult] = field(default_factory=list)
    """In the order of the log; results after the first were dropped."""


@dataclass(slots=True)
class EpisodeTurn:
    """One turn of a trajectory, with its request and attempts."""

    request: TurnRequest | None = None
    later: list[TurnRequest] = field(default_factory=list)
    """Requests that withdrew the turn, put the turn on hold, or asked for it again after that."""
    attempts: dict[int, Attempt] = field(default_factory=dict)
    applied: SampleTurn | None = None
    """The turn in the finished sample; None if there is no sample yet."""

    @property
    def is_on_hold(self) -> bool:
        """Whether the newest request puts the turn on hold."""
        return bool(self.later) and self.later[-1].hold

    def was_applied(self, result: TurnResult) -> bool:
        """Whether this result is the one that the sample contains."""
        applied = self.applied
        return applied is not None and (result.attempt, result.worker, result.times.finished_at) == (
            applied.attempt,
            applied.worker,
            applied.times.finished_at,
        )


@dataclass(slots=True)
class Episode:
    """One life of a trajectory, from its first request to its sample."""

    turns: dict[int, EpisodeTurn] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    """At most one, or the conservation law is broken."""


@dataclass(slots=True)
class TrajectoryHistory:
    """The records of a trajectory, in order."""

    trajectory_id: str
    prompt: Prompt | None = None
    episodes: list[Episode] = field(default_factory=list)
    outcomes: list[SampleOutcome] = field(default_factory=list)
    since: float | None = None
    """Timestamp in Unix seconds of the oldest request or result of its home that the log still has."""


@dataclass(slots=True)
class TrajectoryRecords:
    """The records of one trajectory, by kind, each kind in the order of the log."""

    prompt: Prompt | None = None
    progress: TrajectoryProgress | None = None
    """None if the trajectory is not live."""
    requests: list[TurnRequest] = field(default_factory=list)
    dispatches: list[TurnDispatch] = field(default_factory=list)
    results: list[TurnResult] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    outcomes: list[SampleOutcome] = field(default_factory=list)
    since: float | None = None
    """The same as in `TrajectoryHistory`."""


def fold_trajectory(trajectory_id: str, records: TrajectoryRecords) -> TrajectoryHistory:
    """Arrange the records of a trajectory by episode, turn and attempt."""
    history = TrajectoryHistory(trajectory_id, records.prompt, outcomes=list(records.outcomes), since=records.since)
    for request in records.requests:
        known = _newest(history).turns.get(request.turn) if history.episodes else None
        if request.stops or (known is not None and known.is_on_hold):
            _newest(history).turns.setdefault(request.turn, EpisodeTurn()).later.append(request)
            continue
        if not history.episodes or (request.turn == 0 and 0 in history.episodes[-1].turns):
            history.episodes.append(Episode())
        history.episodes[-1].turns.setdefault(request.turn, EpisodeTurn()).request = request
    for dispatch in records.dispatches:
        request = dispatch.request
        turn = _turn_of(history, request.turn, request.requested_at)
        turn.attempts.setdefault(dispatch.attempt, Attempt()).dispatches.append(dispatch)
    for result in records.results:
        turn = _turn_of(history, result.turn, result.times.requested_at)
        turn.attempts.setdefault(result.attempt, Attempt()).results.append(result)
    for sample in records.samples:
        _place(history, sample)
    for life in history.episodes:
        life.turns = dict(sorted(life.turns.items()))
    return history


def _place(history: TrajectoryHistory, sample: Sample) -> None:
    """Add a sample to the episode whose turns it holds."""
    requests = [(turn.turn, turn.times.requested_at) for turn in sample.turns]
    life = _episode_of(history, *requests[0]) if requests else _newest(history)
    life.samples.append(sample)
    for applied in sample.turns:
        turn = life.turns.setdefault(applied.turn, EpisodeTurn())
        turn.applied = turn.applied or applied


def _turn_of(history: TrajectoryHistory, number: int, requested_at: float) -> EpisodeTurn:
    return _episode_of(history, number, requested_at).turns.setdefault(number, EpisodeTurn())


def _episode_of(history: TrajectoryHistory, number: int, requested_at: float) -> Episode:
    """Return the episode that requested the turn at that time; the newest one if the log has lost the request."""
    for life in history.episodes:
        turn = life.turns.get(number, EpisodeTurn())
        if any(each is not None and each.requested_at == requested_at for each in (turn.request, *turn.later)):
            return life
    return _newest(history)


def _newest(history: TrajectoryHistory) -> Episode:
    if not history.episodes:
        history.episodes.append(Episode())
    return history.episodes[-1]


def sort_records(records: TrajectoryRecords, more: Iterable[object]) -> None:
    """Append each record to the list of its kind in `records`."""
    for record in more:
        match record:
            case Prompt():
                records.prompt = records.prompt or record
            case TrajectoryProgress():
                records.progress = record
            case TurnRequest():
                records.requests.append(record)
            case TurnDispatch():
                records.dispatches.append(record)
            case TurnResult():
                records.results.append(record)
            case Sample():
                records.samples.append(record)
            case SampleOutcome():
                records.outcomes.append(record)
            case _:
                pass


CLIENT = "rose-replay"


class _GroupName(msgspec.Struct):
    """The field of a prompt that says its group; the other fields may be wrong."""

    group_id: str


class UnknownTrajectory(UsageError):
    """The log has no record of this trajectory."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the log knows no trajectory {name}: ids are GROUP_ID:INDEX, and a prompt's group_id begins them"
        )


@dataclass(frozen=True, slots=True)
class PromptFound:
    """A prompt with its position on the log."""

    prompt: Prompt
    partition: int
    offset: int
    stamp: float
    """Timestamp in Unix seconds."""


@dataclass(frozen=True, slots=True)
class GroupFound:
    """The records of a group."""

    group_id: str
    home: int
    record: Group | None
    """The newest record of the group in its home; None if there is none."""
    prompts: tuple[PromptFound, ...]
    """In the order of partition and offset. For an opened group only the prompt that opened it, if the log has it."""
    dead_letters: tuple[DeadLetter, ...]
    """Dead letters of its refused prompts, oldest first."""
    open_at_home: int
    """Number of open groups of its home."""

    @property
    def size(self) -> int | None:
        """Number of trajectories; None if the log has nothing of this group."""
        sizes = [found.prompt.group_size for found in self.prompts]
        return self.record.group_size if self.record is not None else next(iter(sizes), None)

    @property
    def opened(self) -> bool:
        """Whether the group was opened, and not refused."""
        return self.record is not None and self.record.state is not GroupState.REFUSED


@dataclass(slots=True)
class TrajectoryFound:
    """The records of a trajectory, and the state of the other trajectories of its group."""

    records: TrajectoryRecords = field(default_factory=TrajectoryRecords)
    live: set[str] = field(default_factory=set)
    """Live trajectories of the group."""
    sampled: set[str] = field(default_factory=set)
    """Trajectories of the group that have a sample."""
    settled: list[SampleOutcome] = field(default_factory=list)
    """Outcomes of the group in the order of the log."""


def find_group(settings: BusSettings, group_id: str) -> GroupFound:
    """Find the records of a group.

    Raises UnknownTrajectory for a name that no record can have, TopicMissing or BusError.
    """
    try:
        group_id.encode()
    except UnicodeEncodeError:  # bytes of a command line that are not UTF-8
        raise UnknownTrajectory(group_id) from None
    homes = topic_starts(settings, [PROMPTS], client_id=CLIENT)
    home = home_partition(group_id, len(homes))
    groups: dict[str, Group | None] = {}
    for message in read_keyed_messages(settings, {(GROUPS, home): 0}, client_id=CLIENT):
        groups[message.key] = message.decoded(Group)
    record = groups.get(group_id)
    begins: Mapping[Place, int] = homes
    if record is not None and record.state is not GroupState.REFUSED:
        begins = {(PROMPTS, home): record.offset}
    prompts = []
    for message in read_keyed_messages(settings, begins, client_id=CLIENT):
        prompt = _prompt_of(group_id, message)
        if prompt is not None:
            prompts.append(PromptFound(prompt, message.partition, message.offset, message.timestamp_seconds))
            if begins is not homes:
                break

    dead_letters = tuple(
        read_dead_letters(settings, PROMPTS, selects=lambda letter: _group_of(letter) == group_id, client_id=CLIENT)
    )
    prompts.sort(key=lambda found: (found.partition, found.offset))
    open_at_home = sum(group is not None and group.state is GroupState.OPEN for group in groups.values())
    return GroupFound(group_id, home, record, tuple(prompts), dead_letters, open_at_home)


def find_trajectory(settings: BusSettings, group: GroupFound, trajectory_id: str) -> TrajectoryFound:
    """Find all records of one trajectory. Raises TopicMissing or BusError."""
    result = TrajectoryFound()
    for message in read_keyed_messages(settings, {(PROGRESS, group.home): 0}, client_id=CLIENT):
        if message.key.rpartition(":")[0] == group.group_id:
            (result.live.discard if message.raw.value is None else result.live.add)(message.key)
            if message.key == trajectory_id:
                result.records.progress = message.decoded(TrajectoryProgress)
    records = _records(settings, group, trajectory_id, result)
    sort_records(result.records, [group.prompts[0].prompt] if group.prompts else [])
    sort_records(result.records, records)
    return result


def _records(settings: BusSettings, group: GroupFound, trajectory_id: str, result: TrajectoryFound) -> Iterator[Record]:
    begins = _begins(settings, group)
    for message in read_keyed_messages(settings, begins, client_id=CLIENT):
        if message.topic in (REQUESTED, COMPLETED):
            stamp, since = message.timestamp_seconds, result.records.since
            result.records.since = stamp if since is None else min(since, stamp)
        record: Record | None = None
        if message.topic is SAMPLES:
            record = _sample(message, group.group_id, trajectory_id, result)
        elif message.topic is OUTCOMES:
            record = _outcome(message, group.group_id, trajectory_id, result)
        elif message.key == trajectory_id:
            assert message.topic.record is not None
            record = message.decoded(message.topic.record)
        if record is not None:
            yield record


def _begins(settings: BusSettings, group: GroupFound) -> dict[Place, int]:
    """Return the offset to begin with, by partition that may hold records of the group."""
    spread: tuple[Topic, ...] = (DISPATCHED, SAMPLES, OUTCOMES)
    places: list[Place] = [
        (REQUESTED, group.home),
        (COMPLETED, group.home),
        *topic_starts(settings, spread, client_id=CLIENT),
    ]
    if not group.prompts:
        return dict.fromkeys(places, 0)
    submitted = min(found.stamp for found in group.prompts)
    with closing(Reader(settings, CLIENT)) as reader:
        return reader.offsets_at(places, submitted - CLOCKS_APART_SECONDS)


def _sample(message: KeyedMessage, group_id: str, trajectory_id: str, result: TrajectoryFound) -> Sample | None:
    """Return the sample if it is of this trajectory; note the trajectory id if it is of the group."""
    if not _names(message.raw.value, group_id):
        return None
    sample = message.decoded(Sample)
    if sample is None or sample.group_id != group_id:
        return None
    result.sampled.add(sample.trajectory_id)
    return sample if sample.trajectory_id == trajectory_id else None


def _outcome(message: KeyedMessage, group_id: str, trajectory_id: str, result: TrajectoryFound) -> SampleOutcome | None:
    """Return the outcome if it is of this trajectory; note the outcome if it is of the group."""
    if message.key.rpartition(":")[0] != group_id:
        return None
    outcome = message.decoded(SampleOutcome)
    if outcome is not None:
        result.settled.append(outcome)
    return outcome if outcome is not None and outcome.trajectory_id == trajectory_id else None


def _prompt_of(group_id: str, message: KeyedMessage) -> Prompt | None:
    prompt = message.decoded(Prompt) if _names(message.raw.value, group_id) else None
    return prompt if prompt is not None and prompt.group_id == group_id else None


def _names(value: bytes | None, group_id: str) -> bool:
    """Return whether a record may be of the group: a value without the group id need not be decoded."""
    if value is None:
        return False
    if value[:1] == b"{" and b"\\" in value:  # JSON may have the id in escapes
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            value = msgspec.json.encode(msgspec.json.decode(value))
    return group_id.encode() in value


def _group_of(letter: DeadLetter) -> str:
    """Return the group id of a refused prompt: that of its value, or its key if the value cannot be decoded."""
    value, key = letter.raw.value or b"", letter.raw.key or b""
    decode_as = msgspec.json.decode if value[:1] == b"{" else msgspec.msgpack.decode
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return decode_as(value, type=_GroupName).group_id
    return key.decode(errors="surrogateescape")
