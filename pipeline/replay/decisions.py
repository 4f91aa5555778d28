"""Repeats the decisions of recorded cores with the cores of this version, and compares them with the log.

Keeps true
- A core is given the inputs of its journal, in their order and at their times, and nothing else. So the decisions of an
  unchanged core are those on the log, byte for byte. A record of an earlier version is compared as this version writes
  it: with the fields that were added since, at their defaults.
- The inputs stay those of the log after a difference. So the first difference of a core is the cause, and later
  differences may follow from it.
- An input that the log does not have any more ends the replay of its core, with a sentence that names it.
- Records are read a few batches at a time, so memory does not grow with the length of the run.

A decision is known by its turn and attempt, or by its grant's worker and time. The same decision in another order is a
difference, too.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeVar

from rose.pipeline.control.config import ControlConfig
from rose.pipeline.control.elasticity import ElasticityCore
from rose.pipeline.journal import MICROSECONDS
from rose.pipeline.replay.recorded_cores import JournalBatch, RecordedCore, RecordSource
from rose.pipeline.routing.candidates import PlacementQuery
from rose.pipeline.routing.cell_session import received_request, valid_dispatches
from rose.pipeline.routing.config import RouterConfig
from rose.pipeline.routing.placement import Choice, Placement
from rose.pipeline.routing.router import Decision, Router
from rose.schemas.cells import CellSummary
from rose.schemas.grants import CapacityGrant, GrantSource, grant_key, parse_grant_key
from rose.schemas.heartbeats import SlackHeartbeat
from rose.schemas.journal import EntryKind, JournalDecision, JournalInput, RestoredRange
from rose.schemas.record import Record
from rose.schemas.turns import TurnDispatch, TurnRequest, TurnResult
from rose.schemas.wire import encode
from rose.topics.catalog import COMPLETED, DISPATCHED, GRANTS, HEARTBEATS, REQUESTED, SUMMARIES, Topic
from rose.topics.records import Envelope, Place

TOPIC_OF: Mapping[EntryKind, Topic] = {
    EntryKind.HEARTBEAT: HEARTBEATS,
    EntryKind.RESULT: COMPLETED,
    EntryKind.REQUEST: REQUESTED,
    EntryKind.DISPATCH: DISPATCHED,
    EntryKind.SUMMARY: SUMMARIES,
    EntryKind.GRANT: GRANTS,
}
"""Topic of the record that an entry names; other entries name no record."""

FETCH_INPUTS = 20_000
"""Inputs whose records are read at once; a batch is read whole."""

Offsets = dict[tuple[Place, int], Envelope]


class InputMissing(Exception):
    """The log does not have a record that a core took. Ends the replay of that core."""


class Outcome(NamedTuple):
    """One decision, of the log or of this version's core."""

    name: Hashable
    """The same for the same decision."""
    at: float
    """Time of the decision in unix seconds by the core's clock; 0 for a deleted grant on the log."""
    key: str
    wire: bytes | None
    """Bytes of the record; None is a tombstone."""
    partition: int
    record: Record | None
    costs: dict[str, float] | None = None
    """Cost in seconds on each executor with room when the turn was placed; None if it was not asked for."""


class Difference(NamedTuple):
    """A decision that differs; one of both may be None."""

    logged: Outcome | None
    made: Outcome | None
    reordered: bool = False
    """Whether the decisions are the same, and only their order differs."""

    @property
    def at(self) -> float:
        """Time of the decision in unix seconds."""
        return min(outcome.at for outcome in (self.logged, self.made) if outcome is not None)

    @property
    def moves(self) -> bool:
        """Whether log and core place the turn on different executors; a turn that one side does not place counts."""
        workers = [getattr(outcome and outcome.record, "worker", None) for outcome in (self.logged, self.made)]
        return workers[0] != workers[1]


@dataclass(slots=True)
class CoreReplay:
    """Result of the replay of one core."""

    core: RecordedCore
    compared: int = 0
    """Decisions that are the same or differ."""
    differences: list[Difference] = field(default_factory=list)
    """In the order of their times."""
    gap: str = ""
    """Why not all of its decisions were compared; empty if all were."""


class CoreDriver(Protocol):
    """Feeds a core with recorded inputs."""

    def take(self, entry: JournalInput, envelope: Envelope | None, now: float) -> Iterator[Outcome]:
        """Feed one input; return the decisions of the core."""
        ...


class RouterDriver:
    """A router's core."""

    def __init__(self, core: RecordedCore, source: RecordSource, explained: frozenset[float] = frozenset()) -> None:
        """`explained`: times, in unix seconds, of the decisions whose costs are noted."""
        self._placement = ObservedPlacement() if explained else None
        self._router = Router(config_from(RouterConfig, core.settings), self._placement)
        self._explained = explained
        self._core = core
        self._source = source
        self._times: list[float] = []

    def take(self, entry: JournalInput, envelope: Envelope | None, now: float) -> Iterator[Outcome]:
        """See `CoreDriver`. Raises InputMissing."""
        if self._placement is not None:
            self._placement.chosen.clear()
            self._placement.observes = now in self._explained
        costs = iter(() if self._placement is None else self._placement.chosen)
        for decision in self._decide(entry, envelope, now):
            placed = next(costs, None) if isinstance(decision, TurnDispatch) else None
            yield router_outcome(decision, now, placed)

    def _decide(self, entry: JournalInput, envelope: Envelope | None, now: float) -> Sequence[Decision]:
        router, record = self._router, None if envelope is None else envelope.record
        match entry.kind:
            case EntryKind.HEARTBEAT if isinstance(record, SlackHeartbeat):
                return router.on_heartbeat(record, now)
            case EntryKind.RESULT if isinstance(record, TurnResult):
                return router.on_result(record, now)
            case EntryKind.REQUEST if envelope is not None:
                return router.on_request(received_request(envelope), now)
            case EntryKind.FENCED:
                tokens = router.fencing_tokens
                tokens[entry.partition] = max(entry.offset, tokens.get(entry.partition, 0))
            case EntryKind.CLOSED:
                router.close_inboxes([entry.partition])
            case EntryKind.RESTORING:
                self._times = [now]
            case EntryKind.RESTORED:
                return self._restore(now)
            case _:
                return router.tick(now)
        return ()

    def _restore(self, now: float) -> list[Decision]:
        times = iter((*self._times, now))
        found = {kind: self._restored(kind) for kind in (EntryKind.REQUEST, EntryKind.DISPATCH, EntryKind.RESULT)}
        return self._router.restore(
            (
                received_request(each)
                for each in found[EntryKind.REQUEST]
                if isinstance(each.record, TurnRequest) and not each.record.validation_error
            ),
            valid_dispatches(found[EntryKind.DISPATCH]),
            (each.record for each in found[EntryKind.RESULT] if isinstance(each.record, TurnResult)),
            lambda: next(times),
        )

    def _restored(self, kind: EntryKind) -> list[Envelope]:
        """The records that were read at the start, in the order in which they were read."""
        topic = TOPIC_OF[kind]
        ranges = [each for each in self._core.restored if each.kind is kind]
        firsts = self._source.first_offsets(sorted({(topic, each.partition) for each in ranges}, key=lambda at: at[1]))
        places = defaultdict[Place, list[int]](list)
        for each in ranges:
            if each.begin < firsts[topic, each.partition]:
                raise InputMissing(missing_sentence((topic, each.partition), each.begin))
            places[topic, each.partition] += range(each.begin, each.end)
        found = by_offset(self._source.fetch(places)) if places else {}
        return [envelope for each in ranges for envelope in _in_range(found, topic, each)]


class ControlDriver:
    """A control app's core."""

    def __init__(self, core: RecordedCore) -> None:
        self._elasticity = ElasticityCore(config_from(ControlConfig, core.settings), core.job)

    def take(self, entry: JournalInput, envelope: Envelope | None, now: float) -> Iterator[Outcome]:
        """See `CoreDriver`."""
        core, record = self._elasticity, None if envelope is None else envelope.record
        if entry.kind is EntryKind.SUMMARY and isinstance(record, CellSummary):
            core.on_summary(record, now)
        elif entry.kind is EntryKind.GRANT and envelope is not None:
            worker, source = parse_grant_key(envelope.key)
            if source is not None:
                core.on_grant(worker, record if isinstance(record, CapacityGrant) else None, now, source=source)
        elif entry.kind is EntryKind.TICK:
            for grant in core.tick(now):
                key = grant_key(grant.worker, GrantSource.LEASED if grant.cell is None else GrantSource.CELL)
                yield grant_outcome(key, grant)
            for name, gone in core.expired_grants(now):
                yield grant_outcome(grant_key(name, gone), None)


class ObservedPlacement(Placement):
    """A placement that notes the costs of each turn that it places, while `observes`."""

    def __init__(self) -> None:
        super().__init__()
        self.observes = False
        self.chosen: list[dict[str, float] | None] = []
        """Costs of the turns that were placed since the last `clear`; None without observation."""

    def choose(self, query: PlacementQuery, now: float) -> Choice | None:
        """See `Placement`."""
        costs = self.costs(query, now) if self.observes else None
        choice = super().choose(query, now)
        if choice is not None:
            self.chosen.append(costs)
        return choice


Config = TypeVar("Config")


def config_from(kind: type[Config], settings: Mapping[str, float]) -> Config:
    """Return the configuration of this class with the recorded settings; other settings have their defaults."""
    numbers = {
        each.name: type(each.default)(settings[each.name])
        for each in fields(kind)  # type: ignore[arg-type]  # every configuration is a dataclass
        if each.name in settings and isinstance(each.default, int | float)
    }
    return kind(**numbers)


def router_outcome(decision: Decision, now: float, costs: dict[str, float] | None = None) -> Outcome:
    """The outcome of a router's decision."""
    wire = encode(decision)
    if isinstance(decision, TurnDispatch):
        name: Hashable = (decision.key, "withdrawn") if decision.withdrawn else decision.key
        return Outcome(name, now, decision.request.trajectory_id, wire, decision.slot, decision, costs)
    name = decision.trajectory_id, decision.turn, "given up"
    return Outcome(name, now, decision.trajectory_id, wire, decision.home, decision)


def grant_outcome(key: str, grant: CapacityGrant | None) -> Outcome:
    """The outcome of a control app's decision. `grant`: None for a deleted grant."""
    at = 0.0 if grant is None else grant.granted_at
    return Outcome((key, at), at, key, None if grant is None else encode(grant), 0, grant)


def logged_outcome(envelope: Envelope) -> Outcome:
    """The outcome that a record on the log stands for."""
    record = envelope.record
    wire = None if record is None else encode(record)
    if isinstance(record, TurnDispatch):
        name: Hashable = (record.key, "withdrawn") if record.withdrawn else record.key
        found = Outcome(name, record.dispatched_at, envelope.key, wire, envelope.partition, record)
    elif isinstance(record, TurnResult):
        name = record.trajectory_id, record.turn, "given up"
        found = Outcome(name, record.times.finished_at, envelope.key, wire, envelope.partition, record)
    else:
        at = record.granted_at if isinstance(record, CapacityGrant) else 0.0
        found = Outcome((envelope.key, at), at, envelope.key, wire, envelope.partition, record)
    return found


def missing_sentence(place: Place, offset: int) -> str:
    """Say that the log does not have a record any more."""
    return f"{place[0].name}/{place[1]}/{offset}, which it took, is not on the log any more"


def by_offset(envelopes: Iterable[Envelope]) -> Offsets:
    """The records by place and offset."""
    return {((each.topic, each.partition), each.offset): each for each in envelopes}


def _in_range(found: Offsets, topic: Topic, read: RestoredRange) -> Iterator[Envelope]:
    for offset in range(read.begin, read.end):
        envelope = found.get(((topic, read.partition), offset))
        if envelope is not None:
            yield envelope


def replay_core(
    core: RecordedCore, source: RecordSource, *, since: float = 0.0, until: float = float("inf"), explained: int = 0
) -> CoreReplay:
    """Repeat one core and compare its decisions between `since` and `until`, in unix seconds.

    `explained`: for so many of the differing turns, and of the turns that are placed elsewhere, the costs of all
    executors are computed. That repeats the core once more. Raises TopicMissing, BusError or FetchStalled.
    """
    replay = _Comparison(core, source, since, until).run(frozenset())
    moved = [each for each in replay.differences if each.moves]
    chosen = [*replay.differences[:explained], *moved[:explained]]
    times = frozenset(each.made.at for each in chosen if each.made is not None)
    if times and core.cell is not None:
        return _Comparison(core, source, since, until).run(times)
    return replay


class _Comparison:
    """One pass over a recorded core."""

    def __init__(self, core: RecordedCore, source: RecordSource, since: float, until: float) -> None:
        self._core = core
        self._source = source
        self._since = since
        self._until = until
        self._now = core.began_at
        """Time of the newest input in microseconds."""
        self._replay = CoreReplay(core, gap=core.gap)
        self._logged: dict[Hashable, list[tuple[int, Outcome]]] = {}
        """Decisions on the log that the core has not made yet, with their numbers."""
        self._made: dict[Hashable, list[Outcome]] = {}
        """Decisions of the core that the log has not shown yet."""
        self._numbers = 0
        self._newest_matched = -1

    def run(self, explained: frozenset[float]) -> CoreReplay:
        """Repeat the core. `explained`: times of the decisions whose costs are noted."""
        driver: CoreDriver = ControlDriver(self._core)
        if self._core.cell is not None:
            driver = RouterDriver(self._core, self._source, explained)
        try:
            for batches in _chunks(self._core.batches):
                self._compare_chunk(driver, batches)
                if self._now / MICROSECONDS > self._until:
                    break
        except InputMissing as missing:
            self._replay.gap = str(missing)
            self._match()  # the decisions before the gap
        self._note_unmatched()
        self._replay.differences.sort(key=lambda difference: difference.at)
        return self._replay

    def _compare_chunk(self, driver: CoreDriver, batches: Sequence[JournalBatch]) -> None:
        places = defaultdict[Place, list[int]](list)
        entries: Iterator[JournalInput | JournalDecision] = chain.from_iterable(
            (*batch.inputs, *batch.decisions) for batch in batches
        )
        for entry in entries:
            if entry.kind in TOPIC_OF:
                places[TOPIC_OF[entry.kind], entry.partition].append(entry.offset)
        found = by_offset(self._source.fetch(places)) if places else {}
        for batch in batches:
            for decision in batch.decisions:
                self._add_logged(found, (TOPIC_OF[decision.kind], decision.partition), decision.offset)
            for entry in batch.inputs:
                self._now += entry.microseconds
                envelope = None
                if entry.kind in TOPIC_OF:
                    place = TOPIC_OF[entry.kind], entry.partition
                    envelope = found.get((place, entry.offset))
                    if envelope is None:
                        raise InputMissing(missing_sentence(place, entry.offset))
                for made in driver.take(entry, envelope, self._now / MICROSECONDS):
                    self._made.setdefault(made.name, []).append(made)
            self._match()

    def _add_logged(self, found: Offsets, place: Place, offset: int) -> None:
        envelope = found.get((place, offset))
        if envelope is None:
            raise InputMissing(missing_sentence(place, offset).replace("which it took", "which it wrote"))
        logged = logged_outcome(envelope)
        self._logged.setdefault(logged.name, []).append((self._numbers, logged))
        self._numbers += 1

    def _match(self) -> None:
        """Compare the decisions that both sides have."""
        names = [name for name, many in self._made.items() for _ in many]
        for name in names:
            if name not in self._logged:
                continue
            made, (number, logged) = self._made[name].pop(0), self._logged[name].pop(0)
            for pending in (self._made, self._logged):
                if not pending[name]:
                    del pending[name]
            in_order, self._newest_matched = number > self._newest_matched, max(number, self._newest_matched)
            if not self._is_asked_for(made):
                continue
            self._replay.compared += 1
            same = (logged.wire, logged.key, logged.partition) == (made.wire, made.key, made.partition)
            if not same or not in_order:
                self._replay.differences.append(Difference(logged, made, reordered=same))

    def _note_unmatched(self) -> None:
        """Note the decisions of one side alone. A replay that ended early leaves decisions of the log unmade."""
        pending = [outcome for found in self._logged.values() for _, outcome in found]
        unmade = [] if self._replay.gap or self._now / MICROSECONDS > self._until else pending
        unlogged = [outcome for found in self._made.values() for outcome in found]
        sides = [*((each, None) for each in unmade), *((None, each) for each in unlogged)]
        for logged, made in sides:
            difference = Difference(logged, made)
            if self._is_asked_for(logged or made):
                self._replay.compared += 1
                self._replay.differences.append(difference)

    def _is_asked_for(self, outcome: Any) -> bool:
        return self._since <= outcome.at <= self._until or not outcome.at


def _chunks(batches: Sequence[JournalBatch]) -> Iterator[list[JournalBatch]]:
    chunk: list[JournalBatch] = []
    size = 0
    for batch in batches:
        chunk.append(batch)
        size += len(batch.inputs)
        if size >= FETCH_INPUTS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
