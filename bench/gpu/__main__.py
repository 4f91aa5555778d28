"""The command line of the checks on a GPU: `python -m bench.gpu`."""

import os
import sys
from argparse import ArgumentTypeError
from pathlib import Path

from bench.check import keep, options, say, writable
from bench.gpu import __doc__ as about
from bench.gpu.catalog import CHECKS
from bench.gpu.runner import GOOD, run_checks


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in CHECKS]:
        raise ArgumentTypeError(f"there is no check {unknown[0]}: name some of {','.join(CHECKS)}")
    return names


def main() -> int:
    """Run the checks. Return 1 if a check failed, missed a bound or had no time."""
    parser = options(about)
    parser.add_argument("--only", type=_names, default=list(CHECKS), metavar="A,B", help="run only these checks")
    parser.add_argument("--seconds", type=float, default=440, help="limit of the whole run (440)")
    parser.add_argument("--dry-run", action="store_true", help="run tiny sizes on the CPU; no bound counts")
    parser.add_argument(
        "--results", type=writable, default=Path("gpu-results.jsonl"), metavar="FILE",
        help="append each result to this file, and skip the checks that have one there (gpu-results.jsonl)",
    )  # fmt: skip
    given = parser.parse_args()
    found = run_checks(CHECKS, given.only, results=given.results, seconds=given.seconds, dry=given.dry_run)
    results = [found[name] for name in given.only if name in found]
    checks = [check for result in results for check in result.checks]
    device = next((result.device for result in results if result.device), "none")
    keep({"device": device, "cores": os.cpu_count(), "checks": checks, "results": results}, given.json)
    missing = [name for name in given.only if name not in found or found[name].state not in GOOD]
    missed = [] if given.dry_run else [check.name for check in checks if not check.met]
    say(f"{device}: {len(results)} checks; without a result: {' '.join(missing)}; bounds missed: {' '.join(missed)}")
    return 1 if missing or missed else 0


if __name__ == "__main__":
    sys.exit(main())
