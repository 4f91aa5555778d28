"""Packs in a folder that all workers share: one folder for each sandbox, one file for each pack.

A *note* names the packs whose files have one content digest. It is written with the last of them, so that a state on
the log that is older than the save, but has that content, is restored from the packs.

Keeps true
- A file is there whole or not at all. A pack is used only if its digest is the one that was asked for, and a note only
  if its packs give the content that it is named by.
- A file belongs to the holder that is part of its name. A holder deletes only packs that a state on the log has
  replaced, and no other holder can have referred to since; so a holder that has lost its trajectory does no harm.
- The folder of a sandbox is deleted `keep_seconds` after its last holder has renewed it, and ENDED_SECONDS after its
  task has ended. Nothing else in the store's folder is deleted.
"""

import os
import re
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from rose.schemas.errors import UsageError
from rose.workers.environments.protocol import SnapshotError
from rose.workers.environments.sandbox.state import PackReference
from rose.workers.environments.sandbox.tree import digest_of

ENDED_SECONDS = 120.0
"""Time that the packs of an ended task are kept: its last step may be repeated, by a worker that takes it over."""

LINEAGE = re.compile("[0-9a-f]{32}")
"""Name of a sandbox's folder."""

MAX_PACK_BYTES = 1 << 30
"""Largest pack that is read."""


def contents(lineage: str, packs: list[PackReference], store: "PackStore | None") -> list[bytes]:
    """Contents of packs. Raises SnapshotError if one is missing, or is not the one that was saved."""
    found = []
    for pack in packs:
        if not pack.content and store is None:
            raise SnapshotError("its files are in a store: set environment.sandbox_store as on the other workers")
        content = pack.content or (store.get(lineage, pack) if store is not None else b"")
        if digest_of(content) != pack.digest:
            raise SnapshotError("a checkpoint of the sandbox is not the one that was saved")
        found.append(content)
    return found


class PackStore:
    """The packs of all sandboxes in one folder."""

    def __init__(self, folder: Path, keep_seconds: float) -> None:
        """`keep_seconds`: time that a sandbox without a holder is kept. Raises UsageError without the folder."""
        self._folder = folder
        self._keep_seconds = keep_seconds
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"environment.sandbox_store {folder}: {error.strerror}") from None

    def put(self, lineage: str, pack: PackReference) -> PackReference:
        """Store the content of a pack; returns a reference to it without the content. Raises OSError."""
        _write_whole(self._path(lineage, pack), pack.content)
        return PackReference(pack.digest, pack.holder)

    def put_note(self, lineage: str, content: bytes, packs: list[PackReference]) -> None:
        """Note that these stored packs give the files of a content digest. Raises OSError."""
        _write_whole(self._note(lineage, content), msgspec.msgpack.encode(packs))

    def noted(self, lineage: str, content: bytes) -> list[PackReference]:
        """The packs of a content digest; none if no save of it has ended."""
        try:
            return msgspec.msgpack.decode(self._note(lineage, content).read_bytes(), type=list[PackReference])
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return []

    def delete_note(self, lineage: str, content: bytes) -> None:
        """Delete a note."""
        self._note(lineage, content).unlink(missing_ok=True)

    def get(self, lineage: str, pack: PackReference) -> bytes:
        """Content of a stored pack. Raises SnapshotError if it is missing."""
        path = self._path(lineage, pack)
        try:
            if path.stat().st_size > MAX_PACK_BYTES:
                raise SnapshotError(f"the checkpoint {path} has more than {MAX_PACK_BYTES} bytes")
            return path.read_bytes()
        except OSError as error:
            raise SnapshotError(f"the checkpoint {path} cannot be read: {error.strerror}") from None

    def delete(self, lineage: str, packs: list[PackReference]) -> None:
        """Delete packs that no state on the log refers to any more."""
        for pack in packs:
            self._path(lineage, pack).unlink(missing_ok=True)

    def renew(self, lineage: str) -> None:
        """Note that the sandbox has a holder."""
        with suppress(OSError):
            os.utime(self._folder / lineage)

    def end(self, lineage: str) -> None:
        """Note that the sandbox's task has ended."""
        until = time.time() - self._keep_seconds + min(ENDED_SECONDS, self._keep_seconds)
        with suppress(OSError):
            os.utime(self._folder / lineage, (until, until))

    def sweep(self) -> int:
        """Delete the folders of sandboxes that have had no holder for long; returns their number."""
        deleted = 0
        for folder in self._folder.iterdir():
            if LINEAGE.fullmatch(folder.name) is None:  # the store may be a folder with other contents
                continue
            with suppress(OSError):
                if time.time() - folder.stat().st_mtime > self._keep_seconds:
                    shutil.rmtree(folder)
                    deleted += 1
        return deleted

    def _note(self, lineage: str, content: bytes) -> Path:
        return self._folder / lineage / f"{content.hex()}.note"

    def _path(self, lineage: str, pack: PackReference) -> Path:
        return self._folder / lineage / f"{pack.holder}-{pack.digest.hex()}"


def _write_whole(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    descriptor, written = tempfile.mkstemp(dir=path.parent, prefix="new-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(written).rename(path)
    except BaseException:
        Path(written).unlink(missing_ok=True)
        raise
