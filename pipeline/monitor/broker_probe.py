"""Queries to the broker about a run: group members, committed offsets, and waiting records.

Keeps true
- The probe only reads. If the broker does not answer, the last snapshot stays, and the error says so.
- Offsets also count transaction markers, so a small number of waiting prompts is counted by reading them.
- A prompt waits until its group is on the log. A worker may open groups behind a prompt whose environments are still
  being reset, but commits prompts only up to that prompt. `without` removes prompts whose groups are known.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from threading import Event, Thread
from time import monotonic
from typing import Any, NamedTuple

from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, MemberDescription, OffsetSpec

from rose.schemas.errors import RoseError
from rose.topics.admin import connect
from rose.topics.catalog import (
    COMPLETED,
    DEAD_LETTER_SOURCES,
    DISPATCHED,
    ENVIRONMENT_GROUP,
    OUTCOMES,
    PROMPTS,
    REQUESTED,
    ROUTER_GROUP,
    SAMPLES,
    Topic,
)
from rose.topics.dead_letters import DeadLetterIndex
from rose.topics.errors import TopicMissing
from rose.topics.log_reader import read_keyed_messages
from rose.topics.queries import group_members, offset_in
from rose.topics.reader import Reader
from rose.topics.records import Place
from rose.topics.settings import CLIENT_PREFIX, BusSettings

CLIENT = "rose-status"

ANSWER_SECONDS = 3.0
"""Timeout of one query to the broker."""

EVERY_SECONDS = 2.0
"""Time between two probes."""

COUNTED = 1_000
"""Up to this number of offsets the waiting prompts are counted by reading; above, transaction markers count too."""

COUNT_SECONDS = 5.0
"""Time between two counts by reading: each one opens a reader."""

LAGGING = {ENVIRONMENT_GROUP: (PROMPTS, COMPLETED), ROUTER_GROUP: (REQUESTED,)}
"""Consumer groups, and the topics whose lag their committed offsets give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSnapshot:
    """The broker's answers of one probe."""

    at: float
    """Time of the probe in seconds on this machine's monotonic clock."""
    ends: Mapping[Place, int] = field(default_factory=dict)
    """Next offset of every partition."""
    environment_workers: int | None = None
    homes_owned: int | None = None
    homes: int = 0
    routers: int | None = None
    """Number of members of the routers' group."""
    lag: Mapping[Topic, int] = field(default_factory=dict)
    """Number of offsets that the topic's consumer has not read, by topic."""
    prompts_waiting: int = 0
    held_at: frozenset[int] = frozenset()
    """Homes whose next prompt is behind an open transaction, so that no consumer can read it."""
    waiting_at: Mapping[int, int] = field(default_factory=dict)
    """Number of waiting prompts by home, of the homes that have any."""
    waiting_stamps: Mapping[int, float] = field(default_factory=dict)
    """The broker's timestamp of the prompt that waits longest, by home, Unix seconds; only if known."""
    results_at: Mapping[int, int] = field(default_factory=dict)
    """Number of offsets of results that no environment worker has read, by home, of homes that have any."""
    results_stamps: Mapping[int, float] = field(default_factory=dict)
    """The broker's timestamp of the oldest waiting result, by home, Unix seconds; only if known."""
    workers: Sequence["WorkerMember"] = ()
    """The environment workers."""
    foreign_clients: Sequence[str] = ()
    """Client ids of the members of the environment workers' group that are other programs."""
    dead_letters: Mapping[str, int] = field(default_factory=dict)
    """Number of dead letters by topic."""
    counted: Sequence["Unread"] = ()
    """The waiting prompts, if they were counted by reading."""

    def without(self, decided: Callable[[int, int], bool]) -> "BrokerSnapshot":
        """Return the snapshot without the prompts that have a decision; `decided` takes home and offset."""
        left = [each for each in self.counted if not decided(each.home, each.offset)]
        if len(left) == len(self.counted):
            return self
        return replace(
            self, counted=left, prompts_waiting=len(left), waiting_at=_count(left), waiting_stamps=_oldest(left)
        )

    def end(self, topic: Topic) -> int:
        """Return the sum of the next offsets of all partitions of the topic."""
        return sum(offset for (other, _), offset in self.ends.items() if other is topic)


class WorkerMember(NamedTuple):
    """An environment worker or router as a member of its consumer group."""

    client_id: str
    homes: frozenset[int]
    """The homes that the member owns."""

    @property
    def name(self) -> str:
        """The client id without the prefix of ROSE."""
        return self.client_id.removeprefix(CLIENT_PREFIX)


class Unread(NamedTuple):
    """A prompt at or after the committed offset of its partition."""

    home: int
    offset: int
    stamp: float
    """The broker's timestamp, Unix seconds."""


def _count(found: Iterable[Unread]) -> Mapping[int, int]:
    """Return the number of prompts by home."""
    return Counter(each.home for each in found)


def _oldest(found: Iterable[Unread]) -> dict[int, float]:
    """Return the earliest timestamp by home."""
    stamps: dict[int, float] = {}
    for each in found:
        stamps[each.home] = min(each.stamp, stamps.get(each.home, math.inf))
    return stamps


class BrokerProbe:
    """Queries a broker. The constructor raises BrokerUnreachable or TopicMissing; a failed probe later returns None."""

    def __init__(self, settings: BusSettings) -> None:
        self._settings = settings
        self._client: AdminClient | None = connect(settings)
        """None: to be created again. A client that met an error may keep an old leader epoch and fail for good."""
        self._places = _places(self._client, settings)
        unstable: dict[str, Any] = {"isolation.level": "read_uncommitted"}
        self._offsets = {group: Reader(settings, CLIENT, group=group, **unstable) for group in LAGGING}
        """Readers without group membership: an AdminClient that queries committed offsets crashes while the group's
        coordinator moves (librdkafka 2.16 uses a pointer that only consumers have). The offsets are read uncommitted: a
        reader of committed records would wait here for every open transaction."""
        self._dead_letters = DeadLetterIndex(settings, *DEAD_LETTER_SOURCES, client_id=CLIENT)
        self._letter_ends_read: list[int] = []
        self._counted_at = -math.inf
        """When the waiting prompts were last counted by reading."""
        self._counted: list[Unread] = []
        self._looked_at = -math.inf
        """When the timestamps of waiting results were last read."""
        self._results_read: dict[Place, int] = {}
        """The committed offset of each home's results at that time."""
        self._stamped: dict[Place, tuple[int, float]] = {}
        """The committed offset with the timestamp of the result there, for homes whose offset has not moved."""
        self.last_error: str | None = None
        """Error of the last probe; None if it succeeded."""

    def probe(self) -> BrokerSnapshot | None:
        """Query everything once; None if the broker does not answer."""
        try:
            client = self._client = self._client or connect(self._settings)
            named = [(self._name(topic), part) for topic, part in self._places]
            ends = dict(zip(self._places, self._ends(client, named), strict=True))
            committed = {group: self._committed(group, topics) for group, topics in LAGGING.items()}
            behind = {place: max(0, ends[place] - read[place]) for read in committed.values() for place in read}
            lag = {
                topic: sum(count for (other, _), count in behind.items() if other is topic)
                for topics in LAGGING.values()
                for topic in topics
            }
            members = self._members(client, ENVIRONMENT_GROUP)
            workers = [each for each in members if self._settings.is_worker(each.client_id)]
            held = self._held(client, committed[ENVIRONMENT_GROUP], ends)
            readable = {home: count for (topic, home), count in behind.items() if topic is PROMPTS and home not in held}
            lag_at = {home: count for home, count in readable.items() if count}
            few = sum(lag_at.values()) <= COUNTED
            unread = self._unread(committed[ENVIRONMENT_GROUP], few=few) if lag_at else []
            waiting = _count(unread) if few else lag_at
            results = {home: count for (topic, home), count in behind.items() if topic is COMPLETED and count}
            stamps = self._results_stamps(committed[ENVIRONMENT_GROUP], results)
            self.last_error = None
            return BrokerSnapshot(
                at=monotonic(),
                ends=ends,
                environment_workers=len(workers),
                homes_owned=len(frozenset().union(*(each.homes for each in workers))),
                homes=sum(topic is PROMPTS for topic, _ in self._places),
                routers=len(self._members(client, ROUTER_GROUP)),
                lag=lag,
                prompts_waiting=sum(waiting.values()),
                held_at=held,
                waiting_at=waiting,
                waiting_stamps=_oldest(unread),
                counted=unread if few else (),
                results_at=results,
                results_stamps=stamps,
                workers=workers,
                foreign_clients=sorted(each.client_id for each in members if each not in workers),
                dead_letters=self._count_dead_letters(client),
            )
        except (KafkaException, RoseError) as error:
            self.last_error = str(error)
            self._client = None
            return None

    def close(self) -> None:
        """Close the clients."""
        for reader in self._offsets.values():
            reader.close()

    def _ends(
        self,
        client: AdminClient,
        partitions: Iterable[tuple[str, int]],
        isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
    ) -> list[int]:
        """Return the end of each partition, by its topic's name on the broker, for readers of this isolation level."""
        specs = {TopicPartition(*place): OffsetSpec.latest() for place in partitions}
        answers = client.list_offsets(specs, isolation_level=isolation, request_timeout=ANSWER_SECONDS)
        return [offset_in(answers[place]) for place in specs]

    def _committed(self, group: str, topics: tuple[Topic, ...]) -> dict[Place, int]:
        """Return the group's committed offset by partition; 0 if it has committed none."""
        places = [place for place in self._places if place[0] in topics]
        found = self._offsets[group].committed(places, seconds=ANSWER_SECONDS)
        return {place: offset or 0 for place, offset in found.items()}

    def _members(self, client: AdminClient, group: str) -> list[WorkerMember]:
        """Return the members of a group with the homes that each one owns."""
        members = group_members(client, self._settings.name(group), ANSWER_SECONDS)
        return [WorkerMember(member.client_id, self._homes(member)) for member in members]

    def _homes(self, member: MemberDescription) -> frozenset[int]:
        """Return the homes of a member: a worker with other partitions of the prompts than of the results owns none."""
        assigned = member.assignment.topic_partitions if member.assignment else ()
        prompts, results = (
            frozenset(each.partition for each in assigned if each.topic == self._name(topic))
            for topic in (PROMPTS, COMPLETED)
        )
        return prompts if prompts == results else frozenset()

    def _unread(self, read: Mapping[Place, int], *, few: bool) -> list[Unread]:
        """Return the waiting prompts, read every COUNT_SECONDS: all of them if they are `few`, else one."""
        if monotonic() - self._counted_at >= COUNT_SECONDS:
            begins = {place: offset for place, offset in read.items() if place[0] is PROMPTS}
            with closing(read_keyed_messages(self._settings, begins, client_id=CLIENT)) as prompts:
                found = prompts if few else islice(prompts, 1)
                self._counted = [Unread(each.partition, each.offset, each.timestamp_seconds) for each in found]
            self._counted_at = monotonic()
        return [each for each in self._counted if each.offset >= read[PROMPTS, each.home]]

    def _held(self, client: AdminClient, read: Mapping[Place, int], ends: Mapping[Place, int]) -> frozenset[int]:
        """Return the homes whose next prompt is behind an open transaction, which readers do not pass."""
        homes = [home for (topic, home), offset in read.items() if topic is PROMPTS and offset < ends[PROMPTS, home]]
        if not homes:
            return frozenset()
        named = [(self._name(PROMPTS), home) for home in homes]
        readable = dict(zip(homes, self._ends(client, named, IsolationLevel.READ_COMMITTED), strict=True))
        return frozenset(home for home in homes if readable[home] <= read[PROMPTS, home])

    def _results_stamps(self, read: Mapping[Place, int], waiting: Mapping[int, int]) -> dict[int, float]:
        """Return the timestamp of the oldest waiting result by home, of homes without commits for a while."""
        if monotonic() - self._looked_at >= COUNT_SECONDS:
            places: list[Place] = [(COMPLETED, home) for home in waiting]
            still = {place: read[place] for place in places if self._results_read.get(place) == read[place]}
            self._stamped = {place: known for place, known in self._stamped.items() if still.get(place) == known[0]}
            begins = {place: offset for place, offset in still.items() if place not in self._stamped}
            if begins:
                self._stamped |= self._first(begins)
            self._looked_at, self._results_read = monotonic(), {place: read[place] for place in places}
        stamps = {home: self._stamped.get((COMPLETED, home)) for home in waiting}
        return {home: known[1] for home, known in stamps.items() if known and known[0] == read[COMPLETED, home]}

    def _first(self, begins: Mapping[Place, int]) -> dict[Place, tuple[int, float]]:
        """Return, by partition, its offset in `begins` and the timestamp of the first message from there on."""
        left, found = dict(begins), {}
        with closing(read_keyed_messages(self._settings, begins, client_id=CLIENT)) as messages:
            for each in islice(messages, COUNTED):
                place = each.topic, each.partition
                if place in left:
                    found[place] = left.pop(place), each.timestamp_seconds
                if not left:
                    break
        return found

    def _count_dead_letters(self, client: AdminClient) -> dict[str, int]:
        """Return the number of pending dead letters by topic. The topics are read only if they have grown."""
        namespace = self._settings.namespace
        ends = self._ends(client, [(f"{namespace}{topic.dead_letters}", 0) for topic in DEAD_LETTER_SOURCES])
        if ends != self._letter_ends_read:
            self._dead_letters.read()
            self._letter_ends_read = ends
        return {topic.name: count for topic in DEAD_LETTER_SOURCES if (count := self._dead_letters.pending(topic))}

    def _name(self, topic: Topic) -> str:
        return self._settings.topic(topic)


class BrokerProbeThread:
    """Probes on a thread of its own, so that a broker that does not answer blocks no caller."""

    def __init__(self, settings: BusSettings) -> None:
        """Start the thread. Raises BrokerUnreachable or TopicMissing."""
        self._probe = BrokerProbe(settings)
        self._stop = Event()
        self.latest: BrokerSnapshot | None = None
        self.dispatched_at = monotonic()
        """When a dispatch was last seen; the start of the thread if never."""
        self.answered_at = monotonic()
        """When the broker last answered; the start of the thread if never."""
        self.workers_at = math.inf
        """Since when the group has had environment workers, without a break; infinite if it has none."""
        self._thread = Thread(target=self._run, name="broker-probe", daemon=True)
        self._thread.start()

    @property
    def last_error(self) -> str | None:
        """Error of the last probe; None if it succeeded."""
        return self._probe.last_error

    def close(self) -> None:
        """End the thread; wait for it no longer than an answer may take."""
        self._stop.set()
        self._thread.join(ANSWER_SECONDS)

    def _run(self) -> None:
        while not self._stop.is_set():
            found = self._probe.probe()
            if found is not None:
                before, self.latest, self.answered_at = self.latest, found, found.at
                if before is not None and found.end(DISPATCHED) != before.end(DISPATCHED):
                    self.dispatched_at = found.at
                self.workers_at = min(self.workers_at, found.at) if found.environment_workers else math.inf
            self._stop.wait(EVERY_SECONDS)
        self._probe.close()


def _places(client: AdminClient, settings: BusSettings) -> list[Place]:
    there: Any = client.list_topics(timeout=ANSWER_SECONDS).topics
    return [
        (topic, partition)
        for topic in (PROMPTS, REQUESTED, DISPATCHED, COMPLETED, SAMPLES, OUTCOMES)
        for partition in _partitions(there, settings.topic(topic))
    ]


def _partitions(there: Any, name: str) -> list[int]:
    if name not in there:
        raise TopicMissing(name)
    return list(there[name].partitions)
