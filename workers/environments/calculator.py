"""The calculator task: work out a sum with a tool that adds two numbers at a time.

Keeps true
- The task is a function of seed and arguments alone.
- The tool is honest: it computes whatever it is asked, right or wrong for the task.
- An answer counts only after the tool was used, so a trajectory has at least 2 turns. One call an operand and the
  answer are `operands + 1` turns; the task ends `SPARE_TURNS` after that at the latest: 12 turns for 8 operands.

Example, with 3 operands
    observation `+7-3+8`
    action `0+7`    observation `7`
    action `7-3`    observation `4`
    action `4*8`    observation `?`     (the tool knows + and - only)
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
"""Turns beyond those that a faultless life needs: room for three mistakes and their repair."""

MOST_OPERANDS = 8

LARGEST_OPERAND = 9
"""Operands are single digits, so that a turn is a handful of characters."""

MALFORMED = "?"
"""What the tool answers when it cannot read an action."""

CALL = re.compile(r"(-?[0-9]{1,4})([+-])([0-9]{1,4})")
ANSWER = re.compile(r"=(-?[0-9]{1,4})")


class CalculatorArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long the sums are."""

    min_operands: Annotated[int, msgspec.Meta(ge=1, le=MOST_OPERANDS)] = 1
    max_operands: Annotated[int, msgspec.Meta(ge=1, le=MOST_OPERANDS)] = MOST_OPERANDS


class State(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Everything a snapshot holds."""

    operands: Annotated[
        list[Annotated[int, msgspec.Meta(ge=-LARGEST_OPERAND, le=LARGEST_OPERAND)]],
        msgspec.Meta(min_length=1, max_length=MOST_OPERANDS),
    ]
    turns: int = 0
    calls: int = 0
    """Actions that the tool could compute."""
    malformed: int = 0
    done: bool = False


class Calculator:
    """One sum. See the module's example."""

    def __init__(self) -> None:
        self._state: State | None = None

    async def reset(self, seed: int, arguments: Mapping[str, JsonValue]) -> str:
        """Draw the sum; return it as signed digits, e.g. `+7-3+8`."""
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
        """Compute one addition, or take the final answer."""
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
        """The state as JSON."""
        if self._state is None:
            raise LifeCycleError("snapshot() needs a running task: call reset() or restore() first")
        return msgspec.json.encode(self._state)

    async def restore(self, state: bytes) -> None:
        """Take a snapshot's state over."""
        try:
            self._state = msgspec.json.decode(state, type=State)
        except msgspec.DecodeError as error:
            raise SnapshotError(f"not a snapshot of the calculator: {error}") from None

    async def close(self) -> None:
        """Forget the task; nothing else is held."""
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
