"""Where the chunks of a version are put: on the log, or in a file of the anchor store.

Keeps true: once `close` has returned, every chunk that was put is there to be read at the place that it was given.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from schemas.limits import MAX_RECORD_BYTES, RECORD_OVERHEAD_BYTES
from schemas.weights import MAX_CHUNK_PARTITIONS, ChunkRef, FirstChunk, WeightChunk
from topics.catalog import CHUNKS
from topics.writer import Writer
from workers.weights.digests import digest_of

CHUNK_BYTES = MAX_RECORD_BYTES - RECORD_OVERHEAD_BYTES
"""Largest payload of a chunk: with names and ids it stays within a record's limit."""

WAITING_BYTES = 16 * 2**20
"""Of chunks handed to the bus client and not stored yet, at most: an anchor over a slow uplink fills no memory."""


@dataclass(slots=True)
class Stored:
    """A chunk on its way: where it lies is known after `close`."""

    size: int
    digest: bytes
    partition: int = -1
    offset: int = -1

    def at(self, partition: int, offset: int) -> None:
        self.partition, self.offset = partition, offset

    def ref(self) -> ChunkRef:
        return ChunkRef(partition=self.partition, offset=self.offset, bytes=self.size, digest=self.digest)


def lowest_offsets(chunks: Iterable[ChunkRef | FirstChunk]) -> dict[int, int]:
    """The lowest offset of each partition that some of these lie in."""
    lowest: dict[int, int] = {}
    for chunk in chunks:
        lowest[chunk.partition] = min(chunk.offset, lowest.get(chunk.partition, chunk.offset))
    return lowest


class Shelf(Protocol):
    """Takes the chunks of one version after the other, or of one version."""

    @property
    def files(self) -> tuple[str, ...]:
        """What the manifest names as its files: none on the log."""
        ...

    def put(self, chunk: WeightChunk) -> Stored:
        """Raises BusError or StoreError."""
        ...

    def close(self) -> None:
        """Wait until all is stored. Raises BusError or StoreError."""
        ...


def put_payload(shelf: Shelf, payload: bytes, *, model_id: str, version: int, tensor: str) -> list[Stored]:
    """Put a payload in chunks on the shelf. Raises BusError or StoreError."""
    return [
        shelf.put(
            WeightChunk(
                model_id=model_id,
                version=version,
                tensor=tensor,
                part=part,
                payload=payload[start : start + CHUNK_BYTES],
            )
        )
        for part, start in enumerate(range(0, len(payload), CHUNK_BYTES))
    ]


class LogShelf:
    """The chunks topic; partitions take turns, so that a receiver fetches from all at once."""

    files: tuple[str, ...] = ()

    def __init__(self, writer: Writer, partitions: int) -> None:
        self._writer = writer
        self._partitions = min(partitions, MAX_CHUNK_PARTITIONS)  # a manifest says where its chunks begin in each
        self._written = 0
        self._waiting_bytes = 0

    def put(self, chunk: WeightChunk) -> Stored:
        stored = Stored(len(chunk.payload), digest_of(chunk.payload))
        place = self._written % self._partitions
        self._written += 1
        self._writer.write(CHUNKS, chunk, key=chunk.tensor, partition=place, on_delivery=stored.at)
        self._waiting_bytes += stored.size
        if self._waiting_bytes >= WAITING_BYTES:
            self.close()
        return stored

    def close(self) -> None:
        self._writer.flush()
        self._waiting_bytes = 0
