"""A storm as a plan: every fault and every produced line with its time, drawn from a seed. Pure.

Keeps true
- The same seed and shape give the same plan.
- Every round has every kind of fault, in an order and at times drawn from the seed.
- Of environment workers, executors and routers, one additional process runs undisturbed whenever one is frozen, killed
  or stopped; at most one broker node is down. A lender runs beside the dedicated executors.

Times are seconds since the storm began.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import cycle, islice
from typing import TypeAlias

from rose.topics.catalog import inbox_slot
from rose.workers.environments.config import members_to_open
from tests.support.storm.lines import Line, LineKind, Lines
from tests.support.storm.shape import Shape


class Role(Enum):
    ENVIRONMENT = "environment"
    EXECUTOR = "executor"
    LENDER = "lender"
    """A serving engine with a guest: an executor that joins and leaves."""
    ROUTER = "router"
    TRAINER = "trainer"
    CONTROL = "control"
    NODE = "node"
    """A node of the broker's cluster."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A process name. The process may start more than once."""

    role: Role
    number: int

    def __str__(self) -> str:
        return f"{self.role.value}-{self.number}"


class Act(Enum):
    START = "start"
    KILL = "kill"
    LEAVE = "leave"
    """SIGTERM."""
    FREEZE = "freeze"
    """SIGSTOP."""
    THAW = "thaw"
    PARK = "park"
    """Parked by a grant."""
    WAKE = "wake"


class Part(Enum):
    """The processes of a lending server, by the beginning of their names."""

    ALL = ""
    CORE = "VLLM::Engin"
    """Its end also ends the server."""
    WATCHDOG = "watchdog"
    """After its end the server serves without lending and is stopped."""
    SIDECAR = "sidecar"
    """The watchdog restarts it."""


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """An event that hits a worker."""

    at: float
    act: Act
    worker: Worker
    joins: bool = False
    """Whether the process starts in addition to all others."""
    part: Part = Part.ALL
    """The affected process of a lender."""


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    shape: Shape
    first: tuple[Worker, ...]
    """Workers that run before the storm begins."""
    planned_faults: tuple[PlannedFault, ...]
    lines: tuple[Line, ...]
    in_turn: bool = False
    """Whether a worker is stopped only while all others are healthy. Each fault then releases its share of the lines,
    and no stall is excused."""

    def due(self, now: float, deeds_left: int) -> float:
        """Return the time of the plan up to which lines are to be produced."""
        return self.shape.seconds * (1 - deeds_left / (len(self.planned_faults) + 1)) if self.in_turn else now

    @property
    def groups(self) -> dict[str, int]:
        """Return every requested group and the number of trajectories with which the group is opened."""
        ratio = self.shape.members_ratio
        good = [line for line in self.lines if line.sort is LineKind.GOOD]
        return {line.group_id: members_to_open(line.group_size, ratio) for line in good}

    @property
    def refused(self) -> int:
        """Return the number of requested groups that cannot be opened."""
        return sum(line.refused for line in self.lines)

    @property
    def trajectories(self) -> set[str]:
        """Return every requested trajectory."""
        return {f"{group_id}:{index}" for group_id, size in self.groups.items() for index in range(size)}

    @property
    def blocked(self) -> set[str]:
        """Return the trajectories that must fail for infrastructure reasons."""
        groups = {line.group_id for line in self.lines if line.blocking}
        return {name for name in self.trajectories if name.rpartition(":")[0] in groups}


SLOTS = 24
"""Number of inboxes."""


def first_of(shape: Shape) -> dict[Role, int]:
    """Return the workers at the beginning: with several cells two executors per cell and a third router."""
    several = shape.cells > 1
    executors, routers = (2 * shape.cells, 3) if several else (3, 2)
    control = {Role.CONTROL: 1} if shape.control else {}
    return {Role.ENVIRONMENT: 3, Role.EXECUTOR: executors, Role.ROUTER: routers, Role.TRAINER: 1, **control}


def cell_of(worker: Worker, cells: int) -> int:
    """Return the initial cell of a worker. Executors replace one another within a cell, which their name gives; other
    workers have one cell."""
    return inbox_slot(str(worker), SLOTS) % cells if worker.role is Role.EXECUTOR else 0


FREEZE_SECONDS = (1.0, 15.0)
AWAY_SECONDS = (0.3, 3.0)
"""Seconds between the end of a worker and the start of its replacement."""
NODE_AWAY_SECONDS = (1.0, 4.0)
SETTLED_SECONDS = {
    Role.ENVIRONMENT: 6.0,
    Role.EXECUTOR: 10.0,
    Role.LENDER: 30.0,
    Role.ROUTER: 6.0,
    Role.TRAINER: 10.0,
    Role.CONTROL: 10.0,
    Role.NODE: 20.0,
}
"""Seconds after a start or a thaw until a worker counts as a possible replacement."""

ROUND: tuple[tuple[Act, Role], ...] = (
    (Act.KILL, Role.ENVIRONMENT),
    (Act.FREEZE, Role.ENVIRONMENT),
    (Act.LEAVE, Role.ENVIRONMENT),
    (Act.START, Role.ENVIRONMENT),
    (Act.KILL, Role.EXECUTOR),
    (Act.FREEZE, Role.EXECUTOR),
    (Act.KILL, Role.ROUTER),
    (Act.FREEZE, Role.ROUTER),
    (Act.KILL, Role.TRAINER),
)
"""Faults of every round. A round of a cluster also kills a node."""
LATER: tuple[tuple[Act, Role], ...] = (
    (Act.FREEZE, Role.TRAINER),
    (Act.LEAVE, Role.EXECUTOR),
    (Act.LEAVE, Role.ROUTER),
    (Act.LEAVE, Role.TRAINER),
)
"""Each round also has one of these faults, in turn."""

LENDER_STAYS: tuple[tuple[Act, Part], ...] = (
    (Act.FREEZE, Part.CORE),
    (Act.KILL, Part.SIDECAR),
    (Act.FREEZE, Part.ALL),
    (Act.FREEZE, Part.SIDECAR),
    (Act.FREEZE, Part.WATCHDOG),
)
LENDER_ENDS: tuple[tuple[Act, Part], ...] = (
    (Act.KILL, Part.ALL),
    (Act.KILL, Part.CORE),
    (Act.LEAVE, Part.ALL),
    (Act.KILL, Part.WATCHDOG),
)
"""A round that has lenders also has one fault of LENDER_STAYS and one of LENDER_ENDS, in turn, and a temporary park."""
PARKED_SECONDS = (2.0, 10.0)

CONTROL = (Act.KILL, Act.FREEZE)
"""A round that has a control app also has these faults."""

LEAVERS: tuple[Role, ...] = (
    *(Role.ENVIRONMENT, Role.ROUTER, Role.ENVIRONMENT, Role.EXECUTOR, Role.ENVIRONMENT, Role.ROUTER),
    *(Role.EXECUTOR, Role.ENVIRONMENT, Role.TRAINER, Role.ENVIRONMENT),
)
"""Workers that are stopped repeatedly if there is no other fault. Most are environment workers, because they rebalance.
"""


@dataclass(slots=True, eq=False)
class _WorkerState:
    worker: Worker
    well_from: float
    """Time from which the worker can replace another."""
    there_from: float
    """Time from which a fault can hit the worker."""


class _RunningWorkers:
    """The running workers over the course of the plan."""

    def __init__(self, shape: Shape, dice: random.Random) -> None:
        self._shape = shape
        self._dice = dice
        self._next = dict.fromkeys(Role, 0)
        self._known = [
            _WorkerState(self._new(role, number % shape.cells if role is Role.EXECUTOR else 0), 0.0, 0.0)
            for role, many in first_of(shape).items()
            for number in range(many)
        ]
        self._known += [_WorkerState(Worker(Role.LENDER, number), 0.0, 0.0) for number in range(shape.lenders)]
        self._known += [_WorkerState(Worker(Role.NODE, number), 0.0, 0.0) for number in range(shape.nodes)]
        self.first = tuple(known.worker for known in self._known if known.worker.role is not Role.NODE)

    def planned_faults(self, at: float, act: Act, role: Role, part: Part) -> Iterator[PlannedFault]:
        """Return the events of one fault of the round: the fault and its end."""
        if act is Act.START:
            yield self._join(at, role)
            return
        while (victim := self._victim(at, role)) is None:
            at += 1.0
        worker = victim.worker
        yield PlannedFault(at, act, worker, part=part)
        if act is Act.PARK:
            yield PlannedFault(at + self._dice.uniform(*PARKED_SECONDS), Act.WAKE, worker)
            return
        if part is Part.SIDECAR and act is Act.KILL:
            victim.there_from = at + SETTLED_SECONDS[Role.EXECUTOR]
            return
        if part is Part.WATCHDOG and act is Act.KILL:
            at += self._dice.uniform(*AWAY_SECONDS)
            yield PlannedFault(at, Act.LEAVE, worker)
        if act is Act.FREEZE:
            at += self._dice.uniform(*FREEZE_SECONDS)
            yield PlannedFault(at, Act.THAW, worker)
            victim.there_from, victim.well_from = at, at + SETTLED_SECONDS[role]
            return
        self._known.remove(victim)
        if act is Act.LEAVE and role is Role.ENVIRONMENT and not self._shape.by_name and not self._shape.leaves:
            return  # other workers take over its homes
        at += self._dice.uniform(*(NODE_AWAY_SECONDS if role is Role.NODE else AWAY_SECONDS))
        replacement = self._replacement(worker)
        there_from = at + SETTLED_SECONDS[role] if role is Role.LENDER else at
        self._known.append(_WorkerState(replacement, at + SETTLED_SECONDS[role], there_from))
        yield PlannedFault(at, Act.START, replacement)

    def _join(self, at: float, role: Role) -> PlannedFault:
        worker = self._new(role)
        self._known.append(_WorkerState(worker, at + SETTLED_SECONDS[role], at))
        return PlannedFault(at, Act.START, worker, joins=True)

    def _victim(self, at: float, role: Role) -> _WorkerState | None:
        there = [known for known in self._known if known.worker.role is role and known.there_from <= at]
        alone = role in (Role.TRAINER, Role.CONTROL, Role.LENDER)
        able = [
            known
            for known in there
            if alone
            or any(
                other is not known and other.well_from <= at
                for other in there
                if cell_of(other.worker, self._shape.cells) == cell_of(known.worker, self._shape.cells)
            )
        ]
        if role is Role.NODE and not all(known.well_from <= at for known in there):
            able = []
        return self._dice.choice(able) if able else None

    def _replacement(self, worker: Worker) -> Worker:
        keeps = self._shape.by_name or worker.role in (Role.TRAINER, Role.CONTROL, Role.NODE, Role.LENDER)
        if worker.role is Role.EXECUTOR and not keeps:
            keeps = self._dice.random() < 0.5  # an inbox is also a name: both cases occur
        return worker if keeps else self._new(worker.role, cell_of(worker, self._shape.cells))

    def _new(self, role: Role, cell: int = 0) -> Worker:
        """Return a new worker; a new executor starts in this cell."""
        while True:
            worker = Worker(role, self._next[role])
            self._next[role] += 1
            if cell_of(worker, self._shape.cells) == cell:
                return worker


_Fault: TypeAlias = tuple[Act, Role, Part]


def _leaves(shape: Shape) -> list[_Fault]:
    leavers = [*islice(cycle(LEAVERS), shape.leaves - shape.lenders), *[Role.LENDER] * shape.lenders]
    return [(Act.LEAVE, role, Part.ALL) for role in leavers]


def _faults(shape: Shape, turn: int) -> list[_Fault]:
    faults = [(act, role, Part.ALL) for act, role in (*ROUND, LATER[turn % len(LATER)])]
    if shape.nodes:
        faults.append((Act.KILL, Role.NODE, Part.ALL))
    if shape.lenders:
        own = (LENDER_STAYS[turn % len(LENDER_STAYS)], LENDER_ENDS[turn % len(LENDER_ENDS)], (Act.PARK, Part.ALL))
        faults += [(act, Role.LENDER, part) for act, part in own]
    if shape.control:
        faults += [(act, Role.CONTROL, Part.ALL) for act in CONTROL]
    return faults


def draw(seed: int, shape: Shape) -> Plan:
    """Return the plan of this seed."""
    dice = random.Random(f"storm {seed}")
    cast = _RunningWorkers(shape, dice)
    planned_faults: list[PlannedFault] = []
    for number in range(shape.rounds):
        deck = _leaves(shape) if shape.leaves else _faults(shape, seed + number)
        dice.shuffle(deck)
        spacing = shape.round_seconds / len(deck)
        for place, (act, role, part) in enumerate(deck):
            at = number * shape.round_seconds + (place + dice.random()) * spacing
            planned_faults += cast.planned_faults(at, act, role, part)
    lines = sorted(Lines(dice, shape).drawn(), key=lambda line: line.at)
    return Plan(
        seed, shape, cast.first, tuple(sorted(planned_faults, key=lambda planned_fault: planned_fault.at)), tuple(lines)
    )
