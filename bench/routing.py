"""Measures routing: reuse of the prefix caches, the wait of turns, and the spread of the load.

    python -m bench.routing                                 on the demo's own multi-turn tasks
    python -m bench.routing --trace mooncake_trace.jsonl    also on a Mooncake trace

The benchmark is a simulation in simulated time. The router is ROSE's own core, with the records of emulated executors
as its input (see `bench.emulated`: emulated, not measured hardware). It is compared with the policies of
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

import heapq
import math
import statistics
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

from bench.check import Check, keep, options
from bench.emulated import EmulatedExecutor, Engine, Finished, Machine, Work
from bench.policies import POLICIES, Policy
from bench.sessions import Session, Turn, Workload, demo, mooncake, reusable
from rose.pipeline.routing.router import Decision, Router
from rose.pipeline.routing.turn_queue import ReceivedRequest
from rose.schemas.prompts import Sampling
from rose.schemas.turns import TurnDispatch, TurnKey, TurnRequest, context_fields

HEARTBEAT_SECONDS = 0.2
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


@dataclass(slots=True)
class Served:
    """One answered turn."""

    executor: int
    asked_at: float
    finished: Finished


@dataclass
class Simulation(ABC):
    """Sessions that request turns, and engines that answer. Subclasses decide which engine gets a turn."""

    workload: Workload
    served: list[Served] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._asked_at: dict[str, float] = {}
        self._open = len(self.workload.sessions)
        self._sessions = {session.trajectory_id: session for session in self.workload.sessions}
        for session in self.workload.sessions:
            self._ask_at(session.turns[0].at, session, 0)

    @property
    @abstractmethod
    def engines(self) -> list[Engine]:
        """Return the engines by executor number."""

    def run(self) -> None:
        """Run until every session has had its last turn."""
        while self._open:
            self.now, _, act = heapq.heappop(self._due)
            act()

    @abstractmethod
    def on_request(self, session: Session, number: int, work: Work) -> None:
        """Send a requested turn to an executor."""

    @abstractmethod
    def advance(self, executor: int) -> None:
        """Take the answers of an engine whose time has come; each goes to `answered`."""

    def answered(self, executor: int, finished: Finished) -> None:
        """Record an answered turn, and continue its session."""
        trajectory_id, number, _ = finished.work.key
        self.served.append(Served(executor, self._asked_at.pop(trajectory_id), finished))
        session = self._sessions[trajectory_id]
        if number + 1 == len(session.turns):
            self._open -= 1
            return
        turn = session.turns[number + 1]
        self._ask_at(max(turn.at, self.now + turn.after_seconds), session, number + 1)

    def look_again(self, executor: int) -> None:
        """Schedule the engine's next event again, because it may have changed."""
        at = self.engines[executor].next_at
        if at < math.inf:
            self._at(at, lambda: self._look(executor, at))

    def _look(self, executor: int, at: float) -> None:
        if self.engines[executor].next_at == at:  # otherwise the event is outdated
            self.advance(executor)
            self.look_again(executor)

    def _ask_at(self, at: float, session: Session, number: int) -> None:
        self._at(at, lambda: self._ask(session, number))

    def _ask(self, session: Session, number: int) -> None:
        self._asked_at[session.trajectory_id] = self.now
        self.on_request(session, number, work_of(session.turns[number], number, self.workload.max_tokens))

    def _at(self, at: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (at, next(self._order), act))


def work_of(turn: Turn, number: int, max_tokens: int) -> Work:
    """Return a turn as the engine sees it."""
    key = TurnKey(turn.trajectory_id, number, 0)
    return Work(key, turn.context_tokens, turn.new_tokens, turn.context_tokens + max_tokens, turn.blocks)


class PolicySimulation(Simulation):
    """Simulates another policy with servers that queue turns which they cannot run."""

    def __init__(self, workload: Workload, policy: Policy) -> None:
        super().__init__(workload)
        self._policy = policy
        self._engines = [Engine(machine) for machine in workload.machines]

    @property
    def engines(self) -> list[Engine]:
        return self._engines

    def on_request(self, session: Session, number: int, work: Work) -> None:
        executor = self._policy.choose(session.turns[number])
        self._engines[executor].add(work, self.now)
        self.look_again(executor)

    def advance(self, executor: int) -> None:
        for finished in self._engines[executor].advance(self.now):
            self._policy.answered(executor)
            trajectory_id, number, _ = finished.work.key
            if number + 1 == len(self._sessions[trajectory_id].turns):
                self._policy.ended(trajectory_id)
            self.answered(executor, finished)


class RoseSimulation(Simulation):
    """Simulates the router's core with executors that keep its contract."""

    def __init__(self, workload: Workload, router: Router | None = None) -> None:
        super().__init__(workload)
        self.router = router or Router()
        self.executors = [
            EmulatedExecutor(machine, worker=f"{machine.kind}-{slot}", slot=slot)
            for slot, machine in enumerate(workload.machines)
        ]
        self._works: dict[str, Work] = {}
        self._sampling = Sampling(max_tokens=workload.max_tokens)
        for slot in range(len(self.executors)):
            self._send_heartbeat(slot)
            self._at(slot / len(self.executors) * HEARTBEAT_SECONDS, self._heartbeat_repeatedly(slot))

    @property
    def engines(self) -> list[Engine]:
        return [executor.engine for executor in self.executors]

    def on_request(self, session: Session, number: int, work: Work) -> None:
        self._works[session.trajectory_id] = work
        before = session.turns[number - 1].context_tokens if number else 0
        goes_on = 0 < before <= work.context_tokens
        request = TurnRequest(
            trajectory_id=session.trajectory_id,
            group_id=session.group_id,
            home=0,
            environment="calculator",
            turn=number,
            **context_fields(
                bytes(4 * work.context_tokens), (0,) if goes_on else (), known_tokens=before if goes_on else 0
            ),
            sampling=self._sampling,
            requested_at=self.now,
            patience_seconds=PATIENCE_SECONDS,
        )
        self._apply(self.router.on_event(ReceivedRequest.from_record(request), self.now))

    def advance(self, executor: int) -> None:
        for result, finished in self.executors[executor].advance(self.now):
            self._apply(self.router.on_event(result, self.now))
            self.answered(executor, finished)

    def _apply(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            if not isinstance(decision, TurnDispatch):
                raise RuntimeError(f"the router gave a turn up: {decision.reason}")
            refused = self.executors[decision.slot].on_dispatch(
                decision, self._works[decision.request.trajectory_id]._replace(key=decision.key), self.now
            )
            self.look_again(decision.slot)
            if refused is not None:
                self._apply(self.router.on_event(refused, self.now))

    def _heartbeat_repeatedly(self, slot: int) -> Callable[[], None]:
        def send() -> None:
            self._send_heartbeat(slot)
            self._apply(self.router.tick(self.now))
            self._at(self.now + HEARTBEAT_SECONDS, send)

        return send

    def _send_heartbeat(self, slot: int) -> None:
        self._apply(self.router.on_event(self.executors[slot].heartbeat(self.now), self.now))


def figures(simulation: Simulation) -> dict[str, float]:
    """Return the figures of one policy."""
    workload, served = simulation.workload, simulation.served
    waits = [each.finished.scheduled_at - each.asked_at for each in served]
    loads = [0.0] * len(workload.machines)
    for each in served:
        work = each.finished.work
        machine = workload.machines[each.executor]
        loads[each.executor] += machine.seconds(work.context_tokens - each.finished.cached_tokens, work.new_tokens)
    turns = [each.finished.finished_at - each.asked_at for each in served]
    makespan = max(each.finished.finished_at for each in served) - min(each.asked_at for each in served)
    percentiles = statistics.quantiles(waits, n=100)
    return {
        "reused": sum(each.finished.cached_tokens for each in served) / sum(reusable(workload)),
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
        "emulated": True,
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
            print(f"{workload.name}: {checks[0].against}, emulated; busy {busy}, seed {arguments.seed}{notes}")
            print(table(found))
            print(*checks, sep="\n", flush=True)
    keep(result, arguments.json)
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
