"""Recordings of servers that were never observed: rows of 10 s, a busy share for each minute."""

from collections.abc import Sequence
from pathlib import Path

from rose.workers.lender.recording import HEADER, ROW_SECONDS, Row, encode_row

BEGAN = 1_800_000_000
"""A full minute of the Unix clock."""


def write_recording(file: Path, busy: Sequence[float], *, first_minute: int = 0, running: int = 1) -> Path:
    """Write a recording; return the file. `busy`: share of each minute, from `first_minute` after BEGAN."""
    rows = [
        Row(
            unix_seconds=BEGAN + 60.0 * minute + ROW_SECONDS * place,
            seconds=ROW_SECONDS,
            idle_seconds=ROW_SECONDS * (1.0 - share),
            running=running,
            waiting=0,
            kv_bytes_held=100,
            kv_bytes_most=round(1000 * share),
            kv_bytes_total=2000,
        )
        for minute, share in enumerate(busy, first_minute)
        for place in range(1, 7)
    ]
    file.write_text(HEADER + "\n" + "".join(map(encode_row, rows)))
    return file
