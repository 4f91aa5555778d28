"""A temporary file of outcomes and of the samples of incomplete groups.

Keeps true
- Memory does not grow with the run: SQLite holds at most `CACHE_KIB`, the rest lies in a temporary file that the
  system removes with the process.
- The file holds every outcome (about 200 bytes each) and the samples of groups that are not complete yet.
- The first sample and the first outcome of a trajectory count.
"""

import sqlite3
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import msgspec

from rose.schemas.errors import RoseError
from rose.schemas.samples import Sample, SampleOutcome

CACHE_KIB = 16 * 1024
"""Memory of SQLite's page cache, in KiB."""

TABLES = """
CREATE TABLE outcomes (trajectory TEXT PRIMARY KEY, record BLOB) WITHOUT ROWID;
CREATE TABLE samples (group_id TEXT, trajectory TEXT, record BLOB);
CREATE UNIQUE INDEX members ON samples (group_id, trajectory);
"""

P = ParamSpec("P")
T = TypeVar("T")

_encode = msgspec.msgpack.encode
_sample_of = msgspec.msgpack.Decoder(Sample).decode
_outcome_of = msgspec.msgpack.Decoder(SampleOutcome).decode


class StoreFailed(RoseError):
    """The temporary file cannot be written."""

    def __init__(self, error: sqlite3.Error) -> None:
        super().__init__(
            f"the temporary file of samples cannot be used ({error}): free some space, or set SQLITE_TMPDIR to another "
            "folder"
        )


class SampleStore:
    """Outcomes by trajectory, and samples by group, in a temporary file. Every method raises StoreFailed."""

    def __init__(self) -> None:
        self._file = sqlite3.connect("", isolation_level=None)  # a temporary file of SQLite's own
        self._file.executescript(
            f"PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -{CACHE_KIB};{TABLES}"
        )

    def add_outcome(self, outcome: SampleOutcome) -> None:
        """Keep an outcome, unless its trajectory has one."""
        self._run(
            self._file.execute,
            "INSERT OR IGNORE INTO outcomes VALUES (?, ?)",
            (outcome.trajectory_id, _encode(outcome)),
        )

    def outcome_of(self, trajectory_id: str) -> SampleOutcome | None:
        """Return the outcome of a trajectory; None if there is none."""
        found = self._run(
            self._file.execute, "SELECT record FROM outcomes WHERE trajectory = ?", (trajectory_id,)
        ).fetchone()
        return None if found is None else _outcome_of(found[0])

    def add_sample(self, sample: Sample) -> int:
        """Keep a sample, unless its trajectory has one, and return the number of samples of its group."""
        self._run(
            self._file.execute,
            "INSERT OR IGNORE INTO samples VALUES (?, ?, ?)",
            (sample.group_id, sample.trajectory_id, _encode(sample)),
        )
        counted = self._run(
            self._file.execute, "SELECT COUNT(*) FROM samples WHERE group_id = ?", (sample.group_id,)
        ).fetchone()
        return int(counted[0])

    def take_group(self, group_id: str) -> list[Sample]:
        """Return the samples of a group and forget them."""
        found = self._run(self._file.execute, "SELECT record FROM samples WHERE group_id = ?", (group_id,)).fetchall()
        self._run(self._file.execute, "DELETE FROM samples WHERE group_id = ?", (group_id,))
        return [_sample_of(record) for (record,) in found]

    def groups(self) -> Iterator[str]:
        """Yield the groups that have samples, in the order of their names. Groups may be taken meanwhile."""
        last = ""
        while True:
            found = self._run(
                self._file.execute,
                "SELECT group_id FROM samples WHERE group_id > ? ORDER BY group_id LIMIT 1",
                (last,),
            ).fetchone()
            if found is None:
                return
            last = found[0]
            yield last

    def close(self) -> None:
        """Remove the file."""
        self._file.close()

    @staticmethod
    def _run(action: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return action(*args, **kwargs)
        except sqlite3.Error as error:
            raise StoreFailed(error) from error
