"""Recordings of an observed server: a CSV file with a row for each `ROW_SECONDS`, which a simulation can read.

Keeps true
- Seconds are those since the row before; a restart of the server or of its observer loses the time in between, and
  counts no second twice.
- Rows are only appended, each with one write. What an interrupted write has left is removed before the next row.
- A file that is no recording is neither extended nor read.

Ten seconds a row make about half a megabyte a day.
"""

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from rose.schemas.errors import RoseError, UsageError
from rose.workers.executor.ipc.messages import ObservationReport

ROW_SECONDS = 10.0
"""Least observed time of a row."""


class Row(NamedTuple):
    """The load of a server in one interval. The fields are the columns of the file."""

    unix_seconds: float
    """End of the interval."""
    seconds: float
    """Length of the interval."""
    idle_seconds: float
    """Part of the interval without a request."""
    running: int
    """Requests in steps at the end of the interval."""
    waiting: int
    kv_bytes_held: int
    """KV bytes of requests at the end of the interval."""
    kv_bytes_most: int
    """Most KV bytes of requests in the interval."""
    kv_bytes_total: int


HEADER = ",".join(Row._fields)


class Rows:
    """Makes rows of the totals that a server reports. Pure."""

    def __init__(self) -> None:
        self._before: ObservationReport | None = None
        self._most = 0

    def on_report(self, report: ObservationReport, unix_seconds: float) -> Row | None:
        """Return a row if the row before is long enough ago; none for the first report of a server."""
        before = self._before
        if before is None or report.seconds < before.seconds:
            self._before, self._most = report, 0
            return None
        self._most = max(self._most, report.kv_bytes_most)
        seconds = report.seconds - before.seconds
        if seconds < ROW_SECONDS:
            return None
        row = Row(
            unix_seconds=unix_seconds,
            seconds=seconds,
            idle_seconds=min(seconds, report.idle_seconds - before.idle_seconds),
            running=report.running,
            waiting=report.waiting,
            kv_bytes_held=report.kv_bytes_held,
            kv_bytes_most=self._most,
            kv_bytes_total=report.kv_bytes_total,
        )
        self._before, self._most = report, 0
        return row


class Recording:
    """Appends rows to a file."""

    def __init__(self, file: Path, clock: Callable[[], float] = time.time) -> None:
        """`clock`: returns the Unix time. Raises UsageError if the file cannot be written or is no recording."""
        self._file = file
        self._clock = clock
        self._rows = Rows()
        prepare_recording(file)

    def on_report(self, report: ObservationReport) -> None:
        """Append a row if one is due. Raises RoseError if the file can no longer be written."""
        row = self._rows.on_report(report, self._clock())
        if row is None:
            return
        try:
            _append(self._file, encode_row(row))
        except OSError as error:
            raise RoseError(f"the recording {self._file} cannot be written: {error.strerror}") from error


def prepare_recording(file: Path) -> None:
    """Write the header of a new recording, or cut off an incomplete last row. Raises UsageError."""
    try:
        with file.open("a+b") as opened:
            opened.seek(0)
            first, header = opened.readline(), f"{HEADER}\n".encode()
            if first == header:
                opened.truncate(_end_of_rows(opened.seek(0, os.SEEK_END), file))
            elif first.endswith(b"\n") or not header.startswith(first):
                raise UsageError(f"--record {file} is a file of another kind: name a new file")
            else:
                opened.truncate(0)
                opened.write(header)
    except OSError as error:
        raise UsageError(
            f"--record {file} cannot be written ({error.strerror}): name a file in a folder that is there and may be "
            "written"
        ) from error


def encode_row(row: Row) -> str:
    """Return a row as a line of the file."""
    return ",".join(f"{each:.3f}" if isinstance(each, float) else str(each) for each in row) + "\n"


def read_recording(file: Path) -> list[Row]:
    """Read a recording. Raises UsageError, with the number of the line that is wrong."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"the recording {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise UsageError(f"the recording {file} is no text: give a file of `rose lend --observe --record`") from None
    if not lines or lines[0] != HEADER:
        raise UsageError(f"the recording {file}, line 1: the header must be {HEADER}")
    rows = list(_rows(file, lines))
    if not rows:
        raise UsageError(f"the recording {file} has no row: observe the server for longer than {ROW_SECONDS:g} s")
    return rows


def _rows(file: Path, lines: list[str]) -> Iterator[Row]:
    for number, line in enumerate(lines[1:], 2):
        row = _parse(line)
        problem = "it must have eight numbers" if row is None else _problem(row)
        if row is None or problem:
            raise UsageError(f"the recording {file}, line {number}: {problem}; remove the line, or record again")
        yield row


def _parse(line: str) -> Row | None:
    """Return the row of a line; None if it has other fields, or fields that are no numbers."""
    fields = line.split(",")
    if len(fields) != len(Row._fields):
        return None
    try:
        return Row(*map(float, fields[:3]), *map(int, fields[3:]))  # type: ignore[arg-type]
    except ValueError:
        return None


def _problem(row: Row) -> str:
    """Return what is wrong with a row; empty if nothing is."""
    if not 0.0 < row.seconds < MAX_SECONDS:
        return f"seconds is {row.seconds:g}, and must be above 0 and at most {MAX_SECONDS:g}"
    if not 0.0 <= row.idle_seconds <= row.seconds:
        return f"idle_seconds is {row.idle_seconds:g}, and must be from 0 to seconds ({row.seconds:g})"
    if min(row[3:]) < 0:
        return "requests and bytes must not be negative"
    if not row.kv_bytes_most <= row.kv_bytes_total or not row.kv_bytes_total:
        return "kv_bytes_most must be at most kv_bytes_total, which is above 0"
    if not 0.0 < row.unix_seconds < MAX_UNIX_SECONDS:
        return f"unix_seconds is {row.unix_seconds:g}, which is no time"
    return ""


MAX_SECONDS, MAX_UNIX_SECONDS = 86_400.0, 1e11
"""Longest interval, and latest time, of a row."""


def _end_of_rows(size: int, file: Path) -> int:
    """Return the size of the file without an incomplete last row."""
    with file.open("rb") as opened:
        opened.seek(max(0, size - MAX_LINE_BYTES))
        tail = opened.read()
    return size - len(tail) + tail.rfind(b"\n") + 1


MAX_LINE_BYTES = 4096
"""More than the header or a row has."""


def _append(file: Path, line: str) -> None:
    """Append a line, and the header before it if the file was moved away meanwhile.

    Raises OSError, also if there was room for a part of the line: the next row would follow that part.
    """
    with file.open("ab", buffering=0) as opened:
        written = line.encode() if opened.tell() else f"{HEADER}\n{line}".encode()
        if opened.write(written) < len(written):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
