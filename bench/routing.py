"""Measures routing: reuse of the prefix caches, the wait of turns, and the spread of the load.

    python -m bench.routing                                 on the demo's own multi-turn tasks
    python -m bench.routing --trace mooncake_trace.jsonl    also on a Mooncake trace

The benchmark is a simulation in simulated time (`pipeline/simulation`). The router is ROSE's own core, with the records
of simulated executors as its input: their hardware is stated, not measured. It is compared with the policies of
`bench.policies` on the same fleets and arrivals. Records take no time on the bus, for all policies.

- reused: prompt tokens found in the executors' caches, relative to one unlimited cache that all executors share.
- wait: seconds from the request of a turn until the step that begins its prefill.
- turn: mean seconds from the request of a turn until its answer, which ROSE's placement minimises.
- load: largest load of an executor relative to the mean. The load is the time in which the executor would compute its
  work with all lanes busy, so equal loads are work in proportion to the executors' rates.
- busy: share of the time in which an executor computed; full: share that it would need with all lanes busy.
- makespan: seconds from the first request to the last answer.

`--json FILE` writes one object with `checks` and every figure. Exit status 1 if a bound is missed.
"""

import math
import statistics
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from bench.check import Check, keep, options
from bench.policies import POLICIES, Policy
from bench.sessions import Machine, Session, Workload, demo, mooncake, reusable
from rose.pipeline.routing.router import Decision, Router
from rose.pipeline.routing.turn_queue import ReceivedRequest
from rose.pipeline.simulation.engine import Engine
from rose.pipeline.simulation.events import EventQueue
from rose.pipeline.simulation.executors import HEARTBEAT_SECONDS, Executor, Surroundings, Work
from rose.schemas.heartbeats import SlackHeartbeat
from rose.schemas.prompts import Sampling
from rose.schemas.turns import TurnDispatch, TurnOutcome, TurnRequest, TurnResult, context_fields

PATIENCE_SECONDS = 1e6

ROSE = "ROSE"
LEAST_REUSE, MOST_WAIT, MOST_LOAD = 0.97, 0.5, 1.25
"""Bounds: least reuse relative to the oracle, largest p99 wait relative to sticky, largest load relative to the
mean."""

EPSILON_SECONDS = 1e-3
"""Least divisor: a shorter p99 wait of the compared policy counts as this time."""

BUSY = 0.6
"""Share of the time that the fleet would need with all lanes busy if no token was computed twice. Lanes are seldom all
busy, so the fleet computes for a larger share of the time."""

DEMO_GROUPS = 300
DEMO_MACHINE = Machine(
    kind="even",
    base_seconds=0.003,
    token_seconds=0.0001,
    lanes=64,
    step_tokens=1024,
    block_tokens=32,
    kv_blocks=1024,
)
"""Lanes, blocks and memory of the demo's executor; its rates are rounded rates of a laptop's core."""

LARGE_MACHINE = Machine(
    kind="even",
    base_seconds=0.025,
    token_seconds=1 / 8_000,
    lanes=64,
    step_tokens=2_048,
    block_tokens=512,
    kv_blocks=8_192,
)
"""About eight GPUs with a model of about 70 billion parameters. Ten of these have twice the cache that the trace fills,
so repeated computation is due to the placement; with half of the cache (`--cache 0.5`) eviction contributes too."""

FLEET = {"even": (1.0, 1.0, 4), "compute-rich": (1.0, 0.5, 2), "bandwidth-rich": (0.5, 1.0, 2), "old": (2.0, 2.0, 2)}
"""Kinds of executors: factor of the step's fixed time, factor of the time per token, and number of executors."""


ALIKE = {"even": (1.0, 1.0, 10)}


def fleet(machine: Machine, cache: float = 1.0, *, alike: bool = False) -> list[Machine]:
    """Return ten executors of four kinds, or equal ones with `alike`. `cache` multiplies the KV blocks."""
    return [
        Machine(
            **{
                **asdict(machine),
                "kind": kind,
                "kv_blocks": round(machine.kv_blocks * cache),
                "base_seconds": machine.base_seconds * base,
                "token_seconds": machine.token_seconds * token,
            }
        )
        for kind, (base, token, many) in (ALIKE if alike else FLEET).items()
        for _ in range(many)
    ]


@dataclass(slots=True, kw_only=True)
class Served:
    """One answered turn. Times are in seconds."""

    executor: int
    context_tokens: int
    new_tokens: int
    cached_tokens: int
    asked_at: float
    scheduled_at: float
    finished_at: float


class Simulation(ABC):
    """Sessions that request turns, and engines that answer. Subclasses decide which engine gets a turn."""

    engines: list[Engine]

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.events = EventQueue()
        self.served: list[Served] = []
        self._asked_at: dict[str, float] = {}
        self._open = len(workload.sessions)
        self._sessions = {session.trajectory_id: session for session in workload.sessions}
        for session in workload.sessions:
            self.events.at(session.turns[0].at, partial(self._ask, session, 0))

    def run(self) -> None:
        """Run until every session has had its last turn."""
        self.events.run_until(lambda: not self._open, latest=math.inf)

    @abstractmethod
    def on_request(self, session: Session, number: int) -> None:
        """Send a requested turn to an executor."""

    def answered(
        self, executor: int, name: str, number: int, *, cached: int, scheduled_at: float, finished_at: float
    ) -> None:
        """Record an answered turn, and continue its session."""
        session = self._sessions[name]
        turn = session.turns[number]
        self.served.append(
            Served(
                executor=executor,
                context_tokens=turn.context_tokens,
                new_tokens=turn.new_tokens,
                cached_tokens=cached,
                asked_at=self._asked_at.pop(name),
                scheduled_at=scheduled_at,
                finished_at=finished_at,
            )
        )
        if number + 1 == len(session.turns):
            self._open -= 1
            return
        following = session.turns[number + 1]
        at = max(following.at, self.events.now + following.after_seconds)
        self.events.at(at, partial(self._ask, session, number + 1))

    def _ask(self, session: Session, number: int) -> None:
        self._asked_at[session.trajectory_id] = self.events.now
        self.on_request(session, number)


class PolicySimulation(Simulation):
    """Simulates another policy with servers that queue turns which they cannot run."""

    def __init__(self, workload: Workload, policy: Policy) -> None:
        super().__init__(workload)
        self._policy = policy
        self.engines = [
            Engine(
                machine.cost(),
                max_running=machine.lanes,
                step_tokens=machine.step_tokens,
                kv_tokens=machine.kv_tokens,
            )
            for machine in workload.machines
        ]

    def on_request(self, session: Session, number: int) -> None:
        turn, now = session.turns[number], self.events.now
        executor = self._policy.choose(turn)
        self._advance(executor)
        block = self.workload.machines[executor].block_tokens
        self.engines[executor].add(turn.engine_request(f"{session.trajectory_id}/{number}", block, now), now)
        self._look_again(executor)

    def _look_again(self, executor: int) -> None:
        at = self.engines[executor].next_at
        self.events.at(at, partial(self._look, executor, at))

    def _look(self, executor: int, at: float) -> None:
        if self.engines[executor].next_at == at:  # otherwise the event is outdated
            self._advance(executor)
            self._look_again(executor)

    def _advance(self, executor: int) -> None:
        for ended in self.engines[executor].advance(self.events.now):
            name, _, number = ended.request.name.rpartition("/")
            self._policy.answered(executor)
            if int(number) + 1 == len(self._sessions[name].turns):
                self._policy.ended(name)
            self.answered(
                executor,
                name,
                int(number),
                cached=ended.cached_tokens,
                scheduled_at=ended.scheduled_at,
                finished_at=ended.finished_at,
            )


class RoseSimulation(Simulation):
    """Simulates the router's core with executors that keep its contract."""

    def __init__(self, workload: Workload, router: Router | None = None) -> None:
        super().__init__(workload)
        self.router = router or Router()
        self._sampling = Sampling(max_tokens=workload.max_tokens)
        self._dispatches = 0
        around = Surroundings(events=self.events, send=self._on_record, work_of=self._work_of)
        self.executors = [
            Executor(
                f"{machine.kind}-{slot}",
                slot,
                machine.cost(),
                around,
                max_turns=machine.lanes,
                step_tokens=machine.step_tokens,
            )
            for slot, machine in enumerate(workload.machines)
        ]
        self.engines = [executor.engine for executor in self.executors]
        for slot, executor in enumerate(self.executors):
            executor.version = 0
            executor.start(slot / len(self.executors) * HEARTBEAT_SECONDS)
        self.events.repeat(HEARTBEAT_SECONDS, self._tick)

    def on_request(self, session: Session, number: int) -> None:
        turn = session.turns[number]
        before = session.turns[number - 1].context_tokens if number else 0
        goes_on = 0 < before <= turn.context_tokens
        request = TurnRequest(
            trajectory_id=session.trajectory_id,
            group_id=session.group_id,
            home=0,
            environment="calculator",
            turn=number,
            **context_fields(
                bytes(4 * turn.context_tokens), (0,) if goes_on else (), known_tokens=before if goes_on else 0
            ),
            sampling=self._sampling,
            requested_at=self.events.now,
            patience_seconds=PATIENCE_SECONDS,
        )
        self._apply(self.router.on_event(ReceivedRequest.from_record(request), self.events.now))

    def _work_of(self, dispatch: TurnDispatch) -> Work:
        turn = self._sessions[dispatch.request.trajectory_id].turns[dispatch.request.turn]
        block = self.workload.machines[dispatch.slot].block_tokens
        request = turn.engine_request(turn.trajectory_id, block, self.events.now)
        return Work(request.segments, request.new_tokens, request.blocks)

    def _on_record(self, executor: Executor, record: TurnResult | SlackHeartbeat) -> None:
        self._apply(self.router.on_event(record, self.events.now))
        if isinstance(record, TurnResult) and record.outcome is TurnOutcome.COMPLETED:
            self.answered(
                executor.slot,
                record.trajectory_id,
                record.turn,
                cached=record.cached_tokens,
                scheduled_at=record.times.scheduled_at,
                finished_at=record.times.finished_at,
            )

    def _tick(self) -> None:
        self._apply(self.router.tick(self.events.now))

    def _apply(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            if not isinstance(decision, TurnDispatch):
                raise RuntimeError(f"the router gave a turn up: {decision.reason}")
            self._dispatches += 1
            arrive = partial(self.executors[decision.slot].on_dispatch, decision, self._dispatches)
            self.events.after(0.0, arrive)


def figures(simulation: Simulation) -> dict[str, float]:
    """Return the figures of one policy."""
    workload, served = simulation.workload, simulation.served
    waits = [each.scheduled_at - each.asked_at for each in served]
    loads = [0.0] * len(workload.machines)
    for each in served:
        machine = workload.machines[each.executor]
        loads[each.executor] += machine.seconds(each.context_tokens - each.cached_tokens, each.new_tokens)
    turns = [each.finished_at - each.asked_at for each in served]
    makespan = max(each.finished_at for each in served) - min(each.asked_at for each in served)
    percentiles = statistics.quantiles(waits, n=100)
    return {
        "reused": sum(each.cached_tokens for each in served) / sum(reusable(workload)),
        "wait_p50_seconds": percentiles[49],
        "wait_p99_seconds": percentiles[98],
        "turn_seconds": statistics.mean(turns),
        "load": max(loads) / statistics.mean(loads),
        "busy": statistics.mean(engine.busy_seconds for engine in simulation.engines) / makespan,
        "full": statistics.mean(loads) / makespan,
        "makespan_seconds": makespan,
    }


def measure(workload: Workload, seed: int) -> dict[str, dict[str, float]]:
    """Return the figures of every policy, ROSE's first."""
    executors = len(workload.machines)
    simulations: dict[str, Simulation] = {ROSE: RoseSimulation(workload)}
    simulations |= {name: PolicySimulation(workload, policy(executors, seed)) for name, policy in POLICIES.items()}
    found = {}
    for name, simulation in simulations.items():
        simulation.run()
        found[name] = figures(simulation)
    return found


def checks_of(workload: Workload, found: dict[str, dict[str, float]]) -> list[Check]:
    """Return the bounds on ROSE's figures."""
    rose, sticky = found[ROSE], found["sticky"]
    against = f"{workload.turns} turns of {len(workload.sessions)} trajectories, {len(workload.machines)} executors"
    waited = sticky["wait_p99_seconds"]
    return [
        Check(
            name=f"{workload.name} reuse",
            value=round(rose["reused"], 4),
            unit="of the oracle's",
            bound=LEAST_REUSE,
            direction="min",
            against=against,
            details={name: round(each["reused"], 4) for name, each in found.items()},
        ),
        Check(
            name=f"{workload.name} wait",
            value=round(rose["wait_p99_seconds"] / max(waited, EPSILON_SECONDS), 4),
            unit="of sticky's p99",
            bound=MOST_WAIT,
            direction="max",
            against=against,
            details={name: round(each["wait_p99_seconds"], 4) for name, each in found.items()},
        ),
        Check(
            name=f"{workload.name} load",
            value=round(rose["load"], 4),
            unit="x",
            bound=MOST_LOAD,
            direction="max",
            against=against,
            details={name: round(each["load"], 4) for name, each in found.items()},
        ),
    ]


def table(found: dict[str, dict[str, float]]) -> str:
    """Return a table with one row for each policy."""
    lines = [
        f"  {'':14} {'reused':>7} {'wait p50':>9} {'p99 (s)':>9} {'turn':>8} {'load':>6} {'busy':>6} {'full':>6}"
        f" {'makespan':>9}"
    ]
    lines += [
        f"  {name:14} {each['reused']:7.4f} {each['wait_p50_seconds']:9.4f} {each['wait_p99_seconds']:9.4f}"
        f" {each['turn_seconds']:8.4f} {each['load']:6.3f} {each['busy']:6.3f} {each['full']:6.3f}"
        f" {each['makespan_seconds']:9.1f}"
        for name, each in found.items()
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark; see the module."""
    parser = options(__doc__)
    parser.add_argument("--trace", metavar="FILE", help="Mooncake trace (JSON lines) as the second workload")
    parser.add_argument("--requests", type=int, help="requests of the trace; by default all")
    parser.add_argument("--groups", type=int, default=DEMO_GROUPS, help="groups of the demo's tasks")
    parser.add_argument("--busy", type=float, default=BUSY, help="share of the time that the fleet would need")
    parser.add_argument("--cache", type=float, default=1.0, help="factor of the executors' KV memory for the trace")
    parser.add_argument("--alike", action="store_true", help="use executors of one kind instead of four")
    parser.add_argument("--seed", type=int, default=0, help="seed of arrivals, scripted policy and random draws")
    arguments = parser.parse_args()
    busy = arguments.busy
    if not 0 < busy < 1:
        parser.error(f"--busy is a share between 0 and 1, such as {BUSY}")
    alike = arguments.alike
    workloads = [demo(fleet(DEMO_MACHINE, alike=alike), groups=arguments.groups, seed=arguments.seed, busy=busy)]
    if arguments.trace:
        workloads.append(
            mooncake(
                arguments.trace,
                fleet(LARGE_MACHINE, arguments.cache, alike=alike),
                busy=busy,
                requests=arguments.requests,
            )
        )
    result: dict[str, Any] = {
        "seed": arguments.seed,
        "busy": busy,
        "alike": alike,
        "simulated": True,
        "checks": [],
        "workloads": {},
    }
    met = True
    for workload in workloads:
        found = measure(workload, arguments.seed)
        checks = checks_of(workload, found)
        met &= all(check.met for check in checks)
        result["checks"] += checks
        result["workloads"][workload.name] = {"told": workload.notes, "policies": found}
        if arguments.json != "-":
            notes = "".join(f", {name} {value}" for name, value in workload.notes.items())
            print(f"{workload.name}: {checks[0].against}, simulated; busy {busy}, seed {arguments.seed}{notes}")
            print(table(found))
            print(*checks, sep="\n", flush=True)
    keep(result, arguments.json)
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
