"""A figure of a benchmark, the bound that it is held against, and how a benchmark tells what it found.

Keeps true
- What `--json -` puts on standard output is one JSON object and nothing else; progress goes to standard error (`say`).
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
    """One figure and the bound it is held against."""

    name: str
    value: float
    unit: str
    bound: float
    direction: str
    """`min`: at least the bound; `max`: at most."""
    against: str
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.direction == "min" else self.value <= self.bound

    def __str__(self) -> str:
        relation = "at least" if self.direction == "min" else "at most"
        verdict = "met" if self.met else "MISSED"
        details = ", ".join(f"{name} {value}" for name, value in self.details.items())
        digits = 2 if abs(self.value) >= 10 else 4  # 0.10 of at most 0.1, and missed, would tell nobody why
        return (
            f"{self.name:10} {self.value:12,.{digits}f} {self.unit} ({relation} {self.bound:,g}: {verdict}); {details}"
        )


@dataclass
class Section:
    """A part of a benchmark: its table, a row for each thing measured, and its checks."""

    name: str
    rows: list[dict[str, float | str]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)


def options(about: str | None) -> argparse.ArgumentParser:
    """The command line of a benchmark, so far `--json` alone. `about`: what its module says of itself."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--json", type=_writable, metavar="FILE", help="also write the result as JSON; - is standard output"
    )
    return parser


def _writable(file: str) -> str:
    if file != "-" and not is_writable(Path(file)):
        raise argparse.ArgumentTypeError(f"{file} cannot be written: name a file in a folder that is there")
    return file


def say(text: str) -> None:
    """Progress: standard output is the result's."""
    print(text, file=sys.stderr, flush=True)


def keep(result: Mapping[str, Any], file: str | None) -> bool:
    """Write a result where `--json` says; whether that is standard output, which then has nothing for people."""
    wire = msgspec.json.format(msgspec.json.encode(result, enc_hook=float), indent=2) + b"\n"
    if file == "-":
        sys.stdout.write(wire.decode())
    elif file:
        Path(file).write_bytes(wire)
    return file == "-"


def tell(checks: Sequence[Check], *, broker: str, file: str | None) -> None:
    """Print what was measured on a broker, and keep it where `--json` says."""
    if not keep({"broker": broker, "cores": os.cpu_count(), "checks": checks}, file):
        print(f"broker: {broker}, {os.cpu_count()} cores")
        print(*checks, sep="\n")
