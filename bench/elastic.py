"""Measures elasticity: one rollout with dedicated executors only, with whole workers moved in, and with ROSE.

    python -m bench.elastic --trace AzureLLMInferenceTrace_code.csv                   on the embedded broker
    KAFKA_HOME=... python -m bench.elastic --trace AzureLLMInferenceTrace_code.csv    on Apache Kafka

The fleet has 64 emulated executors (`bench.fleet`: the executor's contract on the real bus, with emulated compute), and
a real router, environment worker and control app. Half of the executors are dedicated. The other half serves users of a
real trace, replayed `--speed` times as fast. The delays of each arm are shortened in the same way. ROSE's own clocks
(heartbeats, summaries, one decision a second) are not shortened, which counts against ROSE.
- `fixed`: only the dedicated executors.
- `whole`: an allocator moves whole workers to the rollout. The users of such a worker go to the other workers, and the
  worker joins `--allocation-delay` seconds later. The allocator keeps as many serving workers as the users needed at
  most within the last delay, and takes workers back at once (`bench.fleet.users`). The default delay, 34 s, is the time
  to load the weights of a model of 30 billion parameters (ServerlessLLM, arXiv 2401.14351), without pod, image or
  compilation.
- `rose`: the control app writes grants, and lenders join and leave turn by turn and compute while they have no user. A
  guest is ready `--wake` seconds after its grant.
A second run with ROSE kills the control app in mid-run and measures how long its grants remain in force.

All arms have the same prompts, sampled tokens and users. Each arm first runs a few trajectories that are not counted:
processes are cold, and a control app without measurements expects a lender to take 20 s. `--json FILE` writes one
object with `checks` and each arm's figures. Exit status 1 if an arm is not clean: a trajectory was lost or doubled, or
an executor was sent more than it offered.
"""

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.broker import scratch_broker
from bench.check import Check, keep, options, say
from bench.fleet.arms import (
    CONTROL,
    LENGTHS,
    MOST_WALL_SECONDS,
    RATES,
    Shape,
    actions_of,
    prompts_of,
    serving_of,
    specs_of,
    whole_plan,
    worker_name,
)
from bench.fleet.executor import GRANT, MEMORY, USERS, NoteKind
from bench.fleet.figures import Spread, Waiting, first_turns, from_grants, last_lent, last_turns_off, spread_of
from bench.fleet.fleet import NAME, Line, Plan
from bench.fleet.rollout import Rollout, job_of, rollout
from rose.pipeline.audit import audit_log
from rose.pipeline.simulation.recorded_run import on_the_bus
from rose.topics.local_broker import Broker
from rose.topics.settings import BusSettings
from rose.workers.loadgen.config import TRACE_FILE

GROUPS = "elastic."
"""Prefix of the names of the counted groups."""

WARM_GROUPS, WARM_GROUP_SIZE, WARM_TURNS = 4, 16, 2
"""Number, size and turns of the groups that are not counted."""

KILLED_AFTER_SECONDS = 12.0

OVER_FIXED, OVER_WHOLE = 1.3, 1.1
"""Largest duration of ROSE relative to the arms `fixed` and `whole`."""

FIRST_MILLISECONDS = 250.0
"""Bound of the p99 time from room to the first turn: an executor's change of state is acted on within this time."""

OFF_MILLISECONDS = 200.0
"""Bound of the p99 time from users who take memory to the last turn off: one heartbeat."""

LEASE_SECONDS_OVER = 0.25
"""Time that a grant needs to arrive, and turns to go back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """The result of one rollout."""

    seconds: float
    """Time from the submission of the prompts to the last sample."""
    alone: float
    """Decode time of the longest trajectory, which is a lower bound for every arm."""
    bus: Spread | None
    """Milliseconds on the bus of a turn that was sent once; no part of this time is emulated."""
    turns: int
    preempted: int
    refused: int
    machine: float
    """Share of all processors in use during the rollout, by any process."""
    processors: Mapping[str, float]
    """Share of one processor that each role used."""
    audit: str
    """Description of an error in the log; empty if there is none."""
    overfilled: int
    lines: Sequence[Line]
    waiting: Waiting
    outlived: float | None = None
    """Seconds from the control app's end to the last lender's park; None if that was not observed."""

    @property
    def clean(self) -> bool:
        return not self.audit and not self.overfilled


def run_arm(settings: BusSettings, shape: Shape, name: str, folder: Path, *, kills: bool = False) -> Arm:
    """Run one rollout to its end; with `kills` the control app is killed in mid-run. Raises Stalled."""
    plan = Plan(
        bus=settings,
        job=job_of(settings),
        executors=specs_of(shape, name),
        lengths=LENGTHS,
        serving=serving_of(shape) if name == "rose" else None,
        actions=actions_of(shape, name),
        journal=str(folder / "journal.jsonl"),
    )
    prompts, killed_at = prompts_of(GROUPS, shape.groups, shape.group_size), 0.0
    control = CONTROL if name == "rose" else None
    with rollout(settings, plan, folder, groups=shape.groups, control=control) as running:
        _warm_up(running)
        psutil.cpu_percent()
        before = running.processor_seconds()
        running.submit(prompts)
        if kills:
            killed_at = _kill_control(running)
        running.until(lambda: running.ended(prompts))
        machine, took, after = psutil.cpu_percent() / 100, time.time() - running.began_at, running.processor_seconds()
        if kills:  # the fleet runs on: the journal shows lenders that outlive the last lease
            time.sleep(max(0.0, killed_at + CONTROL["lease_seconds"] + 1.0 - time.time()))  # a lease is a time
        lines = running.fleet.stop()
        waiting = Waiting(running.waiting())
    shares = {role: (after[role] - before[role]) / took for role in after}
    lenders = [worker_name(number) for number in range(shape.lenders)]
    last = last_lent(lines, lenders, since=killed_at) if kills else None
    return _arm_of(running, lines, waiting, machine, shares, outlived=None if last is None else last - killed_at)


def _arm_of(
    running: Rollout,
    lines: Sequence[Line],
    waiting: Waiting,
    machine: float,
    processors: Mapping[str, float],
    *,
    outlived: float | None,
) -> Arm:
    samples = [sample for sample in running.trainer.samples if sample.group_id.startswith(GROUPS)]
    decoded = [sum(turn.end - turn.start for turn in sample.turns) for sample in samples]
    counts = {line.what: int(line.reason) for line in lines if line.worker == NAME}
    audit = audit_log(running.settings)
    return Arm(
        seconds=max(sample.completed_at for sample in samples) - running.began_at,
        alone=max(decoded) / RATES.decode_tokens_per_second,
        bus=spread_of([on_the_bus(turn.times) for sample in samples for turn in sample.turns if not turn.attempt]),
        turns=counts["completed"],
        preempted=counts["preempted"],
        refused=counts["refused"],
        machine=machine,
        processors=processors,
        audit="" if audit.clean and audit.settled == audit.requested else str(audit),
        overfilled=sum(line.what == NoteKind.OVERFILLED.value for line in lines),
        lines=[line for line in lines if line.at >= running.began_at],
        waiting=waiting,
        outlived=outlived,
    )


def _warm_up(running: Rollout) -> None:
    """Run a few trajectories, until no lender lends any more."""
    prompts = prompts_of("warm.", WARM_GROUPS, WARM_GROUP_SIZE, most_turns=WARM_TURNS)
    running.submit(prompts, go=False)
    running.until(lambda: running.ended(prompts))
    running.until(lambda: not running.lending())


def _kill_control(running: Rollout) -> float:
    """Kill the control app with SIGKILL in mid-run; return the time."""
    assert running.control is not None
    time.sleep(KILLED_AFTER_SECONDS)  # the kill has a fixed time; if no lender lends then, a check is missed
    running.control.send_signal(signal.SIGKILL)
    return time.time()


def checks_of(arms: Mapping[str, Arm]) -> list[Check]:
    """Return the bounds on all arms together."""
    fixed, whole, rose, orphaned = (arms[name] for name in ("fixed", "whole", "rose", "orphaned"))
    turns = f"{rose.turns} turns"
    lease = CONTROL["lease_seconds"]
    outlived = float("inf") if orphaned.outlived is None else orphaned.outlived
    return [
        Check("fixed_over_rose", fixed.seconds / rose.seconds, "times", OVER_FIXED, "min", turns),
        Check("whole_over_rose", whole.seconds / rose.seconds, "times", OVER_WHOLE, "min", turns),
        Check(
            "grants_outlive_control_app", outlived, "s", lease + LEASE_SECONDS_OVER, "max", f"a lease of {lease:g} s"
        ),
        _within(spreads_of(rose)["free to first turn"], "free_to_first_turn_p99", FIRST_MILLISECONDS),
        _within(spreads_of(rose)["users' memory to last turn off"], "burst_to_last_turn_off_p99", OFF_MILLISECONDS),
        Check("arms_not_clean", sum(not arm.clean for arm in arms.values()), "", 0, "max", f"{len(arms)} arms"),
    ]


def _within(spread: Spread | None, name: str, bound: float) -> Check:
    """Check that a spread is within a bound; a missing spread misses the bound."""
    p99, many = (float("inf"), "hardly ever") if spread is None else (spread.p99, f"{spread.many} times")
    return Check(name, p99, "ms", bound, "max", f"seen {many}")


def spreads_of(arm: Arm) -> dict[str, Spread | None]:
    """Return the times to take and to leave capacity."""
    first, off = first_turns(arm.lines, arm.waiting, late=FIRST_MILLISECONDS / 1000), last_turns_off(arm.lines)
    return {
        "a turn on the bus": arm.bus,
        "grant to first turn": spread_of(from_grants(arm.lines, arm.waiting)),
        "free to first turn": spread_of([*first[GRANT], *first[USERS]]),
        "guest there to first turn": spread_of(first[GRANT]),
        "users left to first turn": spread_of(first[USERS]),
        "users' memory to last turn off": spread_of(off.get(MEMORY, ())),
        "last moment to compute in to last turn off": spread_of(off.get(USERS, ())),
        "grant's end to last turn off": spread_of(off.get(GRANT, ())),
    }


def figures_of(arm: Arm) -> dict[str, Any]:
    """Return the figures of one arm for JSON."""
    plain = (
        "seconds",
        "alone",
        "turns",
        "preempted",
        "refused",
        "machine",
        "processors",
        "audit",
        "overfilled",
        "outlived",
    )
    spreads = {name: spread._asdict() for name, spread in spreads_of(arm).items() if spread is not None}
    return {**{name: getattr(arm, name) for name in plain}, "milliseconds": spreads}


def show(arms: Mapping[str, Arm], checks: Sequence[Check]) -> None:
    """Print all arms, then the checks."""
    for name, arm in arms.items():
        shares = ", ".join(f"{role} {share:.0%}" for role, share in sorted(arm.processors.items()))
        print(f"{name:9} {arm.seconds:7.1f} s (the longest alone {arm.alone:.1f} s), ", end="")
        print(f"{arm.turns} turns ({arm.turns / arm.seconds:.0f}/s), ", end="")
        print(
            f"{arm.preempted} preempted, {arm.refused} refused; {arm.machine:.0%} of the machine; of one core {shares}"
        )
        for what, spread in spreads_of(arm).items():
            if spread is not None:
                print(f"  {what:44} {spread.median:9.1f} ms median {spread.p99:9.1f} ms p99, {spread.many} times")
        if not arm.clean:
            print(f"  NOT CLEAN: {arm.overfilled} turns more than offered; {arm.audit}")
    for check in checks:
        print(check)


def run_arms(broker: Broker, shape: Shape, folder: Path, names: Sequence[str]) -> dict[str, Arm]:
    """Run the arms one after another, each in its own topics."""
    arms = {}
    for name in names:
        kills = name == "orphaned"
        settings = broker.settings(f"{name}-arm.")
        arms[name] = run_arm(settings, shape, "rose" if kills else name, folder / name, kills=kills)
        say(f"{name}: {arms[name].seconds:.1f} s")
    return arms


ARMS = ("fixed", "whole", "rose", "orphaned")


def shape_of(arguments: argparse.Namespace) -> Shape:
    """Return the shape that the command line describes."""
    names = ("dedicated", "lenders", "groups", "group_size", "trace", "speed", "allocation_delay", "wake")
    return Shape(**{name: getattr(arguments, name) for name in names})


def main() -> None:
    """Run the benchmark; see the module."""
    parser = options(__doc__)
    parser.add_argument(
        "--trace",
        type=Path,
        default=TRACE_FILE,
        help="trace of users; six and a half minutes of a trace come with ROSE",
    )
    parser.add_argument("--dedicated", type=int, default=32, help="dedicated executors")
    parser.add_argument("--lenders", type=int, default=32, help="serving workers")
    parser.add_argument("--groups", type=int, default=48, help="groups of trajectories")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--speed", type=float, default=6.0, help="seconds of the trace in each second")
    parser.add_argument(
        "--allocation-delay", type=float, default=34.0, help="seconds of the trace until a moved worker joins"
    )
    parser.add_argument("--wake", type=float, default=5.0, help="seconds of the trace until a guest is ready")
    parser.add_argument("--only", nargs="*", choices=ARMS, default=ARMS, help="run only these arms; checks need all")
    arguments = parser.parse_args()
    shape = shape_of(arguments)
    folder = Path(tempfile.mkdtemp(prefix="rose-elastic-"))
    with scratch_broker() as broker:
        arms = run_arms(broker, shape, folder, arguments.only)
        checks = checks_of(arms) if set(arms) == set(ARMS) else []
    figures = {name: figures_of(arm) for name, arm in arms.items()}
    if not keep({"broker": broker.name, "checks": checks, "arms": figures}, arguments.json):
        fleet = f"{shape.dedicated} dedicated executors, {shape.lenders} serving workers, emulated"
        print(f"broker: {broker.name}; {fleet}")
        print(f"users are short of whole workers for {whole_plan(shape)[1]:.1f} s of {MOST_WALL_SECONDS:.0f} s planned")
        show(arms, checks)
    clean = all(arm.clean for arm in arms.values())
    if clean:
        shutil.rmtree(folder)
    sys.exit(not clean)


if __name__ == "__main__":
    main()
