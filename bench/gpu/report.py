"""The report of a check: rows, and figures with bounds, each written as soon as it is measured."""

import importlib
import math
from pathlib import Path
from typing import Any

import msgspec

from bench.check import Check


class Unavailable(Exception):
    """This machine lacks a device or a package that the check measures."""


def require(module: str) -> Any:
    """Import a module that a machine may lack. Raises Unavailable."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Unavailable(f"{module} cannot be imported: {error}") from error


class Report:
    """Writes the rows and figures of one check as JSON lines, so that the results of a stopped check are kept."""

    def __init__(self, file: Path, *, dry: bool) -> None:
        """Write to `file`. `dry`: whether the check runs on a CPU with tiny sizes."""
        self.dry = dry
        self._file = file

    def row(self, **row: Any) -> None:
        """Write one row of measured values."""
        self.write(row={name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()})

    def check(self, name: str, value: float, unit: str, bound: float, against: str) -> None:
        """Write a figure that may be at most `bound`. Raises ValueError if the figure is not finite."""
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}")
        self.write(check=Check(name, float(value), unit, bound, "max", against))

    def write(self, **line: Any) -> None:
        """Write one line with one name: `row`, `check`, `device`, `unavailable`, `error` or `done`."""
        with self._file.open("ab") as file:
            file.write(msgspec.json.encode(line, enc_hook=str) + b"\n")
