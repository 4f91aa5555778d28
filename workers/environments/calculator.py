"""The calculator task: compute a sum with a tool that adds two numbers at a time.

Keeps true
- The task is a function of seed and arguments alone.
- The tool computes whatever it is asked, whether or not that helps the task.
- An answer counts only after the tool was used, so a trajectory has at least 2 turns. One call for each operand and the
  answer are `operands + 1` turns; the task ends at most `SPARE_TURNS` turns later: 12 turns for 8 operands.

Example, with 3 operands
    observation `+7-3+8`
    action `0+7`    observation `7`
    action `7-3`    observation `4`
    action `4*8`    observation `?`     (the tool knows only + and -)
    action `4+8`    observation `12`
    action `=12`    done, reward 1
"""

import random
import re
from collections.abc import Mapping
from typing import Annotated

import msgspec

from rose.workers.environments.protocol import EnvironmentArgumentError, JsonValue, LifeCycleError, SnapshotError, Step

SPARE_TURNS = 3
"""Turns beyond the `operands + 1` that a task without mistakes needs: room for three mistakes."""

MOST_OPERANDS = 8

LARGEST_OPERAND = 9
"""Operands have one digit, so that a turn has few characters."""

MALFORMED = "?"
"""Answer of the tool to an action that it cannot read."""

CALL = re.compile(r"(-?[0-9]{1,4})([+-])([0-9]{1,4})")
ANSWER = re.compile(r"=(-?[0-9]{1,4})")


class CalculatorArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds on the number of operands."""

    min_operands: Annotated[int, msgspec.Meta(ge=1, le=MOST_OPERANDS)] = 1
    max_operands: Annotated[int, msgspec.Meta(ge=1, le=MOST_OPERANDS)] = MOST_OPERANDS


class State(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The content of a snapshot."""

    operands: Annotated[
        list[Annotated[int, msgspec.Meta(ge=-LARGEST_OPERAND, le=LARGEST_OPERAND)]],
        msgspec.Meta(min_length=1, max_length=MOST_OPERANDS),
    ]
    turns: int = 0
    calls: int = 0
    """Number of actions that the tool could compute."""
    malformed: int = 0
    done: bool = False


class Calculator:
    """One sum; see the module's example."""

    def __init__(self) -> None:
        self._state: State | None = None

    async def reset(self, seed: int, arguments: Mapping[str, JsonValue]) -> str:
        """Draw the sum and return it as signed digits, e.g. `+7-3+8`. Raises EnvironmentArgumentError."""
        try:
            lengths = msgspec.convert(dict(arguments), CalculatorArguments)
        except msgspec.ValidationError as error:
            raise EnvironmentArgumentError(f"environment 'calculator' does not take these arguments: {error}") from None
        if lengths.min_operands > lengths.max_operands:
            raise EnvironmentArgumentError(
                f"environment 'calculator': min_operands {lengths.min_operands} is above "
                f"max_operands {lengths.max_operands}; swap them"
            )
        draw = random.Random(seed)
        count = draw.randint(lengths.min_operands, lengths.max_operands)
        operands = [draw.choice((1, -1)) * draw.randint(1, LARGEST_OPERAND) for _ in range(count)]
        self._state = State(operands=operands)
        return "".join(f"{operand:+d}" for operand in operands)

    async def step(self, action: str) -> Step:
        """Compute one addition or subtraction, or check the final answer."""
        state = self._state
        if state is None or state.done:
            raise LifeCycleError("step() needs a running task: call reset() or restore() first")
        state.turns += 1
        if (answer := ANSWER.fullmatch(action)) and state.calls:
            right = int(answer[1]) == sum(state.operands)
            return self._last(state, "right" if right else "wrong")
        if call := CALL.fullmatch(action):
            state.calls += 1
            left, sign, right_operand = int(call[1]), call[2], int(call[3])
            observation = str(left + right_operand if sign == "+" else left - right_operand)
        else:
            state.malformed += 1
            observation = MALFORMED
        if state.turns >= len(state.operands) + 1 + SPARE_TURNS:
            return self._last(state, "out of turns")
        return Step(observation=observation, reward=0.0, done=False, success=False, info=_info(state, "open"))

    async def snapshot(self) -> bytes:
        """The state encoded as JSON. Raises LifeCycleError without a task."""
        if self._state is None:
            raise LifeCycleError("snapshot() needs a running task: call reset() or restore() first")
        return msgspec.json.encode(self._state)

    async def restore(self, state: bytes) -> None:
        """Restore the state of a snapshot. Raises SnapshotError."""
        try:
            self._state = msgspec.json.decode(state, type=State)
        except msgspec.DecodeError as error:
            raise SnapshotError(f"not a snapshot of the calculator: {error}") from None

    async def close(self) -> None:
        """Discard the task."""
        self._state = None

    def _last(self, state: State, ending: str) -> Step:
        state.done = True
        right = ending == "right"
        return Step(observation=ending, reward=float(right), done=True, success=right, info=_info(state, ending))


def _info(state: State, ending: str) -> dict[str, str | float | int | bool]:
    return {
        "operands": len(state.operands),
        "turns": state.turns,
        "calls": state.calls,
        "malformed": state.malformed,
        "ending": ending,
    }
