"""Single records fetched by their places in the log.

Keeps true
- Each partition is read forward. A gap of up to `far` records is read through, over a longer one the reader jumps.
- Every place asked for is either handed out or listed in `missing`: an offset that the log does not have never blocks.
- Between two fetches the reader has no partition: what is stored meanwhile is not fetched in vain.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from time import monotonic

from schemas.errors import RoseError
from topics.reader import Reader
from topics.records import EndOfPartition, Envelope, Place

BATCH = 64
"""Records taken from librdkafka at once: under 60 MB."""

LOOK_SECONDS = 0.2
"""How long one look lasts; also how soon a stop is noticed."""

STALL_SECONDS = 60.0
"""Without a record for so long, the fetch is given up."""

FAR = 1_000
"""A gap of more records than this is jumped over: a jump costs a question to the broker, and what was fetched ahead."""


class FetchStalled(RoseError):
    """The broker does not send the records; to be tried again."""

    def __init__(self, left: int) -> None:
        super().__init__(f"{left} records did not come within {STALL_SECONDS:.0f} s: is the broker reachable?")


class Fetch:
    """Iterate for every record that is there, each partition in order; then see `missing`."""

    def __init__(
        self,
        reader: Reader,
        wanted: Mapping[Place, Sequence[int]],
        *,
        far: int = FAR,
        batch: int = BATCH,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """`reader` reports ends of partitions and is used for nothing else meanwhile. `stopped` is asked often.

        `batch`: records taken from the bus client at once.
        """
        self.missing: list[tuple[Place, int]] = []
        self.bytes_read = 0
        """Of the values of all records that came, wanted or passed over."""
        self._reader = reader
        self._far = far
        self._batch = batch
        self._stopped = stopped
        self._wanted = {place: sorted(set(offsets), reverse=True) for place, offsets in wanted.items()}

    def __iter__(self) -> Iterator[Envelope]:
        """Ends early when `stopped`. Raises TopicMissing, BusError or FetchStalled."""
        self._leave_out_what_is_gone()
        try:
            while self._wanted and not self._stopped():
                yield from self._read_on()
        finally:
            self._reader.assign({})

    def _leave_out_what_is_gone(self) -> None:
        for place, offsets in list(self._wanted.items()):
            partitions = self._reader.partitions(place[0])
            low, high = self._reader.watermarks(place) if place[1] < partitions else (0, 0)
            self.missing += [(place, offset) for offset in offsets if not low <= offset < high]
            offsets[:] = [offset for offset in offsets if low <= offset < high]
            self._drop_if_done(place)

    def _read_on(self) -> Iterator[Envelope]:
        """From the next wanted place of each partition, until every partition has a gap to jump or is done."""
        open_places = set(self._wanted)
        self._reader.assign({place: offsets[-1] for place, offsets in self._wanted.items()})
        deadline = monotonic() + STALL_SECONDS
        while open_places and not self._stopped():
            items = self._reader.read(self._batch, LOOK_SECONDS)
            if items:
                deadline = monotonic() + STALL_SECONDS
            elif monotonic() > deadline:
                raise FetchStalled(sum(map(len, self._wanted.values())))
            for item in items:
                self.bytes_read += 0 if isinstance(item, EndOfPartition) else len(item.raw.value or b"")
                place = item.topic, item.partition
                if place not in open_places:
                    continue
                if isinstance(item, EndOfPartition):
                    self.missing += [(place, offset) for offset in self._wanted.pop(place)]
                    open_places.discard(place)
                    continue
                if self._was_wanted(place, item.offset):
                    if isinstance(item, Envelope):
                        yield item
                    else:
                        self.missing.append((place, item.offset))
                if place not in self._wanted or self._wanted[place][-1] - item.offset > self._far:
                    open_places.discard(place)
                    self._reader.pause([place])  # what lies beyond is not fetched while others are read

    def _was_wanted(self, place: Place, offset: int) -> bool:
        """Whether this offset was asked for; what was asked for before it is missing."""
        offsets = self._wanted[place]
        while offsets and offsets[-1] < offset:
            self.missing.append((place, offsets.pop()))
        found = bool(offsets) and offsets[-1] == offset
        if found:
            offsets.pop()
        self._drop_if_done(place)
        return found

    def _drop_if_done(self, place: Place) -> None:
        if not self._wanted[place]:
            del self._wanted[place]
