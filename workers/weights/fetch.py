"""Chunks fetched by their places in the log.

Keeps true: every chunk asked for is either handed out or listed in `missing`; what lies at a place and is no chunk is
missing.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from threading import Event

from schemas.weights import ChunkRef, WeightChunk
from topics.catalog import CHUNKS
from topics.fetch import RecordFetch
from topics.reader import Reader

FAR = 8
"""A gap of more chunks than this is jumped over: so much the bus client has fetched ahead already."""

BATCH = 8
"""Chunks taken from the bus client at once: under 8 MB."""


class ChunkFetch:
    """Iterate for `(ref, chunk)` of every chunk that is there, each partition in order; then see `missing`."""

    def __init__(self, reader: Reader, refs: Iterable[ChunkRef], stop: Event) -> None:
        """`reader` reports ends of partitions and is used for nothing else meanwhile."""
        self.missing: list[ChunkRef] = []
        self._refs = {(ref.partition, ref.offset): ref for ref in refs}
        places: dict[int, list[int]] = defaultdict(list)
        for partition, offset in self._refs:
            places[partition].append(offset)
        wanted = {(CHUNKS, partition): offsets for partition, offsets in places.items()}
        self._fetch = RecordFetch(reader, wanted, jump_records=FAR, batch=BATCH, should_stop=stop.is_set)

    @property
    def bytes_read(self) -> int:
        """Of all chunks that came, wanted or passed over."""
        return self._fetch.bytes_read

    def __iter__(self) -> Iterator[tuple[ChunkRef, WeightChunk]]:
        """Ends early on `stop`. Raises BusError or FetchStalled."""
        for envelope in self._fetch:
            ref = self._refs[envelope.partition, envelope.offset]
            if isinstance(envelope.record, WeightChunk):
                yield ref, envelope.record
            else:  # a tombstone: somebody deleted it
                self.missing.append(ref)
        self.missing += [self._refs[partition, offset] for (_, partition), offset in self._fetch.missing]
