"""A figure of a benchmark with its bound, and the output of a benchmark.

Keeps true
- `--json -` writes one JSON object to standard output and nothing else; progress goes to standard error (`say`).
- A file that cannot be written is refused before anything is measured.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rose.pipeline.config.options import is_writable


@dataclass(frozen=True)
class Check:
    """One figure and its bound."""

    name: str
    value: float
    unit: str
    bound: float
    direction: str
    """`min`: the value must be at least the bound; `max`: at most."""
    against: str
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.direction == "min" else self.value <= self.bound

    def __str__(self) -> str:
        relation = "at least" if self.direction == "min" else "at most"
        verdict = "met" if self.met else "MISSED"
        details = ", ".join(f"{name} {value}" for name, value in self.details.items())
        digits = 2 if abs(self.value) >= 10 else 4  # a missed bound of 0.1 must not be printed as 0.10
        return (
            f"{self.name:10} {self.value:12,.{digits}f} {self.unit} ({relation} {self.bound:,g}: {verdict}); {details}"
        )


@dataclass
class Section:
    """A part of a benchmark: its table with one row for each measured thing, and its checks."""

    name: str
    rows: list[dict[str, float | str]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)


def options(about: str | None) -> argparse.ArgumentParser:
    """Return the command line parser of a benchmark, with `--json` only.

    `about` is the benchmark's module docstring.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--json", type=_output, metavar="FILE", help="also write the result as JSON; - is standard output"
    )
    return parser


def writable(file: str) -> Path:
    """Return the path of an output file. Raises ArgumentTypeError if it cannot be written."""
    if not is_writable(Path(file)):
        raise argparse.ArgumentTypeError(f"{file} cannot be written: name a file in a folder that is there")
    return Path(file)


def _output(file: str) -> str:
    return file if file == "-" else str(writable(file))


def say(text: str) -> None:
    """Print progress to standard error: standard output is for the result."""
    print(text, file=sys.stderr, flush=True)


def keep(result: Mapping[str, Any], file: str | None) -> bool:
    """Write a result to the file that `--json` names.

    Return whether that is standard output, which then must have no other text.
    """
    wire = msgspec.json.format(msgspec.json.encode(result, enc_hook=float), indent=2) + b"\n"
    if file == "-":
        sys.stdout.write(wire.decode())
    elif file:
        Path(file).write_bytes(wire)
    return file == "-"


def tell(checks: Sequence[Check], *, broker: str, file: str | None) -> None:
    """Print the checks that were measured on a broker, and write them to the file that `--json` names."""
    if not keep({"broker": broker, "cores": os.cpu_count(), "checks": checks}, file):
        print(f"broker: {broker}, {os.cpu_count()} cores")
        print(*checks, sep="\n")
