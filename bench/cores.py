"""What a decision costs as the fleet grows, beside the core of an earlier commit (`MEASURE`).

Each core replays a history in a process of its own. The core of MEASURE runs with the `bench/replay.py` of MEASURE. The
processes take turns, part by part, so that other load on the machine meets all cores alike. The median of the parts
counts, in processor time.
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
"""The commit whose core is the measure: the last commit before the packages moved under `rose`."""

FLEETS = {50: 2_500, 200: 10_000, 1_000: 40_000, 5_000: 100_000}
"""Workers, and the trajectories that are live at once."""

TURN_SECONDS = 0.5
"""Mean time from a dispatch to the request for the next turn, of the simulated fleet; as in `core`."""

SLOW_SECONDS = 4.0
"""The same where an executor says as many heartbeats as it is sent turns: they are a good part of the cost then."""

DECISIONS = 10_000
"""Of each part."""

PARTS = 9

SHARE = 0.95
"""Least decisions a second, as a share of the decisions of MEASURE with the same fleet."""

GROWTH = 1.3
"""Times the cost that a decision may take with ten times the workers."""

ROOT = Path(__file__).parents[1]


def scale() -> list[Check]:
    """Measure decisions a second beside MEASURE, and how their cost grows. Raises ValueError if MEASURE is not here."""
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
