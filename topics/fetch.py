"""Fetches single records by their places in the log, or searches for records from an offset on.

Keeps true
- Each partition is read forward. The reader reads through a gap of up to `jump_records` records, and jumps over a
  longer gap.
- Every requested place is either returned or listed in `missing`: an offset that the log does not have never blocks.
- A record that is searched for is returned unless it is more than `SEARCH_RECORDS` records after its hint.
- Between two fetches the reader has no partition assigned, so new records are not fetched in vain.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from time import monotonic
from typing import Generic, TypeVar

from rose.schemas.errors import RoseError
from rose.topics.reader import Reader
from rose.topics.records import EndOfPartition, Envelope, Item, Place, SkippedMessage

BATCH = 64
"""Records taken from librdkafka at once: under 60 MB."""

POLL_SECONDS = 0.2
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
        batch: int = BATCH,
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
        deadline = monotonic() + STALL_SECONDS
        while open_places and not self._should_stop():
            items = self._reader.read_selected(self._batch, POLL_SECONDS, self._requested)
            if items:
                deadline = monotonic() + STALL_SECONDS
            elif monotonic() > deadline:
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
        deadline = monotonic() + STALL_SECONDS
        while open_places and not self._should_stop():
            items = self._reader.read(BATCH, POLL_SECONDS)
            if items:
                deadline = monotonic() + STALL_SECONDS
            elif monotonic() > deadline:
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
