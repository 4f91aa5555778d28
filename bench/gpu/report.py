"""What a check found: rows and figures with bounds, written as soon as they are there."""

import math
from pathlib import Path
from typing import Any

import msgspec

from bench.check import Check


class Unavailable(Exception):
    """This machine lacks what the check measures."""


class Report:
    """Writes the rows and figures of one check as JSON lines, so that a check that is stopped keeps what it found."""

    def __init__(self, file: Path, *, dry: bool) -> None:
        """`dry`: whether the check runs on a CPU with tiny sizes."""
        self.dry = dry
        self._file = file

    def row(self, **row: Any) -> None:
        """Write what was measured of one thing."""
        self.write(row={name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()})

    def check(self, name: str, value: float, unit: str, bound: float, against: str) -> None:
        """Write a figure that may be at most `bound`. Raises ValueError if it is no number."""
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}")
        self.write(check=Check(name, float(value), unit, bound, "max", against))

    def write(self, **line: Any) -> None:
        """Write one line. The names are `row`, `check`, `device`, `unavailable`, `error` and `done`."""
        with self._file.open("ab") as file:
            file.write(msgspec.json.encode(line, enc_hook=str) + b"\n")
