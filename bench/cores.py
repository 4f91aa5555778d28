"""Measures how the cost of a decision grows with the fleet, relative to the core of an earlier commit (`MEASURE`).

Each core replays a history in its own process. The core of MEASURE runs with the `bench/replay.py` of MEASURE. The
processes alternate part by part, so that other load on the machine affects all cores alike. The result is the median
over the parts, in processor time.
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

MEASURE = "2169c8a"
"""The commit of the reference core."""

FLEETS = {50: 2_500, 200: 10_000, 1_000: 40_000, 5_000: 100_000}
"""Number of workers, and the number of trajectories that are live at once."""

TURN_SECONDS = 0.5
"""Mean time of the simulated fleet from a dispatch to the request for the next turn; the same as in `core`."""

SLOW_SECONDS = 4.0
"""The same time for a fleet in which executors send as many heartbeats as they get turns: heartbeats are then a large
part of the cost."""

DECISIONS = 10_000
"""Number of decisions of each part."""

PARTS = 9

SHARE = 0.95
"""Least decisions a second, as a share of the decisions a second of MEASURE with the same fleet."""

GROWTH = 1.3
"""Largest factor by which the cost of a decision may grow with ten times the workers."""

ROOT = Path(__file__).parents[1]


def scale() -> list[Check]:
    """Measure decisions a second relative to MEASURE, and the growth of the cost.

    Raises ValueError if MEASURE is missing.
    """
    compared = [(workers, pace) for workers in (min(FLEETS), max(FLEETS)) for pace in (TURN_SECONDS, SLOW_SECONDS)]
    with ExitStack() as stack:
        measure = stack.enter_context(_tree())
        cores = {("before", *each): stack.enter_context(_core(measure, *each)) for each in compared}
        for each in dict.fromkeys([*compared, *((workers, TURN_SECONDS) for workers in FLEETS)]):
            cores["now", *each] = stack.enter_context(_core(ROOT, *each))
        for process in cores.values():
            _line(process)
        taken: dict[tuple[str, int, float], list[float]] = {name: [] for name in cores}
        for _ in range(PARTS):
            for name, process in cores.items():
                decisions, seconds = _answer(process, "next\n")
                taken[name].append(seconds / decisions)
    cost = {name: statistics.median(each) for name, each in taken.items()}
    shares = {each: cost["before", *each] / cost["now", *each] for each in compared}
    return [
        Check(
            name="core_beside_measure",
            value=round(min(shares.values()), 3),
            unit=f"of {MEASURE}",
            bound=SHARE,
            direction="min",
            against=f"decisions a second over those of {MEASURE} with the same fleet, the smallest share; interleaved",
            details={
                **{f"share_{workers}_turns_of_{pace}_s": round(each, 3) for (workers, pace), each in shares.items()},
                **{
                    f"decisions_{tree}_{workers}_{pace}": round(1 / each)
                    for (tree, workers, pace), each in cost.items()
                },
                "live_trajectories": list(FLEETS.values()),
                "parts": PARTS,
            },
        ),
        _growth([(workers, cost["now", workers, TURN_SECONDS]) for workers in FLEETS]),
    ]


def _growth(costs: Sequence[tuple[int, float]]) -> Check:
    """Check the growth over steps of at least ten times the workers: the growth of smaller steps is noise."""
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
    """Extract the code of MEASURE from the repository."""
    packed = subprocess.run(["git", "-C", str(ROOT), "archive", MEASURE], capture_output=True, check=False)
    if packed.returncode:
        raise ValueError(f"commit {MEASURE} is not in this repository: fetch its whole history (git fetch --unshallow)")
    with TemporaryDirectory(prefix="rose-bench-") as folder:
        with tarfile.open(fileobj=BytesIO(packed.stdout)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder)


@contextmanager
def _core(tree: Path, workers: int, turn_seconds: float = TURN_SECONDS) -> Iterator[subprocess.Popen[str]]:
    """Start a core of this tree.

    It writes a line once it has replayed everything before the parts, which takes minutes, so that other cores can be
    started at the same time.
    """
    arguments = [str(number) for number in (workers, FLEETS[workers], turn_seconds, DECISIONS, PARTS)]
    with subprocess.Popen(
        [sys.executable, "-P", str(tree / "bench" / "replay.py"), *arguments],
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
