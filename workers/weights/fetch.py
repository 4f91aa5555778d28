"""Chunks fetched by their places in the log.

Keeps true
- Each partition is read once, forward, from the first wanted offset to the last; what lies between is passed over.
- Between two fetches the reader has no partition: what is stored meanwhile is not fetched in vain.
- Every chunk asked for is either handed out or listed in `missing`: an offset that the log does not have never blocks.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from threading import Event
from time import monotonic

from schemas.errors import RoseError
from schemas.weights import ChunkRef, WeightChunk
from topics.bus import EndOfPartition, Envelope, Reader
from topics.catalog import CHUNKS

BATCH = 64
"""Chunks taken from librdkafka at once: under 60 MB."""

LOOK_SECONDS = 0.2
"""How long one look lasts; also how soon a stop is noticed."""

STALL_SECONDS = 60.0
"""Without a record for so long, the fetch is given up."""


class FetchStalled(RoseError):
    """The broker does not send the chunks; to be tried again."""

    def __init__(self, left: int) -> None:
        super().__init__(f"{left} chunks did not come within {STALL_SECONDS:.0f} s: is the broker reachable?")


class ChunkFetch:
    """Iterate for `(ref, chunk)` of every chunk that is there, each partition in order; then see `missing`."""

    def __init__(self, reader: Reader, refs: Iterable[ChunkRef], stop: Event) -> None:
        """`reader` reports ends of partitions and is used for nothing else meanwhile."""
        self.missing: list[ChunkRef] = []
        self._reader = reader
        self._stop = stop
        self._wanted: dict[int, list[ChunkRef]] = defaultdict(list)  # by partition, the next one last
        for ref in sorted(refs, key=lambda ref: -ref.offset):
            self._wanted[ref.partition].append(ref)

    def __iter__(self) -> Iterator[tuple[ChunkRef, WeightChunk]]:
        """Ends early on `stop`. Raises BusError or FetchStalled."""
        self._begin()
        try:
            yield from self._read()
        finally:
            self._reader.assign({})

    def _read(self) -> Iterator[tuple[ChunkRef, WeightChunk]]:
        deadline = monotonic() + STALL_SECONDS
        while self._wanted and not self._stop.is_set():
            items = self._reader.read(BATCH, LOOK_SECONDS)
            if items:
                deadline = monotonic() + STALL_SECONDS
            elif monotonic() > deadline:
                raise FetchStalled(sum(map(len, self._wanted.values())))
            for item in items:
                if isinstance(item, EndOfPartition):
                    self.missing += self._wanted.pop(item.partition, [])
                elif (ref := self._match(item)) is not None:
                    assert isinstance(item.record, WeightChunk)
                    yield ref, item.record

    def _begin(self) -> None:
        partitions = self._reader.partitions(CHUNKS)
        for partition, refs in list(self._wanted.items()):
            low, high = self._reader.watermarks((CHUNKS, partition)) if partition < partitions else (0, 0)
            self.missing += [ref for ref in refs if not low <= ref.offset < high]
            refs[:] = [ref for ref in refs if low <= ref.offset < high]
            self._drop_if_done(partition)
        if self._wanted:
            self._reader.assign({(CHUNKS, partition): refs[-1].offset for partition, refs in self._wanted.items()})

    def _match(self, envelope: Envelope) -> ChunkRef | None:
        """What was wanted at the record's place, if anything; what was wanted before it is missing."""
        refs = self._wanted.get(envelope.partition)
        if refs is None:
            return None
        while refs and refs[-1].offset < envelope.offset:
            self.missing.append(refs.pop())
        ref = refs.pop() if refs and refs[-1].offset == envelope.offset else None
        self._drop_if_done(envelope.partition)
        if ref is not None and envelope.record is None:  # a tombstone: somebody deleted it
            self.missing.append(ref)
            return None
        return ref

    def _drop_if_done(self, partition: int) -> None:
        if not self._wanted[partition]:
            del self._wanted[partition]
