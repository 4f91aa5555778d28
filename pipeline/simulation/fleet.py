"""A simulated run: routers, executors, lenders, users, environments, trainer and control app on one virtual clock.

Keeps true
- Routers, liveness, elasticity, admission, KV sharing and selection are the production cores, unchanged. What is
  modelled: engines, environments, users, trainer, and the time of the bus and of links.
- Every record between two roles takes `hop_seconds`. Executors stay in their cells: grants that name a cell are not
  followed.
- Every trajectory has one outcome or is still open, no executor was sent more than it offered, and the run ends:
  otherwise `run` raises.
"""

import gc
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from rose.pipeline.control.config import ControlConfig
from rose.pipeline.control.elasticity import ElasticityCore
from rose.pipeline.control.forecast import WorkerEstimates
from rose.pipeline.routing.cell_summary import summarize_cell
from rose.pipeline.routing.config import RouterConfig
from rose.pipeline.routing.router import Router
from rose.pipeline.routing.turn_queue import ReceivedRequest
from rose.pipeline.simulation.allocator import LOOK_SECONDS, Allocator
from rose.pipeline.simulation.cell_log import CellLog
from rose.pipeline.simulation.cost_model import CostModel, load_profile
from rose.pipeline.simulation.engine import EngineRequest
from rose.pipeline.simulation.events import EventQueue
from rose.pipeline.simulation.executors import Executor, Surroundings
from rose.pipeline.simulation.lender import LendingServer, ServingEngine
from rose.pipeline.simulation.policies import PolicyRouter
from rose.pipeline.simulation.recorder import Recorder
from rose.pipeline.simulation.rollout import Rollout
from rose.pipeline.simulation.scenario import ROSE, Elastic, Failure, Lending, Pool, Scenario
from rose.pipeline.simulation.trainer import Trainer
from rose.pipeline.simulation.trajectory_plans import TrajectoryPlan, drawn_plans
from rose.pipeline.simulation.users import Arrivals, least_loaded
from rose.schemas.errors import UsageError
from rose.schemas.grants import CapacityGrant, GrantSource
from rose.schemas.heartbeats import SlackHeartbeat
from rose.schemas.record import Record
from rose.schemas.samples import Sample
from rose.schemas.turns import TurnDispatch, TurnResult
from rose.workers.lender.admission import Promise

JOB = "simulated:run"

TRAINER = "trainer"
"""Begin of the names of engines on the trainer's GPUs."""

SUMMARY_SECONDS = 1.0
"""Time between two summaries of a cell, and between two decisions of the control app."""


@dataclass(slots=True)
class Cell:
    """One router and its place on the bus."""

    number: int
    router: Router | PolicyRouter
    log: CellLog = field(default_factory=CellLog)
    down_until: float = 0.0
    dead: bool = False
    """Whether the router is lost, and another one will take the cell over at `down_until`."""
    backlog: list[Record | ReceivedRequest] = field(default_factory=list)
    """Records that arrived while the router was frozen, and are not handled yet."""


class Fleet:
    """All roles of one run."""

    def __init__(
        self,
        scenario: Scenario,
        recorder: Recorder | None = None,
        plans: Sequence[Sequence[TrajectoryPlan]] | None = None,
        step_groups: Sequence[int] = (),
    ) -> None:
        """`recorder`: keeps what a trace and a report show; None keeps nothing.

        `plans`: what the trajectories of each group do, and the only groups; None draws from the scenario's tasks.
        `step_groups`: groups of each training step; a step without a number takes `tasks.groups`.
        """
        self.scenario = scenario
        self.events = EventQueue()
        self.executors: dict[str, Executor] = {}
        self.serving: list[ServingEngine] = []
        self.lenders: list[LendingServer] = []
        self._moved: list[Executor] = []
        """The rollouts' engine on the GPUs of each serving engine, with an allocator."""
        self._away: set[int] = set()
        """Serving engines that an allocator has moved, or is moving, to the rollouts."""
        self._draw = random.Random(f"{scenario.seed}/fleet")
        self._dispatches = 0
        self._coming: list[Failure] = []
        """Failures that have not happened."""
        self._toggled = 0
        """How often the trainer began or ended to wait."""
        self._around = Surroundings(
            events=self.events,
            send=self._from_executor,
            work_of=lambda dispatch: self.rollout.work_of(dispatch),
            heartbeat_seconds=scenario.heartbeat_seconds,
            recorder=recorder,
        )
        plans_of = drawn_plans(scenario.tasks, scenario.seed) if plans is None else plans.__getitem__
        tasks = scenario.tasks
        needed = tasks.group_size if plans is None and tasks.members_ratio > 1 else 0
        self.rollout = Rollout(plans_of, self.events, self._from_environment, self._on_sample, needed=needed)
        groups = math.inf if plans is None else len(plans)
        self.trainer = Trainer(scenario, self.events, self.rollout, self._publish, groups, step_groups)
        self.cells = [Cell(number, self._router()) for number in range(scenario.cells)]
        self.control: ElasticityCore | None = None
        self._cell_of: dict[str, Cell] = {}
        self._slow_links = 1.0
        self._user_turn = 0
        self._build()

    def run(self) -> None:
        """Run to the last training step.

        Raises Stalled, AssertionError if a trajectory or a limit was lost, or UsageError if a failure never happened.
        Python does not look for cycles of objects meanwhile: a simulation makes hardly any, and each look costs time.
        """
        looks = gc.isenabled()
        gc.disable()
        try:
            self.trainer.start()
            self.events.run_until(lambda: self.trainer.done, latest=self.scenario.most_seconds)
        finally:
            if looks:
                gc.enable()
        self.check()
        if self._coming:
            failure = self._coming[0]
            raise UsageError(
                f"the failure {failure.what} at {failure.at_seconds:g} s never happened: the run ended after "
                f"{self.events.now:.0f} s; give a smaller `at_seconds` or more steps"
            )

    @property
    def overfilled(self) -> int:
        """Dispatches that exceeded an executor's offers."""
        return sum(executor.overfilled for executor in self.executors.values())

    @property
    def _has_control(self) -> bool:
        """Whether a control app grants. It reads summaries, which only the production router writes."""
        return self.scenario.routing.policy == ROSE

    def _router(self) -> Router | PolicyRouter:
        scenario = self.scenario
        routing, training = scenario.routing, scenario.training
        if routing.policy != ROSE:
            return PolicyRouter(routing.policy)
        behind = 0 if training.mode == "synchronous" else training.max_staleness
        lag = behind if routing.max_lag_versions is None else routing.max_lag_versions
        return Router(RouterConfig(max_lag_versions=lag, remembered_trajectories=1_000_000))

    def _build(self) -> None:
        scenario = self.scenario
        profiles: dict[str, CostModel] = {}

        def profile(name: str) -> CostModel:
            if name not in profiles:
                profiles[name] = load_profile(name)
            return profiles[name]

        for place, pool in enumerate(scenario.dedicated):
            for number in range(pool.count):
                self._start(self._add_dedicated(f"dedicated-{place}-{number}", profile(pool.profile), pool))
        lending = scenario.lending
        if lending is not None:
            for number in range(lending.count):
                self._add_lender(number, lending, profile(lending.serving_profile), profile(lending.guest_profile))
            if scenario.users is not None and lending.count:
                cost = profile(lending.serving_profile)
                Arrivals(scenario.users, cost, lending.count, scenario.seed).start(self.events, self._on_user)
            if scenario.elastic.how == "lend" and self._has_control:
                self._start_control()
            elif scenario.elastic.how == "whole":
                self._start_allocator(lending, profile(lending.guest_profile))
        if scenario.training.lends_gpus:
            self._lend_trainer(profile(scenario.dedicated[0].profile))
        for cell in self.cells:
            self.events.repeat(0.1, partial(self._tick, cell), first=0.05)
        for failure in scenario.failures:
            self.events.at(failure.at_seconds, partial(self._fail, failure))
            self._coming.append(failure)

    def _place(self, executor: Executor) -> None:
        self.executors[executor.name] = executor
        self._cell_of[executor.name] = self.cells[len(self.executors) % len(self.cells)]

    def _add_dedicated(self, name: str, cost: CostModel, pool: Pool) -> Executor:
        executor = Executor(
            name,
            len(self.executors),
            cost,
            self._around,
            max_turns=pool.max_turns,
            step_tokens=pool.step_tokens,
        )
        executor.version = 0
        self._place(executor)
        return executor

    def _start(self, executor: Executor) -> None:
        executor.start(self._draw.random() * self.scenario.heartbeat_seconds)

    def _add_lender(self, number: int, lending: Lending, serving_cost: CostModel, guest_cost: CostModel) -> None:
        promise = Promise(
            dial=lending.dial,
            ttft_seconds=lending.ttft_seconds,
            tpot_seconds=lending.tpot_seconds,
            yield_seconds=lending.yield_seconds,
        )
        serving = ServingEngine(
            serving_cost,
            promise,
            max_running=lending.serving_max_running,
            step_tokens=lending.serving_step_tokens,
        )
        lender = LendingServer(
            f"lender-{number}",
            len(self.executors),
            guest_cost,
            self._around,
            max_turns=lending.max_turns,
            step_tokens=lending.step_tokens,
            serving=serving,
            promise=promise,
            job=JOB,
            newest_version=lambda: (self.trainer.version, self._transfer_seconds(guest_cost)),
            needs_grant=self._has_control,
        )
        self.serving.append(serving)
        self.lenders.append(lender)
        self._place(lender)
        if self.scenario.elastic.how == "lend":
            self._start(lender)

    def _start_control(self) -> None:
        settings = msgspec.structs.asdict(self.scenario.control)
        known = settings.pop("known_wake_seconds")
        estimates = None if known is None else WorkerEstimates(known, catch_up_seconds=0.0)
        self.control = ElasticityCore(ControlConfig(**settings), JOB, estimates)
        self.events.repeat(SUMMARY_SECONDS, self._control, first=0.5)

    def _start_allocator(self, lending: Lending, cost: CostModel) -> None:
        """Let an allocator move whole engines between users and rollouts."""
        pool = Pool(profile=lending.guest_profile, count=lending.count, max_turns=lending.max_turns)
        for number in range(lending.count):
            moved = self._add_dedicated(f"moved-{number}", cost, pool)
            moved.gone = True
            self._moved.append(moved)
        capacity = self.scenario.elastic.engine_requests or peak_requests(self.scenario)
        allocator = Allocator(lending.count, capacity=capacity, delay_seconds=self.scenario.elastic.allocation_seconds)
        self.events.repeat(LOOK_SECONDS, partial(self._allocate, allocator))

    def _allocate(self, allocator: Allocator) -> None:
        now = self.events.now
        requests = sum(serving.engine.requests for serving in self.serving)
        serve = allocator.engines_to_serve(requests, now)
        away = sorted(self._away)
        for number in away[: max(0, serve - (len(self.serving) - len(away)))]:
            self._away.discard(number)
            if not self._moved[number].gone:
                self._moved[number].leave("users need its GPUs")
        serving = sorted(set(range(len(self.serving))) - self._away)
        serving.sort(key=lambda number: self.serving[number].engine.requests)
        for number in serving[: max(0, len(serving) - serve)]:
            self._away.add(number)
            self.events.after(self.scenario.elastic.allocation_seconds, partial(self._join, number))

    def _join(self, number: int) -> None:
        if number in self._away and self._moved[number].gone:
            self._moved[number].restart(self.trainer.version)

    def _control(self) -> None:
        """Write the cells' summaries, and let the control app decide."""
        now, control = self.events.now, self.control
        assert control is not None
        for cell in self.cells:
            if isinstance(cell.router, Router) and now >= cell.down_until:
                name = f"router-{cell.number}"
                summary = summarize_cell(cell.router, name=name, now=now, cell=cell.number, cells=len(self.cells))
                control.on_summary(summary, now)
        for grant in control.tick(now):
            source = GrantSource.CELL if grant.cell is not None else GrantSource.LEASED
            control.on_grant(grant.worker, grant, now, source=source)
            self._later(partial(self._deliver_grant, grant, source))

    def _deliver_grant(self, grant: CapacityGrant, source: GrantSource) -> None:
        executor = self.executors[grant.worker]
        if source is GrantSource.LEASED and isinstance(executor, LendingServer) and not executor.gone:
            executor.on_grant(grant, source)

    def _on_user(self, request: EngineRequest) -> None:
        self._user_turn += 1
        in_service = [lender for number, lender in enumerate(self.lenders) if number not in self._away]
        chosen = least_loaded([lender.serving.engine.requests for lender in in_service], self._user_turn)
        in_service[chosen].on_user_request(request)

    def _later(self, act: Callable[[], None]) -> None:
        self.events.after(self.scenario.hop_seconds, act)

    def _from_environment(self, received: ReceivedRequest) -> None:
        cell = self.cells[int(received.request.group_id[1:]) % len(self.cells)]
        self._later(lambda: self._route(cell, received))

    def _from_executor(self, executor: Executor, record: TurnResult | SlackHeartbeat) -> None:
        cell = self._cell_of[executor.name]
        self._later(lambda: self._route(cell, record))
        if isinstance(record, TurnResult):
            self._later(lambda: self.rollout.on_result(record))

    def _route(self, cell: Cell, event: Record | ReceivedRequest) -> None:
        cell.log.add(event)
        if cell.dead:
            return  # the next router reads it back, or begins with later heartbeats
        if self.events.now < cell.down_until or cell.backlog:
            cell.backlog.append(event)
            return
        self._decide(cell, event)

    def _decide(self, cell: Cell, event: Record | ReceivedRequest) -> None:
        for decision in cell.router.on_event(event, self.events.now):
            self._decided(cell, decision)

    def _tick(self, cell: Cell) -> None:
        if self.events.now < cell.down_until:
            return
        if cell.dead and isinstance(cell.router, Router):
            cell.dead = False
            for decision in cell.log.restore(cell.router, lambda: self.events.now):
                self._decided(cell, decision)
        backlog, cell.backlog = cell.backlog, []
        for event in backlog:
            self._decide(cell, event)
        for decision in cell.router.tick(self.events.now):
            self._decided(cell, decision)

    def _decided(self, cell: Cell, decision: TurnDispatch | TurnResult) -> None:
        cell.log.add(decision)
        if isinstance(decision, TurnResult):
            self._later(lambda: self.rollout.on_result(decision))
            return
        self._dispatches += 1
        executor, offset = self.executors[decision.worker], self._dispatches
        self._later(lambda: executor.on_dispatch(decision, offset))

    def _on_sample(self, sample: Sample) -> None:
        self._later(lambda: self.trainer.on_sample(sample))

    def _transfer_seconds(self, cost: CostModel) -> float:
        training = self.scenario.training
        return self._slow_links * cost.weight_bytes * training.delta_bytes_share / training.link_bytes_per_second

    def _publish(self, version: int) -> float:
        """Send a version to all engines; return the seconds until the slowest dedicated engine serves it."""
        swap, longest = self.scenario.training.swap_seconds, 0.0
        for executor in self.executors.values():
            transfer = self._transfer_seconds(executor.cost)
            executor.publish(version, transfer, swap)
            if not isinstance(executor, LendingServer) and not executor.gone:
                longest = max(longest, transfer + swap)
        return longest + 2 * self.scenario.hop_seconds

    def _lend_trainer(self, cost: CostModel) -> None:
        """Run engines on the trainer's GPUs while the trainer waits."""
        training, pool = self.scenario.training, self.scenario.dedicated[0]
        names = [f"{TRAINER}-{number}" for number in range(training.lends_gpus)]
        borrowed = [self._add_dedicated(name, cost, pool) for name in names]
        for executor in borrowed:
            self._start(executor)
        self.trainer.on_waiting = partial(self._toggle_trainer, borrowed)

    def _toggle_trainer(self, borrowed: list[Executor], waits: bool) -> None:
        """Let the engines on the trainer's GPUs come or go."""
        self._toggled += 1
        if waits:
            seconds = self.scenario.training.toggle_seconds
            self.events.after(seconds, partial(self._return_to_rollouts, borrowed, self._toggled))
            return
        for executor in borrowed:
            if not executor.gone:
                executor.leave("the trainer needs its GPUs")

    def _return_to_rollouts(self, borrowed: list[Executor], toggled: int) -> None:
        """Let engines come that were told to by this toggle, unless a later toggle has told them to go."""
        if toggled == self._toggled:
            for executor in borrowed:
                executor.restart(self.trainer.version)

    def _fail(self, failure: Failure) -> None:
        """Let something fail, and come back later."""
        self._coming.remove(failure)
        back = self.events.now + failure.for_seconds
        if failure.what in ("router_freezes", "router_dies"):
            for cell in self.cells:
                self._stop_router(cell, back, dies=failure.what == "router_dies")
            return
        if failure.what == "link_slow":
            self._slow_links = 10.0
            self.events.at(back, self._restore_links)
            return
        chosen = self._chosen(failure)
        if not chosen:
            raise UsageError(
                f"the failure {failure.what} at {failure.at_seconds:g} s affects no engine: give a larger `share` or "
                "another time"
            )
        for executor in chosen:
            self._fail_executor(failure, executor, back)

    def _stop_router(self, cell: Cell, back: float, *, dies: bool) -> None:
        """Let a router stand still; one that dies is replaced by another, which reads the log back.

        The policies of comparisons read nothing back: they keep their state.
        """
        cell.down_until = max(back, cell.down_until)
        if dies and isinstance(cell.router, Router):
            cell.router, cell.dead = self._router(), True
            cell.backlog.clear()

    def _restore_links(self) -> None:
        self._slow_links = 1.0

    def _restart(self, executor: Executor) -> None:
        executor.restart(self.trainer.version)

    def _chosen(self, failure: Failure) -> list[Executor]:
        wanted = LendingServer if failure.what == "lenders_leave" else Executor
        candidates = [each for each in self.executors.values() if isinstance(each, wanted) and not each.gone]
        return self._draw.sample(candidates, round(failure.share * len(candidates)))

    def _fail_executor(self, failure: Failure, executor: Executor, back: float) -> None:
        if failure.what == "heartbeats_stop":
            executor.silent = True
            self.events.at(back, executor.speak)
            return
        if failure.what == "lenders_leave":
            executor.leave("it leaves")
        else:
            executor.kill()
        self.events.at(back, partial(self._restart, executor))

    def check(self) -> None:
        """Raise AssertionError if a trajectory was lost or doubled, or an executor was sent more than it offered."""
        settled = [sample.trajectory_id for sample, _, _ in self.trainer.figures.settled]
        opened = self.rollout.begun
        if len(settled) != len(set(settled)):
            raise AssertionError("a trajectory has two outcomes")
        if self.rollout.finished + len(self.rollout.live) != opened or len(settled) > self.rollout.finished:
            raise AssertionError(f"{opened} trajectories were opened, {self.rollout.finished} ended")
        if self.overfilled:
            raise AssertionError(f"executors were sent {self.overfilled} turns more than they offered")


PEAK_SECONDS = 1200.0
"""Time over which `peak_requests` looks at users."""


def peak_requests(scenario: Scenario) -> int:
    """Return the largest number of concurrent requests that one engine of the serving fleet has without rollouts."""
    lending = scenario.lending
    assert lending is not None
    one = (Pool(profile=lending.guest_profile, count=1),)
    alone = Fleet(msgspec.structs.replace(scenario, dedicated=one, elastic=Elastic(how="none"), failures=()))
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, *(serving.engine.requests for serving in alone.serving))

    alone.events.repeat(0.1, look)
    alone.events.run_until(lambda: alone.events.now >= PEAK_SECONDS, latest=math.inf)
    return most
