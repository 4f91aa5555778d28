"""Records that kcat produces to the prompts in a storm: valid, invalid and repeated lines, drawn from a seed. Pure.

Keeps true: a line is identified by its mark, which survives every transformation.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from tests.support.storm.shape import Shape

BLOCKING = "storm_environments:Blocking"
"""The environment of trajectories that must end as failures of the infrastructure."""
SANDBOXED = "storm_environments:Sandboxed"
"""The environment of one in SANDBOXED_EVERY groups: a sandbox that must not lose what its commands have written."""
SANDBOXED_EVERY = 4


class LineKind(Enum):
    """Expected fate of a line."""

    GOOD = "good"
    REPEATED = "repeated"
    """The group id equals that of an earlier valid line: one line opens the group, every other line is dead-lettered.
    """
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Line:
    """One record that kcat produces to the prompts."""

    at: float
    sort: LineKind
    mark: str
    """A unique part of the value that survives every transformation."""
    value: bytes
    key: str | None = None
    group_id: str = ""
    group_size: int = 0
    blocking: bool = False
    refused: bool = False
    """The line is a valid prompt that cannot be executed: its group is requested and ends without a trajectory."""


class Lines:
    """Generator of valid and invalid prompts."""

    def __init__(self, dice: random.Random, shape: Shape) -> None:
        self._dice = dice
        self._shape = shape
        self._marks = 0

    def drawn(self) -> Iterator[Line]:
        """Return all lines, unordered."""
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
        at = max(0.0, dice.uniform(-0.2, 1.0)) * self._shape.seconds  # a sixth of the lines wait when the storm begins
        mark = self._mark()
        sandboxed = self._shape.sandboxes and number % SANDBOXED_EVERY == 0
        environment = BLOCKING if blocking else SANDBOXED if sandboxed else "calculator"
        value = self._prompt(mark, group_id, size, environment)
        key = group_id if dice.random() < 0.7 else None
        return Line(at, LineKind.GOOD, mark, value, key, group_id, size, blocking)

    def _repeated(self, line: Line) -> Line:
        mark = self._mark()
        key = self._dice.choice((line.group_id, None, f"another-{mark}"))
        at = min(line.at + self._dice.uniform(0.1, self._shape.seconds), self._shape.seconds)
        value = line.value.replace(line.mark.encode(), mark.encode())
        return Line(at, LineKind.REPEATED, mark, value, key, line.group_id, line.group_size, line.blocking)

    def _bad(self, number: int) -> Line:
        mark = self._mark()
        spoil = (*_NO_PROMPTS, *_REFUSED)[number % BAD_LINES]
        value = spoil(self._prompt(mark, f"bad-{number}", 2, "calculator"), mark)
        at = self._dice.uniform(0.0, self._shape.seconds)
        key = self._dice.choice((None, f"bad-{number}", "k" * 127))
        return Line(at, LineKind.BAD, mark, value, key, refused=spoil in _REFUSED)

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
"""Makes an invalid line from a valid prompt and its mark."""

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
"""Number of invalid lines per round, and of repeated prompts. Each kind of invalid line occurs."""
