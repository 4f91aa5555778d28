"""Runs storms with different seeds, and checks that the conservation law holds and no role stalls.

    python -m bench.storm --seeds 20                      on the embedded broker
    KAFKA_HOME=... python -m bench.storm --seeds 20       on three nodes of Apache Kafka, which are killed too

    KAFKA_HOME=... python -m bench.storm --leaves 30      thirty workers are asked to leave, and nothing else is done

`tests/support/storm/plan.py` defines a storm. One executor is a lending server under a control app, which also moves
executors if there are several cells. The result of each storm goes to standard error when it ends, the results of all
storms to standard output. `--json FILE` writes one object with `checks` and every storm's figures. The journal and the
logs, including the broker's, are kept if a storm misses a bound. Exit status 1 if a check is missed.
"""

import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from bench.check import Check, keep, options, say
from rose.topics.local_broker import start_broker
from tests.support.kafka_cluster import start_cluster
from tests.support.storm.plan import draw
from tests.support.storm.run import LEAST_ASKED, MOST_STALL_SECONDS, Report, blow
from tests.support.storm.shape import Shape, leaving
from tests.support.storm.stalls import SESSION_SECONDS

NODES = 3
LENDERS = 1


def storm(seed: int, shape: Shape, *, leaves: int) -> Report:
    """Run one storm on its own broker; its folder is kept if the storm misses a bound."""
    folder = Path(tempfile.mkdtemp(prefix=f"rose-storm-{seed}-"))
    data = folder / "broker"
    cluster = start_cluster(data, kafka_home=Path(os.environ["KAFKA_HOME"]), nodes=NODES) if shape.nodes else None
    with cluster or start_broker(data) as broker:
        report = blow(folder / "roles", draw(seed, shape), broker)
    missed = [check for check in checks_of([report], leaves=leaves) if not check.met]
    if missed:
        for words in list(data.rglob("broker.log")):
            words.rename(folder / f"{words.parent.name}.log")
        say(f"{len(missed)} bounds missed: {folder} is kept")
    shutil.rmtree(data if missed else folder)
    return report


def checks_of(reports: list[Report], *, leaves: int) -> list[Check]:
    """Return the bounds on all storms together. `leaves`: number of workers that each storm asks to leave."""
    faults = sum(sum(report.faults.values()) for report in reports)
    stall = max(report.stall_seconds for report in reports)
    against = f"{len(reports)} storms, {faults} faults"
    unclean = sum(bool(report.breaches) for report in reports)
    checks = [
        Check("storms not clean", unclean, "", 0, "max", against),
        Check("longest stall", stall, "s", MOST_STALL_SECONDS, "max", against),
    ]
    return checks + _checks_of_leaving(reports, leaves) if leaves else checks


def _checks_of_leaving(reports: list[Report], leaves: int) -> list[Check]:
    """Check that all workers leave with status 0, and that no role waits too long for a worker that left."""
    left = sum((report.left for report in reports), Counter())
    against = f"{left.total()} that left, those at the end among them"
    fewest = min(report.asked_to_leave for report in reports)
    return [
        Check(
            "asked to leave while it blew",
            fewest,
            "",
            LEAST_ASKED * leaves,
            "min",
            f"the fewest of {len(reports)} storms",
        ),
        Check("left otherwise than with status 0", left.total() - left[0], "", 0, "max", against),
        Check("attempts that failed", max(report.attempts_at_fault for report in reports), "", 0, "max", against),
        *(
            Check(f"longest wait for the {role.value}", seconds, "s", SESSION_SECONDS[role], "max", against)
            for role in reports[0].waits
            for seconds in [max(report.waits.get(role, 0.0) for report in reports)]
        ),
    ]


def figures_of(report: Report) -> dict[str, Any]:
    """Return the figures of one storm for JSON."""
    counts = {"faults": report.faults, "crashes": report.crashes, "outcomes": report.outcomes}
    plain = {name: getattr(report, name) for name in ("seed", "seconds", "turns", "repeated", "dropped", "letters")}
    return {
        **plain,
        **{name: dict(count) for name, count in counts.items()},
        "left_with_status": {str(status): many for status, many in report.left.items()},
        "trajectories": report.trajectories,
        "longest_stall_seconds": report.stall_seconds,
        "longest_waits_seconds": {role.value: seconds for role, seconds in report.waits.items()},
        "breaches": report.breaches,
    }


def show(reports: list[Report], checks: list[Check]) -> None:
    """Print the results of all storms."""
    faults = sum((report.faults for report in reports), Counter())
    outcomes = sum((report.outcomes for report in reports), Counter())
    print(f"{len(reports)} storms, {sum(not report.breaches for report in reports)} clean")
    print(f"  {sum(faults.values())} faults: {', '.join(f'{n} {name}' for name, n in sorted(faults.items()))}")
    print(f"  outcomes: {', '.join(f'{n} {name}' for name, n in sorted(outcomes.items()))}")
    turns, repeated = sum(report.turns for report in reports), sum(report.repeated for report in reports)
    dropped = sum(report.dropped for report in reports)
    print(f"  {turns} turns, {repeated} repeated, {dropped} results dropped")
    for check in checks:
        print(f"  {check}")


def main() -> None:
    """Run the storms; see the module."""
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="storms, one after another")
    parser.add_argument("--first", type=int, default=None, metavar="SEED", help="first seed; random if not given")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="rounds of faults in each storm")
    parser.add_argument("--sandboxes", action="store_true", help="run one in four groups in sandboxes")
    parser.add_argument("--leaves", type=int, default=0, metavar="N", help="only ask this many workers to leave")
    parser.add_argument("--cells", type=int, default=1, metavar="N", help="number of cells")
    arguments = parser.parse_args()
    nodes = NODES if "KAFKA_HOME" in os.environ else 0
    if arguments.leaves and not nodes:
        parser.error("--leaves needs Apache Kafka: set KAFKA_HOME")
    if arguments.leaves:
        shape = leaving(arguments.leaves)
    else:
        cells = arguments.cells
        shape = Shape(
            nodes=nodes,
            lenders=LENDERS,
            control=1,
            cells=cells,
            rounds=arguments.rounds,
            sandboxes=arguments.sandboxes,
        )
    first = random.SystemRandom().randrange(2**20) if arguments.first is None else arguments.first
    reports = []
    for seed in range(first, first + arguments.seeds):
        say(f"seed {seed}")
        reports.append(storm(seed, shape, leaves=arguments.leaves))
        say(str(reports[-1]))
    checks = checks_of(reports, leaves=arguments.leaves)
    if not keep({"checks": checks, "storms": [figures_of(report) for report in reports]}, arguments.json):
        show(reports, checks)
    sys.exit(not all(check.met for check in checks))


if __name__ == "__main__":
    main()
