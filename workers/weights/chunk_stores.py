"""Stores for the chunks of a version: the log, or a file in the anchor store (a folder or bucket outside of the log).

Keeps true: once `close` has returned, every chunk can be read at the position that `put` gave it.
"""

import hashlib
import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from typing import Any, Protocol

import fsspec

from rose.schemas.errors import RoseError, UsageError
from rose.schemas.limits import MAX_RECORD_BYTES, RECORD_OVERHEAD_BYTES
from rose.schemas.weights import MAX_CHUNK_PARTITIONS, ChunkRef, FirstChunk, WeightChunk
from rose.topics.catalog import CHUNKS
from rose.topics.writer import Writer
from rose.workers.weights.config import WeightsConfig
from rose.workers.weights.layout import digest_of


class StoreError(RoseError):
    """The anchor store failed; the operation may be tried again."""


CHUNK_BYTES = MAX_RECORD_BYTES - RECORD_OVERHEAD_BYTES
"""Largest payload of a chunk. With names and ids, the record stays within the limit of a record."""

MAX_UNACKED_BYTES = 16 * 2**20
"""Most bytes of chunks that the bus client holds before they are stored, so that an anchor over a slow uplink does not
fill the memory."""


@dataclass(slots=True)
class StoredChunk:
    """A chunk that was put. Its position on the log is known after `close`."""

    size: int
    digest: bytes
    partition: int = -1
    offset: int = -1

    def set_position(self, partition: int, offset: int) -> None:
        """Set the chunk's position on the log; a delivery callback."""
        self.partition, self.offset = partition, offset

    def ref(self) -> ChunkRef:
        """The reference to the chunk for the manifest."""
        return ChunkRef(partition=self.partition, offset=self.offset, bytes=self.size, digest=self.digest)


def lowest_offsets(chunks: Iterable[ChunkRef | FirstChunk]) -> dict[int, int]:
    """The lowest offset of these chunks in each partition."""
    lowest: dict[int, int] = {}
    for chunk in chunks:
        lowest[chunk.partition] = min(chunk.offset, lowest.get(chunk.partition, chunk.offset))
    return lowest


class ChunkSink(Protocol):
    """Takes the chunks of versions. The sink of the log takes any number of versions, that of a file one."""

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that the manifest must list; empty for the log."""
        ...

    def put(self, chunk: WeightChunk) -> StoredChunk:
        """Store a chunk. Raises BusError or StoreError."""
        ...

    def close(self) -> None:
        """Wait until all chunks are stored. Raises BusError or StoreError."""
        ...


def put_payload(sink: ChunkSink, payload: bytes, *, model_id: str, version: int, tensor: str) -> list[StoredChunk]:
    """Split a payload into chunks and put them into the sink. Raises BusError or StoreError."""
    return [
        sink.put(
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


class LogChunkSink:
    """Chunks on the log, spread over the partitions in turn so that a receiver fetches from all at once."""

    files: tuple[str, ...] = ()

    def __init__(self, writer: Writer, partitions: int) -> None:
        self._writer = writer
        self._partitions = min(partitions, MAX_CHUNK_PARTITIONS)  # a manifest lists the first chunk of each partition
        self._written = 0
        self._waiting_bytes = 0

    def put(self, chunk: WeightChunk) -> StoredChunk:
        """Write a chunk to the log. Raises BusError."""
        stored = StoredChunk(len(chunk.payload), digest_of(chunk.payload))
        place = self._written % self._partitions
        self._written += 1
        self._writer.write(CHUNKS, chunk, key=chunk.tensor, partition=place, on_delivery=stored.set_position)
        self._waiting_bytes += stored.size
        if self._waiting_bytes >= MAX_UNACKED_BYTES:
            self.close()
        return stored

    def close(self) -> None:
        """Wait until the broker has stored all chunks. Raises BusError."""
        self._writer.flush()
        self._waiting_bytes = 0


class AnchorStore:
    """The folder or bucket with the files of anchors.

    A path or an fsspec URL (`s3://bucket/folder`, `file:///folder`).
    """

    def __init__(self, url: str) -> None:
        """Raises UsageError if no installed driver opens the URL."""
        try:
            self._files, self._root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise UsageError(f"the anchor store {url} cannot be opened: {error}") from None
        self.url = url

    def create(self, model_id: str, run: str, version: int) -> "FileChunkSink":
        """Create a file for an anchor. Its name contains a digest of the run. Raises StoreError."""
        of_run = hashlib.blake2b(run.encode(), digest_size=8).hexdigest()
        name = f"anchor-{model_id}.{of_run}.{version}.{secrets.token_hex(8)}"
        with _store_errors(f"the anchor store {self.url} cannot be written"):
            self._files.makedirs(self._root, exist_ok=True)
            return FileChunkSink(name, self._files.open(self._path(name), "wb"))

    def fetch(self, files: Sequence[str], refs: Iterable[ChunkRef], stop: Event) -> Iterator[tuple[ChunkRef, bytes]]:
        """Yields the bytes of each reference whose file exists, file by file; ends early on `stop`.

        Raises StoreError.
        """
        by_file: dict[str, list[ChunkRef]] = defaultdict(list)
        for ref in sorted(refs, key=lambda ref: ref.offset):
            if ref.partition < len(files):
                by_file[files[ref.partition]].append(ref)
        for name, refs_of_file in by_file.items():
            with _store_errors(f"the anchor store {self.url} cannot be read"):
                try:
                    file = self._files.open(self._path(name), "rb")
                except FileNotFoundError:
                    continue
                with file:
                    for ref in refs_of_file:
                        if stop.is_set():
                            return
                        file.seek(ref.offset)
                        yield ref, file.read(ref.bytes)

    def delete(self, files: Iterable[str]) -> None:
        """Delete files; a missing file is no error. Raises StoreError."""
        with _store_errors(f"the anchor store {self.url} cannot be cleaned"):
            for name in files:
                try:
                    self._files.rm_file(self._path(name))
                except FileNotFoundError:
                    continue

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


class FileChunkSink:
    """Chunks in one file, one after another; their offsets are bytes in the file."""

    def __init__(self, name: str, file: Any) -> None:
        self.files: tuple[str, ...] = (name,)
        self._file = file
        self._size = 0

    def put(self, chunk: WeightChunk) -> StoredChunk:
        """Append a chunk to the file. Raises StoreError."""
        stored = StoredChunk(len(chunk.payload), digest_of(chunk.payload), partition=0, offset=self._size)
        with _store_errors("an anchor cannot be written"):
            self._file.write(chunk.payload)
        self._size += stored.size
        return stored

    def close(self) -> None:
        """Close the file. Raises StoreError."""
        with _store_errors("an anchor cannot be written"):
            self._file.close()


@contextmanager
def _store_errors(action: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # each fsspec driver has its own exceptions
        raise StoreError(f"{action}: {error}") from error


def open_store(config: WeightsConfig) -> AnchorStore | None:
    """The store that a configuration names, or None. Raises UsageError if no installed driver opens its URL."""
    return AnchorStore(config.store) if config.store else None
