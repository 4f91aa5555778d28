"""Measures how fast the simulator is, and that it repeats itself.

    python -m bench.simulation_speed

- `events`: events a minute of processor time on one core, in the smaller setting of ROSE's paper.
- `large`: minutes of processor time for one step of 5,000 GPUs (`large-5000.toml`).
- `same`: number of different results of two processes with the same seed, apart from the first. The processes have
  different seeds of Python's hashes.

`--json FILE` writes one object with `checks`. Exit status 1 if a bound is missed.
"""

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from bench.check import Check, keep, options, say
from rose.pipeline.simulation.fleet import Fleet
from rose.pipeline.simulation.scenario import Scenario, load_scenario

SCENARIOS = Path(__file__).parent / "scenarios"

SMALL, LARGE, ARM = "frozenlake-8b-grpo.toml", "large-5000.toml", "rose"

EVENTS_A_MINUTE, LARGE_MINUTES = 1_000_000, 10.0


def scenario_of(file: str) -> Scenario:
    """Return the arm `rose` of a scenario, with one step."""
    scenario = load_scenario(SCENARIOS / file)[ARM]
    return msgspec.structs.replace(scenario, training=msgspec.structs.replace(scenario.training, steps=1))


def run(file: str) -> tuple[Fleet, float]:
    """Simulate; return the fleet and the seconds of processor time."""
    began = time.process_time()
    fleet = Fleet(scenario_of(file))
    fleet.run()
    seconds = time.process_time() - began
    say(f"{file}: {fleet.events.handled:,} events, {fleet.events.now:.0f} simulated s, {seconds:.0f} s of a processor")
    return fleet, seconds


def digest_in_process(hash_seed: int) -> str:
    """Simulate the small scenario in another process; return the digest of its turns and samples."""
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed)}
    words = [sys.executable, "-m", "bench.simulation_speed", "--digest"]
    return subprocess.run(words, env=environment, check=True, capture_output=True, text=True).stdout


def digest(fleet: Fleet) -> str:
    """Return the digest of everything that was simulated."""
    settled = [(sample, outcome.value, step) for sample, outcome, step in fleet.trainer.figures.settled]
    return hashlib.sha256(msgspec.json.encode([fleet.rollout.turns, settled, fleet.events.handled])).hexdigest()


def main() -> None:
    """Run the benchmark; see the module."""
    parser = options(__doc__)
    parser.add_argument("--digest", action="store_true", help="print the digest of one run, and nothing else")
    arguments = parser.parse_args()
    small, seconds = run(SMALL)
    if arguments.digest:
        print(digest(small))
        return
    rate = 60 * small.events.handled / seconds
    large, large_seconds = run(LARGE)
    differ = len({digest_in_process(1), digest_in_process(2)}) - 1
    details = {"events": large.events.handled, "simulated_seconds": round(large.events.now)}
    checks = [
        Check("events", rate, "a minute", EVENTS_A_MINUTE, "min", SMALL, {"events": small.events.handled}),
        Check("large", large_seconds / 60, "minutes", LARGE_MINUTES, "max", LARGE, details),
        Check("same", differ, "", 0, "max", "the same seed"),
    ]
    if not keep({"checks": checks}, arguments.json):
        print(*checks, sep="\n")
    sys.exit(not all(check.met for check in checks))


if __name__ == "__main__":
    main()
