"""A storm as a plan: every fault and every line that is produced, with its time, drawn from a seed. Pure.

Keeps true
- The same seed and shape give the same plan.
- Every kind of fault is in every round, in an order and at moments that the seed draws.
- Of environment workers, executors and routers one more was started well before, and is left alone, whenever one is
  frozen, killed or asked to leave; one broker node is down at a time. A lender comes beside the dedicated executors.

Times are seconds since the storm began.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

BLOCKING = "storm_environments:Blocking"
"""The environment of trajectories that must end as failures of the infrastructure."""


class Role(Enum):
    ENVIRONMENT = "environment"
    EXECUTOR = "executor"
    LENDER = "lender"
    """A serving engine with a guest: an executor that comes and goes."""
    ROUTER = "router"
    TRAINER = "trainer"
    NODE = "node"
    """Of the broker's cluster."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One name under which a process runs; it may run more than once."""

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
    """By a grant."""
    WAKE = "wake"


class Part(Enum):
    """The processes of a lending server, each by what its name begins with."""

    ALL = ""
    CORE = "VLLM::Engin"
    """The server ends as well."""
    KEEPER = "keeper"
    """The server goes on and lends nothing, so it is asked to leave."""
    BESIDE = "beside"
    """The keeper starts it again."""


@dataclass(frozen=True, slots=True)
class Deed:
    """Something done to a worker."""

    at: float
    act: Act
    worker: Worker
    joins: bool = False
    """It starts beside all others, in nobody's place."""
    part: Part = Part.ALL
    """Of a lender, the process that it is done to."""


class Sort(Enum):
    """What must become of a line."""

    GOOD = "good"
    REPEATED = "repeated"
    """The group id is that of a good line before: one of them opens the group, every other is a dead letter."""
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Line:
    """One record that kcat produces to the prompts."""

    at: float
    sort: Sort
    mark: str
    """Stands in the value, in no other line, and survives whatever is done to it."""
    value: bytes
    key: str | None = None
    group_id: str = ""
    group_size: int = 0
    blocking: bool = False
    refused: bool = False
    """It is a prompt, which nobody can carry out: a group that was asked for and ended without a trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How large a storm is."""

    nodes: int
    """Of the broker's cluster; 0: a broker that is left alone, and whose clients return by name."""
    lenders: int = 0
    rounds: int = 1
    round_seconds: float = 50.0
    groups_per_second: float = 1.5
    group_size: int = 4
    blocking_groups: int = 2

    @property
    def seconds(self) -> float:
        return self.rounds * self.round_seconds

    @property
    def by_name(self) -> bool:
        """Who was killed returns under its name; else under a new one where its role allows."""
        return self.nodes == 0


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    shape: Shape
    first: tuple[Worker, ...]
    """Run before the storm begins."""
    deeds: tuple[Deed, ...]
    lines: tuple[Line, ...]

    @property
    def groups(self) -> dict[str, int]:
        """Every group asked for and its size."""
        return {line.group_id: line.group_size for line in self.lines if line.sort is Sort.GOOD}

    @property
    def refused(self) -> int:
        """How many groups are asked for that cannot be opened."""
        return sum(line.refused for line in self.lines)

    @property
    def trajectories(self) -> set[str]:
        """Every trajectory asked for."""
        return {f"{group_id}:{index}" for group_id, size in self.groups.items() for index in range(size)}

    @property
    def blocked(self) -> set[str]:
        """The trajectories that the infrastructure must fail."""
        groups = {line.group_id for line in self.lines if line.blocking}
        return {name for name in self.trajectories if name.rpartition(":")[0] in groups}


FIRST = {Role.ENVIRONMENT: 3, Role.EXECUTOR: 3, Role.ROUTER: 2, Role.TRAINER: 1}
"""Who runs when the storm begins."""

FREEZE_SECONDS = (1.0, 15.0)
AWAY_SECONDS = (0.3, 3.0)
"""Between a worker's end and the start of who takes its place."""
NODE_AWAY_SECONDS = (1.0, 4.0)
SETTLED_SECONDS = {
    Role.ENVIRONMENT: 6.0,
    Role.EXECUTOR: 10.0,
    Role.LENDER: 30.0,
    Role.ROUTER: 6.0,
    Role.TRAINER: 10.0,
    Role.NODE: 20.0,
}
"""So long after its start, or a thaw, a worker counts as one that can stand in for another."""

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
"""The faults of every round; with a cluster, one of its nodes is killed besides."""
LATER: tuple[tuple[Act, Role], ...] = (
    (Act.FREEZE, Role.TRAINER),
    (Act.LEAVE, Role.EXECUTOR),
    (Act.LEAVE, Role.ROUTER),
    (Act.LEAVE, Role.TRAINER),
)
"""One of these, in turn, joins each round."""

LENDER_STAYS: tuple[tuple[Act, Part], ...] = (
    (Act.FREEZE, Part.CORE),
    (Act.KILL, Part.BESIDE),
    (Act.FREEZE, Part.ALL),
    (Act.FREEZE, Part.BESIDE),
    (Act.FREEZE, Part.KEEPER),
)
LENDER_ENDS: tuple[tuple[Act, Part], ...] = (
    (Act.KILL, Part.ALL),
    (Act.KILL, Part.CORE),
    (Act.LEAVE, Part.ALL),
    (Act.KILL, Part.KEEPER),
)
"""With lenders, one of each of these, in turn, joins each round, and a grant that parks one for a while."""
PARKED_SECONDS = (2.0, 10.0)


@dataclass(slots=True, eq=False)
class _Known:
    worker: Worker
    well_from: float
    """Then it can stand in for another."""
    there_from: float
    """Then something can be done to it."""


class _Cast:
    """Who runs when, as the plan goes."""

    def __init__(self, shape: Shape, dice: random.Random) -> None:
        self._shape = shape
        self._dice = dice
        self._known = [_Known(Worker(role, number), 0.0, 0.0) for role, many in FIRST.items() for number in range(many)]
        self._known += [_Known(Worker(Role.LENDER, number), 0.0, 0.0) for number in range(shape.lenders)]
        self._known += [_Known(Worker(Role.NODE, number), 0.0, 0.0) for number in range(shape.nodes)]
        self._next = dict(FIRST)
        self.first = tuple(known.worker for known in self._known if known.worker.role is not Role.NODE)

    def deeds(self, at: float, act: Act, role: Role, part: Part) -> Iterator[Deed]:
        """What happens for one fault of the round: the fault and its end."""
        if act is Act.START:
            yield self._join(at, role)
            return
        while (victim := self._victim(at, role)) is None:
            at += 1.0
        worker = victim.worker
        yield Deed(at, act, worker, part=part)
        if act is Act.PARK:
            yield Deed(at + self._dice.uniform(*PARKED_SECONDS), Act.WAKE, worker)
            return
        if part is Part.BESIDE and act is Act.KILL:
            victim.there_from = at + SETTLED_SECONDS[Role.EXECUTOR]
            return
        if part is Part.KEEPER and act is Act.KILL:
            at += self._dice.uniform(*AWAY_SECONDS)
            yield Deed(at, Act.LEAVE, worker)
        if act is Act.FREEZE:
            at += self._dice.uniform(*FREEZE_SECONDS)
            yield Deed(at, Act.THAW, worker)
            victim.there_from, victim.well_from = at, at + SETTLED_SECONDS[role]
            return
        self._known.remove(victim)
        if act is Act.LEAVE and role is Role.ENVIRONMENT and not self._shape.by_name:
            return  # others take its homes
        at += self._dice.uniform(*(NODE_AWAY_SECONDS if role is Role.NODE else AWAY_SECONDS))
        replacement = self._replacement(worker)
        there_from = at + SETTLED_SECONDS[role] if role is Role.LENDER else at
        self._known.append(_Known(replacement, at + SETTLED_SECONDS[role], there_from))
        yield Deed(at, Act.START, replacement)

    def _join(self, at: float, role: Role) -> Deed:
        worker = self._new(role)
        self._known.append(_Known(worker, at + SETTLED_SECONDS[role], at))
        return Deed(at, Act.START, worker, joins=True)

    def _victim(self, at: float, role: Role) -> _Known | None:
        there = [known for known in self._known if known.worker.role is role and known.there_from <= at]
        alone = role in (Role.TRAINER, Role.LENDER)
        able = [
            known for known in there if alone or any(other is not known and other.well_from <= at for other in there)
        ]
        if role is Role.NODE and not all(known.well_from <= at for known in there):
            able = []
        return self._dice.choice(able) if able else None

    def _replacement(self, worker: Worker) -> Worker:
        keeps = self._shape.by_name or worker.role in (Role.TRAINER, Role.NODE, Role.LENDER)
        if worker.role is Role.EXECUTOR and not keeps:
            keeps = self._dice.random() < 0.5  # an inbox is a name, too: both happen
        return worker if keeps else self._new(worker.role)

    def _new(self, role: Role) -> Worker:
        number = self._next[role]
        self._next[role] = number + 1
        return Worker(role, number)


def draw(seed: int, shape: Shape) -> Plan:
    """The plan of this seed."""
    dice = random.Random(f"storm {seed}")
    cast = _Cast(shape, dice)
    deeds: list[Deed] = []
    for number in range(shape.rounds):
        turn = seed + number
        deck = [(act, role, Part.ALL) for act, role in (*ROUND, LATER[turn % len(LATER)])]
        if shape.nodes:
            deck.append((Act.KILL, Role.NODE, Part.ALL))
        if shape.lenders:
            faults = (
                LENDER_STAYS[turn % len(LENDER_STAYS)],
                LENDER_ENDS[turn % len(LENDER_ENDS)],
                (Act.PARK, Part.ALL),
            )
            deck += [(act, Role.LENDER, part) for act, part in faults]
        dice.shuffle(deck)
        spacing = shape.round_seconds / len(deck)
        for place, (act, role, part) in enumerate(deck):
            at = number * shape.round_seconds + (place + dice.random()) * spacing
            deeds += cast.deeds(at, act, role, part)
    lines = sorted(_Lines(dice, shape).drawn(), key=lambda line: line.at)
    return Plan(seed, shape, cast.first, tuple(sorted(deeds, key=lambda deed: deed.at)), tuple(lines))


class _Lines:
    """Prompts good and bad."""

    def __init__(self, dice: random.Random, shape: Shape) -> None:
        self._dice = dice
        self._shape = shape
        self._marks = 0

    def drawn(self) -> Iterator[Line]:
        """All lines, in no order."""
        seconds = self._shape.seconds
        good = [self._good(number) for number in range(round(seconds * self._shape.groups_per_second))]
        good += [self._good(len(good) + number, blocking=True) for number in range(self._shape.blocking_groups)]
        yield from good
        for number in range(BAD_LINES * self._shape.rounds):
            yield self._bad(number)
            yield self._repeated(self._dice.choice(good))

    def _good(self, number: int, *, blocking: bool = False) -> Line:
        dice, group_id = self._dice, f"group-{number}"
        size = 2 if blocking else self._shape.group_size
        at = max(0.0, dice.uniform(-0.2, 1.0)) * self._shape.seconds  # a sixth of them wait when the storm begins
        mark = self._mark()
        environment = BLOCKING if blocking else "calculator"
        value = self._prompt(mark, group_id, size, environment)
        key = group_id if dice.random() < 0.7 else None
        return Line(at, Sort.GOOD, mark, value, key, group_id, size, blocking)

    def _repeated(self, line: Line) -> Line:
        mark = self._mark()
        key = self._dice.choice((line.group_id, None, f"another-{mark}"))
        at = min(line.at + self._dice.uniform(0.1, self._shape.seconds), self._shape.seconds)
        value = line.value.replace(line.mark.encode(), mark.encode())
        return Line(at, Sort.REPEATED, mark, value, key, line.group_id, line.group_size, line.blocking)

    def _bad(self, number: int) -> Line:
        mark = self._mark()
        spoil = (*_NO_PROMPTS, *_REFUSED)[number % BAD_LINES]
        value = spoil(self._prompt(mark, f"bad-{number}", 2, "calculator"), mark)
        at = self._dice.uniform(0.0, self._shape.seconds)
        key = self._dice.choice((None, f"bad-{number}", "k" * 127))
        return Line(at, Sort.BAD, mark, value, key, refused=spoil in _REFUSED)

    def _prompt(self, mark: str, group_id: str, size: int, environment: str) -> bytes:
        prompt: dict[str, object] = {
            "group_id": group_id,
            "group_size": size,
            "environment": environment,
            "seed": self._dice.randrange(2**31),
            "note": mark,
        }
        if environment == "calculator":
            prompt["arguments"] = {"min_operands": 2, "max_operands": 5}
        return json.dumps(prompt).encode()

    def _mark(self) -> str:
        self._marks += 1
        return f"mark-{self._marks}."


def _with(prompt: bytes, **fields: object) -> bytes:
    return json.dumps(json.loads(prompt) | fields).encode()


_FLOATS = b"[" + b"1.5, " * 170_000 + b"1.5]"
"""850 KB of JSON, 1.5 MB of MessagePack."""

_Spoil: TypeAlias = Callable[[bytes, str], bytes]
"""Makes a bad line of a good prompt and its mark."""

_NO_PROMPTS: tuple[_Spoil, ...] = (
    lambda prompt, mark: b"this is no JSON " + mark.encode(),
    lambda prompt, mark: prompt[:-1],
    lambda prompt, mark: b"\xff\xfe" + prompt,
    lambda prompt, mark: json.dumps([mark]).encode(),
    lambda prompt, mark: _with(prompt, group_size="eight"),
    lambda prompt, mark: _with(prompt, group_size=0),
    lambda prompt, mark: _with(prompt, seed=2**64),
    lambda prompt, mark: _with(prompt, group_id=f"{mark:x<127}"),
    lambda prompt, mark: _with(prompt, group_id="a group/with a slash"),
)
_REFUSED: tuple[_Spoil, ...] = (
    lambda prompt, mark: _with(prompt, environment="nobody_has_this:Environment"),
    lambda prompt, mark: _with(prompt, arguments={"max_operands": 2**70}),
    lambda prompt, mark: _with(prompt, arguments={"unknown": "?"}).replace(b'"?"', _FLOATS),
)
BAD_LINES = len(_NO_PROMPTS) + len(_REFUSED)
"""Of each round, and as many repeated prompts: every kind of badness is there."""
