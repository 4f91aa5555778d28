"""Reads of the log: the messages of a topic from an offset to the present end, single records by place, and searches.

Keeps true
- Only committed records are returned, in order within a partition, and reading ends by itself.
- A message that does not decode is skipped unless the caller asks for it: the consumer of the topic writes the dead
  letter.
- `RecordFetch` and `RecordSearch` read each partition forward. They read through a gap of up to `jump_records` records,
  and jump over a longer gap. Every requested place is either returned or listed in `missing`: an offset that the log
  does not have never blocks. A record that is searched for is returned unless it is more than `SEARCH_RECORDS` records
  after its hint.
- Between two fetches the reader has no partition assigned, so new records are not fetched in vain.
"""

import time
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import msgspec
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

from rose.schemas.errors import RecordError, RoseError
from rose.schemas.record import Record
from rose.schemas.wire import decode
from rose.topics.catalog import LOG_GROUP, Topic
from rose.topics.errors import UNKNOWN_PARTITION_CODES, BusError, is_transient
from rose.topics.queries import missing_error, noop, watermarks_of
from rose.topics.reader import Reader
from rose.topics.records import (
    EndOfPartition,
    Envelope,
    InvalidMessage,
    Item,
    Place,
    RawMessage,
    SkippedMessage,
    raw_of,
)
from rose.topics.settings import BusSettings, new_client

BATCH = 500
"""Messages taken from librdkafka at once."""

POLL_SECONDS = 0.5
"""Longest wait of one poll."""

LARGE_RECORDS: Mapping[str, Any] = MappingProxyType(
    {"fetch.max.bytes": 8 * 1024 * 1024, "queued.max.messages.kbytes": 8 * 1024}
)
"""Settings of librdkafka that bound what it reads ahead, for topics whose records have up to megabytes."""

NamedPlace = tuple[str, int]
"""A topic's name on the broker, and one of its partitions."""


R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class KeyedMessage:
    """A message of a known topic with its place, not decoded."""

    topic: Topic
    partition: int
    offset: int
    key: str
    raw: RawMessage
    """A value of None is a tombstone: the key was deleted."""
    timestamp_seconds: float
    """Timestamp of the broker or the producer, unix seconds."""

    def decoded(self, record: type[R]) -> R | None:
        """The record; None for a tombstone and for an invalid message, which is or will be a dead letter."""
        if self.raw.value is None:
            return None
        try:
            return decode(record, self.raw.value, self.raw.headers)
        except (RecordError, msgspec.DecodeError):
            return None


CLOCKS_APART_SECONDS = 3600.0
"""Largest difference between the clocks that set the times of records which belong together, and their timestamps."""


def read_messages(
    settings: BusSettings,
    offsets: Mapping[NamedPlace, int],
    *,
    client_id: str,
    prefetch_settings: Mapping[str, object] = MappingProxyType({}),
    on_wait: Callable[[], None] = noop,
) -> Iterator[tuple[NamedPlace, int, RawMessage, float]]:
    """Place, offset, message and timestamp (unix seconds) of each committed message from these offsets on.

    `prefetch_settings`: librdkafka settings that bound the messages in memory. `on_wait` is called at least once a
    second, and every few seconds while a query has no answer from the broker; an exception of `on_wait` ends the
    reading. Raises TopicMissing or BusError.
    """
    consumer = new_client(
        Consumer,
        {
            **settings.for_bounded_reads().consumer(client_id, LOG_GROUP),
            "enable.partition.eof": True,
            **prefetch_settings,
        },
    )
    with closing(consumer):
        found = {place: _start_offset(consumer, place, offset, on_wait) for place, offset in offsets.items()}
        remaining = {place for place, begin in found.items() if begin is not None}
        consumer.assign([TopicPartition(*place, found[place]) for place in remaining])
        while remaining:
            on_wait()
            first = consumer.poll(POLL_SECONDS)  # `consume` would wait until the batch is full
            for message in () if first is None else (first, *consumer.consume(BATCH - 1, 0)):
                error, place = message.error(), (str(message.topic()), int(message.partition() or 0))
                if error is None:
                    if place in remaining:
                        yield place, int(message.offset() or 0), raw_of(message), message.timestamp()[1] / 1000
                elif error.code() == KafkaError._PARTITION_EOF:
                    remaining.discard(place)
                elif error.code() in UNKNOWN_PARTITION_CODES:
                    raise missing_error(consumer, *place)
                elif not is_transient(error):
                    action = "the log" if message.topic() is None else place[0]
                    rights = f"Read on topic {place[0]}", f"Describe on group {settings.name(LOG_GROUP)}"
                    raise BusError(f"reading {action}", error, *rights)
        consumer.unassign()  # no fetch is under way when the consumer closes then


def _start_offset(consumer: Consumer, place: NamedPlace, offset: int, on_wait: Callable[[], None]) -> int | None:
    """The offset at which to begin; None if the partition has no message from there on.

    Queried here, because librdkafka takes half a second to find a beginning.
    """
    low, high = watermarks_of(consumer, TopicPartition(*place), on_wait)
    begin = max(low, offset)
    return begin if begin < high else None


def read_keyed_messages(
    settings: BusSettings,
    offsets: Mapping[Place, int],
    *,
    client_id: str = "rose-log",
    prefetch_settings: Mapping[str, object] = MappingProxyType({}),
) -> Generator[KeyedMessage, None, None]:
    """The messages of these partitions from these offsets on; `prefetch_settings` as in `read_messages`.

    Raises TopicMissing or BusError.
    """
    named = {(settings.topic(topic), part): offset for (topic, part), offset in offsets.items()}
    topics = {settings.topic(topic): topic for topic, _ in offsets}
    for (name, part), offset, raw, stamp in read_messages(
        settings, named, client_id=client_id, prefetch_settings=prefetch_settings
    ):
        key = raw.key.decode(errors="replace") if raw.key else ""
        yield KeyedMessage(topics[name], part, offset, key, raw, stamp)


def topic_starts(settings: BusSettings, topics: Sequence[Topic], *, client_id: str = "rose-log") -> dict[Place, int]:
    """Every partition of these topics, from its beginning. Raises TopicMissing."""
    with closing(Reader(settings, client_id)) as reader:
        return {(topic, part): OFFSET_BEGINNING for topic in topics for part in range(reader.partition_count(topic))}


OPEN_TRANSACTION_SECONDS = 60.0
"""How long a transaction may stay open. The broker aborts the transaction of a dead producer long before
(`transaction.timeout.ms`)."""

OPEN_TRANSACTION_POLL_SECONDS = 0.02
"""Pause between two checks of a partition with an open transaction."""


def read_to_end(
    settings: BusSettings,
    offsets: Mapping[Place, int],
    *,
    client_id: str = "rose-log",
    on_invalid: Callable[[InvalidMessage], None] = lambda found: None,
    on_wait: Callable[[], None] = lambda: None,
) -> Iterator[Envelope]:
    """Every committed record from each place's offset to the end that the partition has when the reader arrives there.

    `on_invalid` is called with each message that does not decode. `on_wait` is called at least once a second, so the
    caller can, for example, keep a membership alive; an exception of `on_wait` ends the reading. Raises TopicMissing or
    BusError.
    """
    reader = Reader(settings.for_bounded_reads(), client_id, report_ends=True, on_wait=on_wait)
    open_places = set(offsets)
    try:
        reader.assign(offsets)
        while open_places:
            on_wait()
            for item in reader.read(BATCH, POLL_SECONDS):
                if isinstance(item, EndOfPartition):
                    open_places.discard((item.topic, item.partition))
                elif (item.topic, item.partition) not in open_places:
                    continue
                elif isinstance(item, InvalidMessage):
                    on_invalid(item)
                else:
                    yield item
    finally:
        reader.close()


def read_whole_topics(
    settings: BusSettings, topics: Sequence[Topic], *, client_id: str = "rose-log"
) -> Iterator[Envelope]:
    """Every committed record that these topics still hold, in all partitions. Raises TopicMissing or BusError."""
    yield from read_to_end(settings, topic_starts(settings, topics, client_id=client_id), client_id=client_id)


def await_transactions(
    settings: BusSettings,
    places: Sequence[Place],
    *,
    seconds: float = OPEN_TRANSACTION_SECONDS,
    client_id: str = "rose-log",
    on_wait: Callable[[], None] = lambda: None,
) -> None:
    """Wait until every transaction that is open now in these partitions has been committed or aborted.

    A transaction counts as committed before the commit marker is in each of its partitions, so a successor waits for
    this before it reads the records of its predecessor. `on_wait`: as in `read_to_end`. Raises BusError if a
    transaction is still open after `seconds`.
    """
    committed = Reader(settings, client_id, on_wait=on_wait)
    uncommitted: dict[str, Any] = {"isolation.level": "read_uncommitted"}
    written = Reader(settings, client_id, on_wait=on_wait, **uncommitted)
    deadline = time.monotonic() + seconds
    try:
        ends = {place: end for place, (_, end) in written.all_watermarks(places).items()}
        while ends:
            decided = committed.all_watermarks(list(ends))
            ends = {place: end for place, end in ends.items() if decided[place][1] < end}
            if ends and time.monotonic() > deadline:
                topic, partition = next(iter(ends))
                ended = "kafka-transactions.sh find-hanging shows its producer, and abort ends it"
                where = f"{settings.topic(topic)} [{partition}]"
                raise BusError(f"waiting for a transaction in {where} ({ended})", KafkaError(KafkaError._TIMED_OUT))
            if ends:
                on_wait()
                written.read(1, OPEN_TRANSACTION_POLL_SECONDS)
    finally:
        committed.close()
        written.close()


FETCH_BATCH = 64
"""Records taken from librdkafka at once: under 60 MB."""

FETCH_POLL_SECONDS = 0.2
"""Longest wait of one poll; also how soon a stop is noticed."""

STALL_SECONDS = 60.0
"""A fetch without a record for this time fails."""

JUMP_RECORDS = 1_000
"""Longest gap that is read through. A jump costs a query to the broker and the records that were fetched ahead."""


SEARCH_RECORDS = 10_000
"""A search gives a record up after this many records behind its hint."""


class FetchStalled(RoseError):
    """The broker does not send the records. The fetch may be tried again."""

    def __init__(self, left: int) -> None:
        super().__init__(f"{left} records did not come within {STALL_SECONDS:.0f} s: is the broker reachable?")


class RecordFetch:
    """Fetches records by place. Iterate over it for the records, in order within a partition; then read `missing`."""

    def __init__(
        self,
        reader: Reader,
        requested: Mapping[Place, Sequence[int]],
        *,
        jump_records: int = JUMP_RECORDS,
        batch: int = FETCH_BATCH,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """`requested`: offsets by place. `reader`: a Reader with `report_ends`, not used for anything else meanwhile.

        `should_stop` is called often and ends the fetch early. `batch`: records taken from the bus client at once.
        """
        self.missing: list[tuple[Place, int]] = []
        self.bytes_read = 0
        """Bytes of the values of all records that were read, requested or skipped."""
        self._reader = reader
        self._jump_records = jump_records
        self._batch = batch
        self._should_stop = should_stop
        self._requested = {place: frozenset(offsets) for place, offsets in requested.items()}
        self._remaining = {place: sorted(offsets, reverse=True) for place, offsets in self._requested.items()}

    def __iter__(self) -> Iterator[Envelope]:
        """Ends early when `should_stop`. Raises TopicMissing, BusError or FetchStalled."""
        self._skip_deleted()
        try:
            while self._remaining and not self._should_stop():
                yield from self._read_to_gap()
        finally:
            self._reader.assign({})

    def _skip_deleted(self) -> None:
        partitions = {
            topic: self._reader.partition_count(topic) for topic in dict.fromkeys(topic for topic, _ in self._remaining)
        }
        ends = self._reader.all_watermarks([place for place in self._remaining if place[1] < partitions[place[0]]])
        for place, offsets in list(self._remaining.items()):
            low, high = ends.get(place, (0, 0))
            self.missing += [(place, offset) for offset in offsets if not low <= offset < high]
            offsets[:] = [offset for offset in offsets if low <= offset < high]
            self._drop_if_done(place)

    def _read_to_gap(self) -> Iterator[Envelope]:
        """Read from the next requested offset of each partition until each has a gap to jump over or is done."""
        open_places = set(self._remaining)
        _assign_at(self._reader, {place: offsets[-1] for place, offsets in self._remaining.items()})
        deadline = time.monotonic() + STALL_SECONDS
        while open_places and not self._should_stop():
            items = self._reader.read_selected(self._batch, FETCH_POLL_SECONDS, self._requested)
            if items:
                deadline = time.monotonic() + STALL_SECONDS
            elif time.monotonic() > deadline:
                raise FetchStalled(sum(map(len, self._remaining.values())))
            for item in items:
                self.bytes_read += _value_bytes(item)
                place = item.topic, item.partition
                if place not in open_places:
                    continue
                if isinstance(item, EndOfPartition):
                    self.missing += [(place, offset) for offset in self._remaining.pop(place)]
                    open_places.discard(place)
                    continue
                if self._is_requested(place, item.offset):
                    if isinstance(item, Envelope):
                        yield item
                    else:
                        self.missing.append((place, item.offset))
                if place not in self._remaining or self._remaining[place][-1] - item.offset > self._jump_records:
                    open_places.discard(place)
                    if open_places:
                        self._reader.pause([place])  # fetches nothing behind the gap while other partitions are read

    def _is_requested(self, place: Place, offset: int) -> bool:
        """Whether this offset is requested. Requested offsets before it are added to `missing`."""
        offsets = self._remaining[place]
        while offsets and offsets[-1] < offset:
            self.missing.append((place, offsets.pop()))
        found = bool(offsets) and offsets[-1] == offset
        if found:
            offsets.pop()
        self._drop_if_done(place)
        return found

    def _drop_if_done(self, place: Place) -> None:
        if not self._remaining[place]:
            del self._remaining[place]


def _value_bytes(item: Item | SkippedMessage) -> int:
    if isinstance(item, EndOfPartition):
        return 0
    return item.value_bytes if isinstance(item, SkippedMessage) else len(item.raw.value or b"")


def _assign_at(reader: Reader, offsets: Mapping[Place, int]) -> None:
    """Read on from there at once."""
    reader.assign(offsets)
    reader.refresh_positions(list(offsets))


Name = TypeVar("Name", bound=Hashable)


class RecordSearch(Generic[Name]):
    """Searches for named records. Iterate over it for names and records, in order within a partition."""

    def __init__(
        self,
        reader: Reader,
        hints: Mapping[Place, Mapping[Name, int]],
        name_of: Callable[[Envelope], Name | None],
        *,
        jump_records: int = JUMP_RECORDS,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """`hints`: by place and name, an offset at or shortly before the record of that name.

        `name_of` returns the name of a record, or None. `reader`, `jump_records`, `should_stop`: as for `RecordFetch`.
        """
        self.records_read = 0
        """Records read so far."""
        self._reader = reader
        self._name_of = name_of
        self._jump_records = jump_records
        self._should_stop = should_stop
        self._remaining = {place: dict(names) for place, names in hints.items() if names}
        self._order = {
            place: sorted(names, key=names.__getitem__, reverse=True) for place, names in self._remaining.items()
        }

    def __iter__(self) -> Iterator[tuple[Name, Envelope]]:
        """Ends early when `should_stop`. Raises TopicMissing, BusError or FetchStalled."""
        ends = self._reader.all_watermarks(list(self._remaining))
        begins = {place: low for place, (low, _) in ends.items()}
        for place, (_, end) in ends.items():
            self._skip_beyond_end(place, end)
        try:
            while self._remaining and not self._should_stop():
                yield from self._read_to_gap(begins)
        finally:
            self._reader.assign({})

    def _skip_beyond_end(self, place: Place, end: int) -> None:
        """Drop hints behind the end of a partition: they would make the reader begin at its beginning each time."""
        names = self._remaining[place]
        for name in [name for name, hint in names.items() if hint >= end]:
            del names[name]
        if not names:
            del self._remaining[place]

    def _read_to_gap(self, begins: Mapping[Place, int]) -> Iterator[tuple[Name, Envelope]]:
        """Read from the first hint of each partition until each has a gap to jump over or is done."""
        _assign_at(self._reader, {place: max(begins[place], self._first_hint(place, 0)) for place in self._remaining})
        open_places = set(self._remaining)
        deadline = time.monotonic() + STALL_SECONDS
        while open_places and not self._should_stop():
            items = self._reader.read(FETCH_BATCH, FETCH_POLL_SECONDS)
            if items:
                deadline = time.monotonic() + STALL_SECONDS
            elif time.monotonic() > deadline:
                raise FetchStalled(sum(map(len, self._remaining.values())))
            for item in items:
                place = item.topic, item.partition
                if place not in open_places:
                    continue
                if isinstance(item, EndOfPartition):
                    del self._remaining[place]
                    open_places.discard(place)
                    continue
                self.records_read += 1
                names = self._remaining[place]
                name = self._name_of(item) if isinstance(item, Envelope) else None
                if name is not None and isinstance(item, Envelope) and names.pop(name, None) is not None:
                    yield name, item
                if not self._continues(place, item.offset):
                    open_places.discard(place)

    def _continues(self, place: Place, offset: int) -> bool:
        """Whether to read the partition on from `offset`. Gives up records more than SEARCH_RECORDS behind a hint."""
        names, order = self._remaining[place], self._order[place]
        while (first := self._first_hint(place, offset)) + SEARCH_RECORDS < offset:
            del names[order[-1]]
        if not names:
            del self._remaining[place]
        return bool(names) and first - offset <= self._jump_records

    def _first_hint(self, place: Place, default: int) -> int:
        """The least hint of the records that were not found yet; `default` if all were found."""
        names, order = self._remaining[place], self._order[place]
        while order and order[-1] not in names:
            order.pop()
        return names[order[-1]] if order else default
