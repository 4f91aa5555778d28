"""Recovery of homes: reads their records from the log and builds their trajectories again. `Recovery` is pure.

Keeps true
- The recovered state equals the lost one: progress records say which results were applied and where the current request
  is, and the same functions fold both in normal operation and in recovery.
- Only records of live trajectories are fetched: the cost of a trajectory depends on its turns, not on the length of the
  log.
- A trajectory whose records are gone, or contradict its progress, fails with the reason; none is dropped.
- Inputs that the broker deleted before a worker had read them are reported. If they were results, the home's live
  trajectories fail: any of them may wait for one of those results.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import structlog
from confluent_kafka import OFFSET_BEGINNING

from rose.schemas.arrays import ITEM_BYTES, count
from rose.schemas.progress import EnvSnapshot, Group, TrajectoryProgress
from rose.schemas.prompts import Prompt
from rose.schemas.turns import ContextMissing, TurnOutcome, TurnRequest, TurnResult, assemble_context
from rose.topics.catalog import COMPLETED, GROUPS, PROGRESS, PROMPTS, REQUESTED, SNAPSHOTS
from rose.topics.dead_letters import dead_lettered_places
from rose.topics.log_reader import JUMP_RECORDS, RecordFetch, RecordSearch, await_transactions, read_to_end
from rose.topics.reader import Reader
from rose.topics.records import Envelope, Place
from rose.topics.settings import BusSettings
from rose.workers.environments.home import Home
from rose.workers.environments.trajectory import Trajectory, TrajectoryRules, digest_of, result_error

log = structlog.get_logger()

Turn = tuple[str, int]
"""A trajectory and one of its turns."""


@dataclass(frozen=True, slots=True)
class UnrecoverableTrajectory:
    """A trajectory that cannot be rebuilt."""

    trajectory_id: str
    prompt: Prompt
    index: int
    turn: int
    """The turn that it had requested."""
    reason: str


class _Gap(Exception):
    """The log lacks a record that a trajectory needs, or the record does not fit."""


@dataclass(slots=True)
class Recovery:
    """Folds the newest group, progress and snapshot records of one home.

    Then it takes the `requests`, `links` and `results` that these records name.
    """

    home: Home
    results_deleted: bool = False
    """Whether results may have been deleted before they were read."""
    _progress: dict[str, TrajectoryProgress] = field(default_factory=dict)
    _snapshots: dict[str, EnvSnapshot] = field(default_factory=dict)
    _requests: dict[Turn, tuple[int, TurnRequest]] = field(default_factory=dict)
    _links: dict[int, TurnRequest] = field(default_factory=dict)
    _results: dict[int, TurnResult] = field(default_factory=dict)

    def on_group(self, group_id: str, group: Group | None) -> None:
        """Add a group record; a newer record replaces an older one, None is a tombstone."""
        if group is None:
            self.home.on_group_tombstone(group_id)
        else:
            self.home.on_group(group)

    def on_progress(self, trajectory_id: str, progress: TrajectoryProgress | None) -> None:
        """Add a record; a newer record replaces an older one, None says that the trajectory has ended."""
        if progress is None:
            self._progress.pop(trajectory_id, None)
        else:
            self._progress[trajectory_id] = progress

    def on_snapshot(self, trajectory_id: str, snapshot: EnvSnapshot | None) -> None:
        """Add a record; a newer record replaces an older one, None says that the trajectory has ended."""
        if snapshot is None:
            self._snapshots.pop(trajectory_id, None)
        else:
            self._snapshots[trajectory_id] = snapshot

    @property
    def requests(self) -> dict[Turn, int]:
        """The current request of each trajectory, with the lowest offset at which it may be."""
        return {(name, progress.turn): progress.requested_from for name, progress in self._progress.items()}

    @property
    def links(self) -> list[int]:
        """Offsets of the requests in the chains of the current requests that have been found."""
        return [link for _, request in self._requests.values() for link in request.chain]

    @property
    def results(self) -> list[int]:
        """Offsets of all results that live trajectories have applied."""
        return [applied.offset for progress in self._progress.values() for applied in progress.applied]

    def results_from(self, low: int, end: int) -> int:
        """A lower bound of the offsets of results that are not applied yet.

        The home's results are from `low` to `end`.
        """
        if not self._progress:
            return end if self.home.groups else low
        last = [progress.applied[-1].offset + 1 if progress.applied else low for progress in self._progress.values()]
        return max(low, min(last))

    def prompts_from(self, low: int) -> int:
        """The prompts before this offset have been decided; the home's prompts begin at `low`.

        All prompts before a dead letter have been decided, and a group record has the offset up to which prompts had
        been decided.
        """
        decided = (known.decided_to for known in self.home.groups.values())
        return max([low, self.home.dead_lettered_before(PROMPTS), *decided])

    @property
    def live(self) -> int:
        """Number of live trajectories."""
        return len(self._progress)

    def on_request(self, offset: int, request: TurnRequest) -> None:
        """Add the current request of a trajectory."""
        self._requests[request.trajectory_id, request.turn] = offset, request

    def on_link(self, offset: int, request: TurnRequest) -> None:
        """Add a request of a chain."""
        self._links[offset] = request

    def on_result(self, offset: int, result: TurnResult) -> None:
        """Add an applied result."""
        self._results[offset] = result

    def finish(self, max_context_tokens: int) -> tuple[dict[str, Trajectory], list[UnrecoverableTrajectory], list[str]]:
        """Return the rebuilt trajectories, the broken ones and the orphaned ones.

        Broken trajectories cannot be rebuilt. Orphaned trajectories, by name, are those whose group has settled without
        them.
        """
        trajectories: dict[str, Trajectory] = {}
        broken: list[UnrecoverableTrajectory] = []
        orphaned: list[str] = []
        for name, progress in self._progress.items():
            group = self.home.open_groups.get(progress.group_id)
            if group is None:
                orphaned.append(name)
                continue
            try:
                trajectories[name] = self._rebuilt(progress, group.prompt, max_context_tokens)
            except _Gap as gap:
                reason = f"recovery: {gap}"
                broken.append(UnrecoverableTrajectory(name, group.prompt, progress.index, progress.turn, reason))
        return trajectories, broken, orphaned

    def _rebuilt(self, progress: TrajectoryProgress, prompt: Prompt, max_context_tokens: int) -> Trajectory:
        name = progress.trajectory_id
        if self.results_deleted:
            raise _Gap("the broker deleted results that no worker had read, and its own may be among them")
        if prompt.sampling.max_tokens is None:
            raise _Gap("the record of its group does not say how it is sampled")
        snapshot = self._snapshots.get(name)
        if snapshot is None:
            raise _Gap("the state of its environment is not on the log any more")
        if snapshot.digest != digest_of(snapshot.state):
            raise _Gap("the state of its environment is not the one that was saved")
        found = self._requests.get((name, progress.turn))
        if found is None:
            raise _Gap(f"the request of turn {progress.turn} is not on the log any more")
        offset, request = found
        trajectory = Trajectory(
            trajectory_id=name,
            index=progress.index,
            prompt=prompt,
            home=self.home.partition,
            state=snapshot.state,
            digest=snapshot.digest,
            requested_from=offset,
        )
        context = self._context(request)
        _observe(trajectory, context, progress.prompted)
        for turn, applied in enumerate(progress.applied):
            result = self._results.get(applied.offset)
            if result is None or (result.trajectory_id, result.turn, result.outcome) != (
                name,
                turn,
                TurnOutcome.COMPLETED,
            ):
                raise _Gap(f"the result of turn {turn} is not on the log any more")
            if problem := result_error(result, count(trajectory.tokens)):
                raise _Gap(f"the result of turn {turn} is malformed: {problem}")
            trajectory.begin_turn(max_context_tokens)
            trajectory.apply_result(result, applied)
            _observe(trajectory, context, applied.observed)
        if trajectory.tokens != context or trajectory.turn != progress.turn:
            raise _Gap(f"the context of turn {progress.turn} does not follow from the results before it")
        trajectory.sampling = request.sampling
        trajectory.chain, trajectory.request_offset = request.chain, offset
        trajectory.requested = request.context_tokens - count(request.appended)
        return trajectory

    def _context(self, request: TurnRequest) -> bytes:
        try:
            return assemble_context(request, self._links)
        except ContextMissing as torn:
            raise _Gap(str(torn)) from None


def _observe(trajectory: Trajectory, context: bytes, observed: int) -> None:
    """Append the next observation, whose tokens are taken from the current context."""
    begin = len(trajectory.tokens)
    trajectory.observe(context[begin : begin + observed * ITEM_BYTES])


def outcomes_from(homes: Iterable[Home]) -> int | None:
    """The offset of the outcomes topic from which the outcomes of open groups lie; None if no group is open."""
    return min((group.outcomes_from for home in homes for group in home.open_groups.values()), default=None)


@dataclass(frozen=True, slots=True)
class RecoveredHomes:
    """The recovered homes."""

    homes: dict[int, Home]
    broken: list[tuple[Home, UnrecoverableTrajectory]]
    begins: dict[Place, int]
    """Offsets from which prompts and results are read."""
    request_ends: dict[int, int]
    """Lower bound of the offset of the next request, by home."""
    newest: int
    """Records read from compacted topics."""
    fetched: int
    """Requests and results that were fetched."""


def recover_homes(
    settings: BusSettings,
    reader: Reader,
    partitions: Sequence[int],
    *,
    homes: int,
    rules: TrajectoryRules,
    offsets: Callable[[Sequence[Place]], dict[Place, int | None]],
    on_wait: Callable[[], None],
) -> RecoveredHomes:
    """Build the homes of these partitions from the log.

    `reader`: the group member that owns the homes. `homes`: number of home partitions. `offsets` returns the offsets
    that environment workers have committed; None where there are none. `on_wait` is called often; an exception that it
    raises abandons the recovery.

    Raises TopicMissing, BusError or FetchStalled.
    """
    committed = offsets([(topic, partition) for partition in partitions for topic in (PROMPTS, COMPLETED)])
    written = (GROUPS, PROGRESS, SNAPSHOTS, REQUESTED)
    await_transactions(settings, [(topic, partition) for topic in written for partition in partitions], on_wait=on_wait)
    ends = reader.all_watermarks([*committed, *((REQUESTED, partition) for partition in partitions)])
    # An offset beyond the end: the topic was recreated or lost records, so the offset belongs to other records.
    committed = {
        place: None if offset is None or offset > ends[place][1] else offset for place, offset in committed.items()
    }
    deleted = _deleted_unread(committed, ends)
    unknown = [place for place, offset in committed.items() if offset is None and ends[place][1] > 0]
    dead_letters = _dead_letters(settings, unknown, on_wait)
    recoveries = {
        partition: Recovery(
            Home(
                partition,
                homes=homes,
                dead_lettered=frozenset(dead_letters.get(partition, ())),
                members_ratio=rules.members_ratio,
            ),
            results_deleted=(COMPLETED, partition) in deleted,
        )
        for partition in partitions
    }
    newest = _read_newest(settings, recoveries, on_wait)
    fetched = _fetch_contents(settings, recoveries, on_wait)
    begins: dict[Place, int] = {}
    broken: list[tuple[Home, UnrecoverableTrajectory]] = []
    for partition, recovery in recoveries.items():
        home = recovery.home
        home.trajectories, cannot, home.orphaned_trajectories = recovery.finish(rules.max_context_tokens)
        broken += [(home, lost) for lost in cannot]
        prompts, results = (_begin(recovery, (topic, partition), committed, ends) for topic in (PROMPTS, COMPLETED))
        begins[PROMPTS, partition], begins[COMPLETED, partition] = prompts, results
        home.begin(prompts_from=prompts, results_from=results)
    found = {partition: recovery.home for partition, recovery in recoveries.items()}
    request_ends = {partition: ends[REQUESTED, partition][1] for partition in partitions}
    return RecoveredHomes(found, broken, begins, request_ends, newest, fetched)


def _begin(
    recovery: Recovery, place: Place, committed: dict[Place, int | None], ends: dict[Place, tuple[int, int]]
) -> int:
    low, end = ends[place]
    offset = committed[place]
    if offset is not None:
        return max(offset, low)
    proven = recovery.prompts_from(low) if place[0] is PROMPTS else recovery.results_from(low, end)
    return proven if proven <= end else low


def _deleted_unread(committed: dict[Place, int | None], ends: dict[Place, tuple[int, int]]) -> list[Place]:
    """Report and return the inputs of which the broker has deleted records that no worker had read.

    The deleted records may all be transaction markers, which have offsets too. This cannot be determined any more.
    """
    places = []
    for place, offset in committed.items():
        if offset is not None and offset < ends[place][0]:
            places.append(place)
            again = ": send those prompts again" if place[0] is PROMPTS else ""
            log.error(
                "inputs_deleted_unread",
                topic=place[0].name,
                partition=place[1],
                offset=offset,
                begins_at=ends[place][0],
                reason=f"the broker deleted records before a worker had read them{again}",
            )
    return places


def _dead_letters(
    settings: BusSettings, places: Sequence[Place], on_wait: Callable[[], None]
) -> dict[int, list[tuple[str, int]]]:
    """The dead letters (topic name, offset) of the inputs without a committed offset, by home."""
    found: dict[int, list[tuple[str, int]]] = {}
    for topic in dict.fromkeys(topic for topic, _ in places):
        for partition, offset in dead_lettered_places(settings, topic, on_wait=on_wait):
            if (topic, partition) in places:
                found.setdefault(partition, []).append((topic.name, offset))
    return found


def _read_newest(settings: BusSettings, recoveries: dict[int, Recovery], on_wait: Callable[[], None]) -> int:
    """Fold the compacted topics of the homes; returns the number of records read."""
    begins = {
        (topic, partition): OFFSET_BEGINNING for topic in (GROUPS, PROGRESS, SNAPSHOTS) for partition in recoveries
    }
    records = 0
    for envelope in read_to_end(settings, begins, client_id="rose-recovery", on_wait=on_wait):
        records += 1
        recovery, record = recoveries[envelope.partition], envelope.record
        if envelope.topic is GROUPS:
            assert record is None or isinstance(record, Group)
            recovery.on_group(envelope.key, record)
        elif envelope.topic is PROGRESS:
            assert record is None or isinstance(record, TrajectoryProgress)
            recovery.on_progress(envelope.key, record)
        else:
            assert record is None or isinstance(record, EnvSnapshot)
            recovery.on_snapshot(envelope.key, record)
    return records


def _fetch_contents(settings: BusSettings, recoveries: dict[int, Recovery], on_wait: Callable[[], None]) -> int:
    """Fetch the requests and results that live trajectories name; returns the number of records read."""

    def stopped() -> bool:
        on_wait()
        return False

    # The embedded broker returns all the rest of a partition to a fetch, so seeks cost more than they save.
    far = sys.maxsize if settings.embedded else JUMP_RECORDS
    requests = {(REQUESTED, partition): recovery.requests for partition, recovery in recoveries.items()}
    with closing(Reader(settings.for_bounded_reads(), "rose-recovery", report_ends=True, on_wait=on_wait)) as reader:
        find = RecordSearch(reader, requests, _turn_of, jump_records=far, should_stop=stopped)
        for _, envelope in find:
            if isinstance(envelope.record, TurnRequest):
                recoveries[envelope.partition].on_request(envelope.offset, envelope.record)
        records = find.records_read
        named: dict[Place, list[int]] = {}
        for partition, recovery in recoveries.items():
            named |= {(REQUESTED, partition): recovery.links, (COMPLETED, partition): recovery.results}
        offsets_by_place = {place: offsets for place, offsets in named.items() if offsets}
        for envelope in RecordFetch(reader, offsets_by_place, jump_records=far, should_stop=stopped):
            records += 1
            if isinstance(envelope.record, TurnResult):
                recoveries[envelope.partition].on_result(envelope.offset, envelope.record)
            elif isinstance(envelope.record, TurnRequest):
                recoveries[envelope.partition].on_link(envelope.offset, envelope.record)
    return records


def _turn_of(envelope: Envelope) -> Turn | None:
    request = envelope.record
    if not isinstance(request, TurnRequest) or request.stops:
        return None
    return request.trajectory_id, request.turn
