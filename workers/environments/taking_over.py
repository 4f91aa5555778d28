"""Homes taken over: their newest records read, and of the rest of the log what live trajectories name.

Keeps true
- The committed offsets are asked for first: the broker gives them once no former owner's transaction can still be
  committed. What is read then is all that was decided before.
- What is read is bounded by the groups that are remembered and the turns of what is live, not by the log.
- Where committed offsets are gone, as after a quiet week, prompts go on after those that the groups tell of, and
  no dead letter is written twice.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from confluent_kafka import OFFSET_BEGINNING

from schemas.progress import EnvSnapshot, Group, TrajectoryProgress
from schemas.turns import TurnRequest, TurnResult
from topics.catalog import COMPLETED, GROUPS, PROGRESS, PROMPTS, REQUESTED, SNAPSHOTS
from topics.dead_letters import dead_lettered_places
from topics.fetch import JUMP_RECORDS, RecordFetch, RecordSearch
from topics.log_reader import await_transactions, read_to_end
from topics.reader import Reader
from topics.records import Envelope, Place
from topics.settings import BusSettings
from workers.environments.home import Home
from workers.environments.recovery import Broken, Recovery, Turn
from workers.environments.trajectory import Rules


@dataclass(frozen=True, slots=True)
class TakenOver:
    """Homes as the log says they are."""

    homes: dict[int, Home]
    broken: list[tuple[Home, Broken]]
    begins: dict[Place, int]
    """Where reading their prompts and results goes on."""
    request_ends: dict[int, int]
    """By home: the next request lies no earlier."""
    newest: int
    """Records read of which the newest of a key counts; compaction bounds them."""
    fetched: int
    """Requests and results read."""


def take_over(
    settings: BusSettings,
    reader: Reader,
    partitions: Sequence[int],
    *,
    homes: int,
    rules: Rules,
    offsets: Callable[[Sequence[Place]], dict[Place, int | None]],
    meanwhile: Callable[[], None],
) -> TakenOver:
    """Read these of so many homes back. `reader` is the member of the group that owns them; `offsets` tells those that
    the group has committed.

    `meanwhile` is called often; what it raises abandons all. Raises TopicMissing, BusError or FetchStalled.
    """
    committed = offsets([(topic, partition) for partition in partitions for topic in (PROMPTS, COMPLETED)])
    written = (GROUPS, PROGRESS, SNAPSHOTS, REQUESTED)
    await_transactions(
        settings, [(topic, partition) for topic in written for partition in partitions], on_wait=meanwhile
    )
    new = [place for place, offset in committed.items() if offset is None]
    ends = reader.all_watermarks([*new, *((REQUESTED, partition) for partition in partitions)])
    unknown = [place for place in new if ends[place][1] > 0]
    letters = _letters(settings, unknown, meanwhile)
    recoveries = {
        partition: Recovery(Home(partition, homes=homes, buried=frozenset(letters.get(partition, ()))))
        for partition in partitions
    }
    newest = _newest(settings, recoveries, meanwhile)
    fetched = _contents(settings, recoveries, meanwhile)
    begins: dict[Place, int] = {}
    broken: list[tuple[Home, Broken]] = []
    for partition, recovery in recoveries.items():
        home = recovery.home
        home.trajectories, cannot, home.strays = recovery.finish(rules.max_context_tokens)
        broken += [(home, lost) for lost in cannot]
        prompts, results = (_begin(recovery, (topic, partition), committed, ends) for topic in (PROMPTS, COMPLETED))
        begins[PROMPTS, partition], begins[COMPLETED, partition] = prompts, results
        home.begin(prompts_from=prompts, results_from=results)
    found = {partition: recovery.home for partition, recovery in recoveries.items()}
    request_ends = {partition: ends[REQUESTED, partition][1] for partition in partitions}
    return TakenOver(found, broken, begins, request_ends, newest, fetched)


def _begin(
    recovery: Recovery, place: Place, committed: dict[Place, int | None], ends: dict[Place, tuple[int, int]]
) -> int:
    offset = committed[place]
    if offset is not None:
        return offset
    low, end = ends[place]
    return min(end, recovery.prompts_from(low) if place[0] is PROMPTS else recovery.results_from(low, end))


def _letters(
    settings: BusSettings, places: Sequence[Place], meanwhile: Callable[[], None]
) -> dict[int, list[tuple[str, int]]]:
    """By home: what is a dead letter already of those inputs whose committed offset is gone."""
    found: dict[int, list[tuple[str, int]]] = {}
    for topic in dict.fromkeys(topic for topic, _ in places):
        for partition, offset in dead_lettered_places(settings, topic, on_wait=meanwhile):
            if (topic, partition) in places:
                found.setdefault(partition, []).append((topic.name, offset))
    return found


def _newest(settings: BusSettings, recoveries: dict[int, Recovery], meanwhile: Callable[[], None]) -> int:
    """Fold the topics of which the newest record of a key counts; how many records there were."""
    begins = {
        (topic, partition): OFFSET_BEGINNING for topic in (GROUPS, PROGRESS, SNAPSHOTS) for partition in recoveries
    }
    records = 0
    for envelope in read_to_end(settings, begins, client_id="rose-recovery", on_wait=meanwhile):
        records += 1
        recovery, record = recoveries[envelope.partition], envelope.record
        if envelope.topic is GROUPS:
            assert record is None or isinstance(record, Group)
            recovery.group(envelope.key, record)
        elif envelope.topic is PROGRESS:
            assert record is None or isinstance(record, TrajectoryProgress)
            recovery.progress(envelope.key, record)
        else:
            assert record is None or isinstance(record, EnvSnapshot)
            recovery.snapshot(envelope.key, record)
    return records


def _contents(settings: BusSettings, recoveries: dict[int, Recovery], meanwhile: Callable[[], None]) -> int:
    """Fetch the requests and results that live trajectories name; how many records that took."""

    def stopped() -> bool:
        meanwhile()
        return False

    # The embedded broker answers a fetch with all the rest of a partition: there jumps cost more than they save.
    far = sys.maxsize if settings.embedded else JUMP_RECORDS
    requests = {(REQUESTED, partition): recovery.requests for partition, recovery in recoveries.items()}
    with closing(Reader(settings.for_bounded_reads(), "rose-recovery", report_ends=True, on_wait=meanwhile)) as reader:
        find = RecordSearch(reader, requests, _turn_of, jump_records=far, should_stop=stopped)
        for _, envelope in find:
            if isinstance(envelope.record, TurnRequest):
                recoveries[envelope.partition].request(envelope.offset, envelope.record)
        records = find.records_read
        named: dict[Place, list[int]] = {}
        for partition, recovery in recoveries.items():
            named |= {(REQUESTED, partition): recovery.links, (COMPLETED, partition): recovery.results}
        wanted = {place: offsets for place, offsets in named.items() if offsets}
        for envelope in RecordFetch(reader, wanted, jump_records=far, should_stop=stopped):
            records += 1
            if isinstance(envelope.record, TurnResult):
                recoveries[envelope.partition].result(envelope.offset, envelope.record)
            elif isinstance(envelope.record, TurnRequest):
                recoveries[envelope.partition].link(envelope.offset, envelope.record)
    return records


def _turn_of(envelope: Envelope) -> Turn | None:
    request = envelope.record
    return (request.trajectory_id, request.turn) if isinstance(request, TurnRequest) else None
