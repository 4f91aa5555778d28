"""Run checks one after another, each in its own process, and keep their results.

Keeps true
- A check that raises, crashes or hangs is reported, and the next check runs.
- A result is in the results file before the next check begins. A check with a result in the file is run again only if
  it failed or reached its limit; such checks run after the checks without a result.
- Results of a dry run and results of a GPU do not count for each other.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from bench.check import Check, say
from bench.gpu.catalog import Entry

LEAST_SECONDS = 15.0
"""Least time for a check to begin; about half of this time is needed to load torch."""

KILLED_SECONDS = 10.0
"""Longest wait for the end of a killed process."""

GOOD = "done", "unavailable"
"""States after which a check is not run again. The other states are `failed` and `timeout`."""


@dataclass
class Result:
    """The result of one check."""

    name: str
    state: str
    seconds: float
    dry: bool
    device: str = ""
    reason: str = ""
    """Reason of every state except `done`."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)


def read_results(file: Path, *, dry: bool) -> dict[str, Result]:
    """Return the last result of each check in a results file; none if there is no file. Cut lines are skipped."""
    found = {}
    for line in file.read_bytes().splitlines() if file.exists() else ():
        try:
            result = msgspec.json.decode(line, type=Result)
        except msgspec.DecodeError:
            continue
        if result.dry == dry:
            found[result.name] = result
    return found


DRY_TIMES = 3
"""A CPU may take so many times the limit of a check."""


def run_checks(
    checks: Mapping[str, Entry], names: Iterable[str], *, results: Path, seconds: float, dry: bool
) -> dict[str, Result]:
    """Run the named checks that have no good result in the file yet; return all results by name.

    `seconds`: limit of the whole run.
    """
    found = read_results(results, dry=dry)
    wanted = [name for name in names if name not in found or found[name].state not in GOOD]
    end = time.monotonic() + seconds
    for name in sorted(wanted, key=lambda name: name in found):
        left = end - time.monotonic()
        if left < LEAST_SECONDS:
            say(f"{name}: not run, the time is over")
            continue
        say(f"{name}: {checks[name].function}")
        limit = checks[name].limit * (DRY_TIMES if dry else 1)
        found[name] = _run(name, checks[name], min(limit, left), results, dry)
        with results.open("ab") as file:
            file.write(msgspec.json.encode(found[name], enc_hook=str) + b"\n")
        say(_told(found[name]))
    return found


def _run(name: str, entry: Entry, limit: float, results: Path, dry: bool) -> Result:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    if dry:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch, results.with_suffix(".log").open("ab") as log:
        lines = Path(scratch) / "lines"
        log.write(f"== {name}\n".encode())
        log.flush()
        child = subprocess.Popen(
            [sys.executable, "-m", "bench.gpu.child", entry.function, str(lines), *(["--dry-run"] if dry else [])],
            stdout=log,
            stderr=log,
            env=environment,
            cwd=Path(__file__).parents[2],
            start_new_session=True,
        )
        status = _status(child, limit)
        result = Result(name, "failed", round(time.monotonic() - began, 1), dry)
        _read_lines(result, lines)
    if status is None:
        result.state, result.reason = "timeout", f"not done after {limit:.0f} s"
    elif result.state == "failed" and not result.reason:
        result.reason = f"its process ended with status {status}; {results.with_suffix('.log').name} has its output"
    return result


def _status(child: "subprocess.Popen[bytes]", limit: float) -> int | None:
    """Return the exit status; None if the process and its children were killed at the limit.

    The processes are also killed if this program is interrupted.
    """
    try:
        return child.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if child.returncode is None:
            os.killpg(child.pid, signal.SIGKILL)
            try:
                child.wait(KILLED_SECONDS)
            except subprocess.TimeoutExpired:
                say("a killed check does not end: the driver may hang")


def _read_lines(result: Result, lines: Path) -> None:
    """Add the lines that the check wrote to its result; the last line may be cut by a kill."""
    for line in lines.read_bytes().splitlines() if lines.exists() else ():
        try:
            ((kind, value),) = msgspec.json.decode(line, type=dict[str, Any]).items()
        except msgspec.DecodeError:
            continue
        if kind == "row":
            result.rows.append(value)
        elif kind == "check":
            result.checks.append(msgspec.convert(value, Check))
        elif kind == "device":
            result.device = value
        elif kind == "done":
            result.state = "done"
        else:
            result.reason = value
            result.state = "unavailable" if kind == "unavailable" else "failed"


def _told(result: Result) -> str:
    head = f"{result.name}: {result.state} after {result.seconds} s {result.reason}"
    rows = (", ".join(f"{name} {value}" for name, value in row.items()) for row in result.rows)
    return "\n  ".join([head, *rows, *map(str, result.checks)])
