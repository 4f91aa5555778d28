"""Large anchors live beside the log: one file a version and rank, in a folder or bucket that all can reach.

Keeps true
- A receiver reads from the store of its own configuration alone: a manifest names files, never places.
- What is read is believed chunk by chunk, by the digests of the manifest, as from the log.
- A file is whole before a manifest names it, and is never written again.
- Only files that are named are deleted: what else lies in the store is another run's, or somebody's.
- Whatever a driver raises comes out as StoreError.
"""

import hashlib
import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event
from typing import Any

import fsspec

from schemas.errors import RoseError, UsageError
from schemas.weights import ChunkRef, WeightChunk
from workers.weights.config import WeightsConfig
from workers.weights.digests import digest_of
from workers.weights.shelves import Stored


class StoreError(RoseError):
    """The store does not take or give what it should; to be tried again."""


class AnchorStore:
    """A path or URL (fsspec's: `s3://bucket/folder`, `file:///folder`, a plain path) with the files of anchors."""

    def __init__(self, url: str) -> None:
        """Raises UsageError for a URL that nothing here can open."""
        try:
            self._files, self._root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise UsageError(f"the anchor store {url} cannot be opened: {error}") from None
        self.url = url

    def create(self, model_id: str, run: str, version: int) -> "FileShelf":
        """A new file for an anchor; the name tells runs apart. Raises StoreError."""
        of_run = hashlib.blake2b(run.encode(), digest_size=8).hexdigest()
        name = f"anchor-{model_id}.{of_run}.{version}.{secrets.token_hex(8)}"
        with _told(f"the anchor store {self.url} cannot be written"):
            self._files.makedirs(self._root, exist_ok=True)
            return FileShelf(name, self._files.open(self._path(name), "wb"))

    def fetch(self, files: Sequence[str], refs: Iterable[ChunkRef], stop: Event) -> Iterator[tuple[ChunkRef, bytes]]:
        """What lies at each place that is there, file by file; ends early on `stop`. Raises StoreError."""
        by_file: dict[str, list[ChunkRef]] = defaultdict(list)
        for ref in sorted(refs, key=lambda ref: ref.offset):
            if ref.partition < len(files):
                by_file[files[ref.partition]].append(ref)
        for name, wanted in by_file.items():
            with _told(f"the anchor store {self.url} cannot be read"):
                try:
                    file = self._files.open(self._path(name), "rb")
                except FileNotFoundError:
                    continue
                with file:
                    for ref in wanted:
                        if stop.is_set():
                            return
                        file.seek(ref.offset)
                        yield ref, file.read(ref.bytes)

    def delete(self, files: Iterable[str]) -> None:
        """Delete these files; one that is not there is no failure. Raises StoreError."""
        with _told(f"the anchor store {self.url} cannot be cleaned"):
            for name in files:
                try:
                    self._files.rm_file(self._path(name))
                except FileNotFoundError:
                    continue

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


class FileShelf:
    """Chunks one after the other in one file; their places are bytes in it."""

    def __init__(self, name: str, file: Any) -> None:
        self.files: tuple[str, ...] = (name,)
        self._file = file
        self._size = 0

    def put(self, chunk: WeightChunk) -> Stored:
        stored = Stored(len(chunk.payload), digest_of(chunk.payload), partition=0, offset=self._size)
        with _told("an anchor cannot be written"):
            self._file.write(chunk.payload)
        self._size += stored.size
        return stored

    def close(self) -> None:
        with _told("an anchor cannot be written"):
            self._file.close()


@contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # each driver has exceptions of its own
        raise StoreError(f"{what}: {error}") from error


def store_of(config: WeightsConfig) -> AnchorStore | None:
    """The store that a configuration names, if it names one. Raises UsageError for one that nothing here can open."""
    return AnchorStore(config.store) if config.store else None
