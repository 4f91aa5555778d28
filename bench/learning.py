"""Measures whether the policy learns: the demo over the bus, and the same algorithm in one plain process.

    python -m bench.learning --seeds 3                 the demo with three seeds, held-out success before and after
    python -m bench.learning --seeds 3 --reference     also the plain process on equal samples, curve by curve
    python -m bench.learning --seeds 0 --reference --lag 3    the plain process alone, on samples three versions old

Each demo is a `rose demo` in its own process, with the run `runs/learning-<seed>`; its output goes to standard error.
`--json FILE` writes one object with `checks` and the curves.
"""

import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

from bench.check import Check, keep, options, say
from bench.reference import Curve, Point, run_reference
from rose.pipeline.config.load import Config, load
from rose.pipeline.config.options import Common
from rose.pipeline.local.demo import CONFIGURATION
from rose.schemas.errors import RoseError

MOST_BEFORE, LEAST_AFTER = 0.40, 0.70
"""Largest held-out success before training, and least held-out success after training."""

CURVE_STEPS = 5
"""Number of training steps whose mean is one printed point of a curve."""


def configured(settings: list[str], seed: int) -> Config:
    """Return the demo's own configuration with these settings. Raises UsageError."""
    path = Path(str(files("rose.pipeline.local") / CONFIGURATION))
    run = Common(config=path, settings=settings)
    return load(run.with_overrides(seed=("run.seed", seed), name=("run.name", f"learning-{seed}")))


def over_the_bus(settings: list[str], seed: int) -> dict[str, Any]:
    """Run one demo; return its summary, with the mean reward of each step in `curve`."""
    folder = configured(settings, seed).run_folder
    flags = [flag for setting in settings for flag in ("--set", setting)]
    command = ["demo", "--name", folder.name, "--seed", str(seed), *flags]
    subprocess.run([sys.executable, "-m", "rose.pipeline.cli.main", *command], check=True, stdout=sys.stderr)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {**summary, "curve": [step["reward_mean"] for step in steps]}


def coarse(curve: list[float]) -> str:
    """Return a curve as one line of means over CURVE_STEPS steps."""
    parts = [curve[first : first + CURVE_STEPS] for first in range(0, len(curve), CURVE_STEPS)]
    return " ".join(f"{sum(part) / len(part):.2f}" for part in parts)


def show_step(point: Point) -> None:
    """Print one step of the plain process."""
    held_out = "" if point.held_out is None else f"  held out {point.held_out:.3f}"
    say(
        f"step {point.step:3d}  reward {point.reward:.3f}  turns {point.turns:.2f}  kl {point.kl_behaviour:.4f}"
        f"  {point.sampling_seconds:.2f} + {point.training_seconds:.2f} s{held_out}"
    )


def show(runs: list[dict[str, Any]], references: list[Curve]) -> None:
    """Print success before and after, and the curve, of every run."""
    print(f"mean reward in steps of {CURVE_STEPS}, and success on the held-out tasks at temperature 1")
    for run in runs:
        success = run["success"]
        print(f"  over the bus, seed {run['seed']}: {success['before']:.3f} -> {success['after']:.3f}", end="")
        print(f" of {success['n']} tasks in {run['seconds']:.0f} s;  {coarse(run['curve'])}")
    for curve in references:
        print(f"  plain process, seed {curve.seed}, lag {curve.lag}: {curve.before:.3f} -> {curve.after:.3f}", end="")
        print(f" of {curve.held_out_tasks} tasks;  {coarse([point.reward for point in curve.points])}")


def checks_of(runs: list[dict[str, Any]], references: list[Curve]) -> list[Check]:
    """Return the bounds on every demo; the plain process has no bounds."""
    plain = {curve.seed: curve.after for curve in references}
    checks = []
    for run in runs:
        seed, success = run["seed"], run["success"]
        beside = f"plain process: {plain[seed]:.3f}" if seed in plain else "held-out tasks at temperature 1"
        checks.append(Check(f"success_before_seed_{seed}", success["before"], "", MOST_BEFORE, "max", "held-out tasks"))
        checks.append(Check(f"success_after_seed_{seed}", success["after"], "", LEAST_AFTER, "min", beside))
    return checks


def main() -> None:
    """Run the benchmark; see the module."""
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="demos over the bus, with seeds 0 to N-1")
    parser.add_argument("--reference", action="store_true", help="also run the plain process with the same seeds")
    parser.add_argument("--lag", type=int, default=1, help="age of the plain process's samples, in policy versions")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="one setting")
    flags = parser.parse_args()
    if flags.lag < 0 or flags.seeds < 0:
        parser.error("--lag and --seeds must be at least 0")
    try:
        runs = [over_the_bus(flags.set, seed) for seed in range(flags.seeds)]
        seeds = range(max(flags.seeds, 1) if flags.reference else 0)
        references = [
            run_reference(configured(flags.set, seed).settings, lag=flags.lag, show=show_step) for seed in seeds
        ]
    except RoseError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_status)
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
    checks = checks_of(runs, references)
    if not keep({"checks": checks, "runs": runs, "reference": references}, flags.json):
        show(runs, references)
        print(*checks, sep="\n")


if __name__ == "__main__":
    main()
