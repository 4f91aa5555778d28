"""What a decision costs as the fleet grows, beside the core of a commit whose speed is the measure.

Each core replays its history in a process of its own, and that of the measure with the measure's own code. They take
turns, part by part, so that what else the machine does meets all alike; the median of the parts counts, in processor
time.
"""

import json
import os
import statistics
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from io import BytesIO
from math import log10
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.check import Check

MEASURE = "8c3726b"
"""The commit whose core is the measure."""

FLEETS = {50: 2_500, 200: 10_000, 1_000: 40_000, 5_000: 100_000}
"""Workers, and the trajectories that are live at once."""

TURN_SECONDS = 0.5
"""Mean time from a dispatch to the request for the next turn, of the simulated fleet; as in `core`."""

SLOW_SECONDS = 4.0
"""The same where an executor says as many heartbeats as it is sent turns: they are a good part of the cost then."""

DECISIONS = 10_000
"""Of each part."""

PARTS = 9

SHARE = 0.9
"""Of the measure's decisions with the smallest fleet, those with the largest."""

GROWTH = 1.3
"""Times the cost that a decision may take with ten times the workers."""

ROOT = Path(__file__).parents[1]


def scale() -> list[Check]:
    """Decisions a second with small and large fleets, and how their cost grows. Raises ValueError without MEASURE."""
    smallest, largest = min(FLEETS), max(FLEETS)
    with ExitStack() as stack:
        measure = stack.enter_context(_tree())
        cores = {f"{MEASURE} with {smallest}": stack.enter_context(_core(measure, smallest))}
        cores |= {str(workers): stack.enter_context(_core(ROOT, workers)) for workers in FLEETS}
        for tree, workers, name in ((measure, smallest, f"{MEASURE} "), (ROOT, largest, "")):
            cores[f"{name}slow {workers}"] = stack.enter_context(_core(tree, workers, SLOW_SECONDS))
        for process in cores.values():
            _line(process)
        taken: dict[str, list[float]] = {name: [] for name in cores}
        for _ in range(PARTS):
            for name, process in cores.items():
                decisions, seconds = _answer(process, "next\n")
                taken[name].append(seconds / decisions)
    cost = {name: statistics.median(each) for name, each in taken.items()}
    rates = {f"decisions_{name.replace(' ', '_')}": round(1 / seconds) for name, seconds in cost.items()}
    slow = cost[f"{MEASURE} slow {smallest}"] / cost[f"slow {largest}"]
    return [
        Check(
            name="core_scale",
            value=round(cost[f"{MEASURE} with {smallest}"] / cost[str(largest)], 3),
            unit=f"of {MEASURE}",
            bound=SHARE,
            direction="min",
            against=f"decisions a second with {largest} workers, over those of {MEASURE} with {smallest}; interleaved",
            details={
                "with_slow_turns": round(slow, 3),
                **rates,
                "live_trajectories": list(FLEETS.values()),
                "parts": PARTS,
            },
        ),
        _growth([(workers, cost[str(workers)]) for workers in FLEETS]),
    ]


def _growth(costs: Sequence[tuple[int, float]]) -> Check:
    """Over steps of ten times the workers and more: what is less of a step is not measured, but made by its noise."""
    grew = {
        f"{few}_to_{many}": round((dear / cheap) ** (1 / log10(many / few)), 3)
        for few, cheap in costs
        for many, dear in costs
        if many >= 10 * few
    }
    return Check(
        name="core_growth",
        value=max(grew.values()),
        unit="x",
        bound=GROWTH,
        direction="max",
        against="the cost of a decision with ten times the workers, the largest growth",
        details=grew,
    )


@contextmanager
def _tree() -> Iterator[Path]:
    """The code of MEASURE, out of the repository."""
    packed = subprocess.run(["git", "-C", str(ROOT), "archive", MEASURE], capture_output=True, check=False)
    if packed.returncode:
        raise ValueError(f"commit {MEASURE} is not in this repository: fetch its whole history (git fetch --unshallow)")
    with TemporaryDirectory(prefix="rose-bench-") as folder:
        with tarfile.open(fileobj=BytesIO(packed.stdout)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder)


@contextmanager
def _core(tree: Path, workers: int, turn_seconds: float = TURN_SECONDS) -> Iterator[subprocess.Popen[str]]:
    """A core of this tree, which says a line once it has heard all but the parts. That takes minutes, so others may be
    started meanwhile.
    """
    arguments = [str(number) for number in (workers, FLEETS[workers], turn_seconds, DECISIONS, PARTS)]
    with subprocess.Popen(
        [sys.executable, "-P", str(ROOT / "bench" / "replay.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(tree)},
        cwd=tree,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _answer(process: subprocess.Popen[str], line: str) -> tuple[int, float]:
    assert process.stdin is not None
    process.stdin.write(line)
    process.stdin.flush()
    decisions, seconds = json.loads(_line(process))
    return decisions, seconds


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()
