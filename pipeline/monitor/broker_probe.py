"""What the broker itself knows of a run: who is a member of which group, how far everybody has read, what waits.

Keeps true
- It only asks; a broker that does not answer leaves the last sounding standing, and says that it did not.
- Offsets count transactions' markers too: what waits is counted by reading where it could be few.
- A prompt waits until its group is on the log. Groups also open behind one whose environments are still being reset:
  up to that one alone prompts are committed, so who knows the groups tells those apart (`without`).
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
from confluent_kafka.admin import AdminClient, OffsetSpec

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
from rose.topics.queries import offset_in
from rose.topics.reader import Reader
from rose.topics.records import Place
from rose.topics.settings import BusSettings

CLIENT = "rose-status"

ANSWER_SECONDS = 3.0
"""How long one question to the broker may take."""

PREFIX = "rose-"
"""Of the names of ROSE's clients."""

EVERY_SECONDS = 2.0
"""Between two soundings."""

COUNTED = 1_000
"""Up to so many offsets, the prompts that wait are counted one by one; above, markers of transactions count too."""

COUNT_SECONDS = 5.0
"""Between two such counts: each takes a reader of its own."""

LAGGING = {ENVIRONMENT_GROUP: (PROMPTS, COMPLETED), ROUTER_GROUP: (REQUESTED,)}
"""Whose committed offsets say how far which topics are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSnapshot:
    """The broker's answers."""

    at: float
    """Seconds on this machine's monotonic clock."""
    ends: Mapping[Place, int] = field(default_factory=dict)
    """Next offset of every partition."""
    environment_workers: int | None = None
    homes_owned: int | None = None
    homes: int = 0
    routers: int | None = None
    """Members of the routers' group: one serves, the others wait."""
    lag: Mapping[Topic, int] = field(default_factory=dict)
    """Offsets that the topic's consumer has not come to."""
    prompts_waiting: int = 0
    held_at: frozenset[int] = frozenset()
    """Homes in which no prompt can be read, and a transaction is open before the end."""
    waiting_at: Mapping[int, int] = field(default_factory=dict)
    """The same by home, where any wait."""
    waiting_stamps: Mapping[int, float] = field(default_factory=dict)
    """By home, the broker's stamp of the prompt that waits longest, unix seconds; where that is known."""
    results_at: Mapping[int, int] = field(default_factory=dict)
    """By home, offsets of results that no environment worker has taken in, where there are any."""
    results_stamps: Mapping[int, float] = field(default_factory=dict)
    """The stamp of the oldest of them, where that is known."""
    workers: Sequence["WorkerMember"] = ()
    """The environment workers."""
    letters: Mapping[str, int] = field(default_factory=dict)
    """Dead letters by topic."""
    counted: Sequence["Unread"] = ()
    """The prompts that wait, where they were counted one by one."""

    def without(self, decided: Callable[[int, int], bool]) -> "BrokerSnapshot":
        """Less those of which it is known, by home and offset, that they are decided."""
        left = [each for each in self.counted if not decided(each.home, each.offset)]
        if len(left) == len(self.counted):
            return self
        return replace(
            self, counted=left, prompts_waiting=len(left), waiting_at=_count(left), waiting_stamps=_oldest(left)
        )

    def end(self, topic: Topic) -> int:
        """Of all partitions together."""
        return sum(offset for (other, _), offset in self.ends.items() if other is topic)


class WorkerMember(NamedTuple):
    """A member of a group."""

    name: str
    """As its client calls itself."""
    homes: frozenset[int]
    """That it owns."""


class Unread(NamedTuple):
    """A prompt that no environment worker's commit says is done."""

    home: int
    offset: int
    stamp: float
    """Unix seconds."""


def _count(found: Iterable[Unread]) -> Mapping[int, int]:
    """By home."""
    return Counter(each.home for each in found)


def _oldest(found: Iterable[Unread]) -> dict[int, float]:
    """By home, the earliest stamp."""
    stamps: dict[int, float] = {}
    for each in found:
        stamps[each.home] = min(each.stamp, stamps.get(each.home, math.inf))
    return stamps


class BrokerProbe:
    """Sounds a broker out. Raises BrokerUnreachable or TopicMissing at the start; later a failure is None."""

    def __init__(self, settings: BusSettings) -> None:
        self._settings = settings
        self._client: AdminClient | None = connect(settings)
        """None: to be made anew. One that met a failure may hold on to a leader's old epoch, and fail for good."""
        self._places = _places(self._client, settings)
        unstable: dict[str, Any] = {"isolation.level": "read_uncommitted"}
        self._offsets = {group: Reader(settings, CLIENT, group=group, **unstable) for group in LAGGING}
        """Members of nothing: an AdminClient that asks for offsets crashes when a group's coordinator is moving
        (librdkafka 2.16 follows a pointer that only consumers have). What is committed is asked for as it is: who reads
        committed records alone would wait here for every open transaction."""
        self._letters = DeadLetterIndex(settings, *DEAD_LETTER_SOURCES, client_id=CLIENT)
        self._letter_ends_read: list[int] = []
        self._counted_at = -math.inf
        """When the prompts that wait were last counted one by one."""
        self._counted: list[Unread] = []
        self._looked_at = -math.inf
        """When results that wait were last looked at."""
        self._results_read: dict[Place, int] = {}
        """How far each home's results were read by then."""
        self._stamped: dict[Place, tuple[int, float]] = {}
        """Where that has not moved, with the stamp of the result there."""
        self.trouble = ""
        """Why the last sounding failed; empty if it did not."""

    def probe(self) -> BrokerSnapshot | None:
        """Ask everything once; None when the broker does not answer."""
        try:
            client = self._client = self._client or connect(self._settings)
            ends = self._ends(client)
            committed = {group: self._committed(group, topics) for group, topics in LAGGING.items()}
            behind = {place: max(0, ends[place] - read[place]) for read in committed.values() for place in read}
            lag = {
                topic: sum(count for (other, _), count in behind.items() if other is topic)
                for topics in LAGGING.values()
                for topic in topics
            }
            workers = self._members(client, ENVIRONMENT_GROUP)
            held = self._held(client, committed[ENVIRONMENT_GROUP], ends)
            readable = {home: count for (topic, home), count in behind.items() if topic is PROMPTS and home not in held}
            lag_at = {home: count for home, count in readable.items() if count}
            few = sum(lag_at.values()) <= COUNTED
            unread = self._unread(committed[ENVIRONMENT_GROUP], few=few) if lag_at else []
            waiting = _count(unread) if few else lag_at
            results = {home: count for (topic, home), count in behind.items() if topic is COMPLETED and count}
            stamps = self._results_stamps(committed[ENVIRONMENT_GROUP], results)
            self.trouble = ""
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
                letters=self._count_letters(client),
            )
        except (KafkaException, RoseError) as error:
            self.trouble = str(error)
            self._client = None
            return None

    def close(self) -> None:
        for reader in self._offsets.values():
            reader.close()

    def _ends(self, client: AdminClient) -> dict[Place, int]:
        asked = {TopicPartition(self._name(topic), part): OffsetSpec.latest() for topic, part in self._places}
        names = {(self._name(topic), part): (topic, part) for topic, part in self._places}
        answers = client.list_offsets(asked, request_timeout=ANSWER_SECONDS)
        return {names[each.topic, each.partition]: offset_in(future) for each, future in answers.items()}

    def _committed(self, group: str, topics: tuple[Topic, ...]) -> dict[Place, int]:
        """The next offset that the group reads of each partition; 0 where it has committed none."""
        places = [place for place in self._places if place[0] in topics]
        found = self._offsets[group].committed(places, seconds=ANSWER_SECONDS)
        return {place: offset or 0 for place, offset in found.items()}

    def _members(self, client: AdminClient, group: str) -> list[WorkerMember]:
        """The members of a group, with the homes that each owns."""
        name = self._settings.name(group)
        described = client.describe_consumer_groups([name], request_timeout=ANSWER_SECONDS)[name].result()
        prompts = self._name(PROMPTS)
        return [
            WorkerMember(
                member.client_id.removeprefix(PREFIX),
                frozenset(
                    each.partition
                    for each in (member.assignment.topic_partitions if member.assignment else ())
                    if each.topic == prompts
                ),
            )
            for member in described.members
        ]

    def _unread(self, read: Mapping[Place, int], *, few: bool) -> list[Unread]:
        """The prompts that wait, looked at now and then: all of them where they are `few`, else one."""
        if monotonic() - self._counted_at >= COUNT_SECONDS:
            begins = {place: offset for place, offset in read.items() if place[0] is PROMPTS}
            with closing(read_keyed_messages(self._settings, begins, client_id=CLIENT)) as prompts:
                found = prompts if few else islice(prompts, 1)
                self._counted = [Unread(each.partition, each.offset, each.timestamp_seconds) for each in found]
            self._counted_at = monotonic()
        return [each for each in self._counted if each.offset >= read[PROMPTS, each.home]]

    def _held(self, client: AdminClient, read: Mapping[Place, int], ends: Mapping[Place, int]) -> frozenset[int]:
        """The homes whose next prompt lies behind an open transaction, which readers do not pass."""
        homes = [home for (topic, home), offset in read.items() if topic is PROMPTS and offset < ends[PROMPTS, home]]
        if not homes:
            return frozenset()
        asked = {TopicPartition(self._name(PROMPTS), home): OffsetSpec.latest() for home in homes}
        answers = client.list_offsets(
            asked, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=ANSWER_SECONDS
        )
        readable = {each.partition: offset_in(future) for each, future in answers.items()}
        return frozenset(home for home in homes if readable[home] <= read[PROMPTS, home])

    def _results_stamps(self, read: Mapping[Place, int], waiting: Mapping[int, int]) -> dict[int, float]:
        """By home, the stamp of the oldest result that waits. It is looked at where no result was done for a while."""
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
        """Of each partition, where it is to begin, and the stamp of the first message from there on."""
        left, found = dict(begins), {}
        with closing(read_keyed_messages(self._settings, begins, client_id=CLIENT)) as messages:
            for each in islice(messages, COUNTED):
                place = each.topic, each.partition
                if place in left:
                    found[place] = left.pop(place), each.timestamp_seconds
                if not left:
                    break
        return found

    def _count_letters(self, client: AdminClient) -> dict[str, int]:
        """Read on when there is something new."""
        ends = self._letter_ends(client)
        if ends != self._letter_ends_read:
            self._letters.read()
            self._letter_ends_read = ends
        return {topic.name: count for topic in DEAD_LETTER_SOURCES if (count := self._letters.pending(topic))}

    def _letter_ends(self, client: AdminClient) -> list[int]:
        names = [f"{self._settings.namespace}{topic.dead_letters}" for topic in DEAD_LETTER_SOURCES]
        asked = {TopicPartition(name, 0): OffsetSpec.latest() for name in names}
        answers = client.list_offsets(asked, request_timeout=ANSWER_SECONDS)
        return [offset_in(future) for future in answers.values()]

    def _name(self, topic: Topic) -> str:
        return self._settings.topic(topic)


class BrokerProbeThread:
    """Sounds on a thread of its own, so that a broker that does not answer holds nobody up."""

    def __init__(self, settings: BusSettings) -> None:
        """Raises BrokerUnreachable or TopicMissing."""
        self._probe = BrokerProbe(settings)
        self._stop = Event()
        self.latest: BrokerSnapshot | None = None
        self.dispatched_at = monotonic()
        """When a turn was last seen to be sent to an executor, or the beginning."""
        self.answered_at = monotonic()
        """When the broker last answered."""
        self.workers_at = math.inf
        """Since when some environment worker was seen to be there, without a break."""
        self._thread = Thread(target=self._run, name="soundings", daemon=True)
        self._thread.start()

    @property
    def trouble(self) -> str:
        """Why the broker's last answer failed; empty if it did not."""
        return self._probe.trouble

    def close(self) -> None:
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
