"""Recorder of a simulation: it keeps what a trace and a report show, while the simulation runs.

Keeps true
- Recording changes nothing in the simulation.
- A recorder keeps at most `most` entries, the first ones. `left_out` counts the others.
- Equal steps of serving that follow each other without a gap are one entry.

Units: seconds of the simulation.
"""

from dataclasses import dataclass
from typing import NamedTuple

from rose.pipeline.simulation.engine import EngineResult
from rose.pipeline.simulation.step_plan import ROUNDING, Plan
from rose.schemas.turns import TurnKey, TurnOutcome

MOST_ENTRIES = 300_000
"""About as many as a trace viewer shows without delay."""


@dataclass(slots=True)
class ServingSteps:
    """Steps of a serving engine without a gap between them."""

    worker: str
    began_at: float
    ended_at: float
    steps: int
    decoding: int
    """Requests that each of the steps decodes."""
    prompt_tokens: int
    """Prompt tokens that the steps compute, all together."""


class GuestRun(NamedTuple):
    """A time in which a guest computed."""

    worker: str
    began_at: float
    ended_at: float


class HeldTurn(NamedTuple):
    """One attempt at a turn that an executor has answered."""

    worker: str
    key: TurnKey
    received_at: float
    result: EngineResult
    version: int
    outcome: TurnOutcome


class Swap(NamedTuple):
    """An executor serves a policy version from now on."""

    worker: str
    version: int
    at: float
    seconds: float
    """Pause of the engine."""


class MemoryDecision(NamedTuple):
    """Serving takes KV memory back from the guest, or the guest is frozen or no longer frozen."""

    worker: str
    at: float
    cuts: int
    """Cuts of this decision."""
    frozen: bool
    """Whether the guest may not grow from now on."""


class Answered(NamedTuple):
    """A request of a user has ended."""

    worker: str
    result: EngineResult


Entry = ServingSteps | GuestRun | HeldTurn | Swap | MemoryDecision | Answered


class Recorder:
    """Keeps entries in the order in which they ended."""

    def __init__(self, most: int = MOST_ENTRIES) -> None:
        self.entries: list[Entry] = []
        self.left_out = 0
        self._most = most
        self._newest: dict[str, ServingSteps] = {}

    def add(self, entry: Entry) -> None:
        """Keep an entry if there is room."""
        if len(self.entries) < self._most:
            self.entries.append(entry)
        else:
            self.left_out += 1

    def on_serving_steps(self, worker: str, plan: Plan, steps: int) -> None:
        """Keep the first steps of a plan."""
        ended_at = plan.began + plan.seconds(steps)
        prompt_tokens = (plan.tokens - plan.decoding) * steps
        newest = self._newest.get(worker)
        if (
            newest is not None
            and plan.began - newest.ended_at < ROUNDING
            and newest.decoding == plan.decoding
            and bool(newest.prompt_tokens) == bool(prompt_tokens)
        ):
            newest.ended_at, newest.steps = ended_at, newest.steps + steps
            newest.prompt_tokens += prompt_tokens
            return
        entry = ServingSteps(worker, plan.began, ended_at, steps, plan.decoding, prompt_tokens)
        self._newest[worker] = entry
        self.add(entry)

    def on_guest_paused(self, worker: str, resumed_at: float, paused_at: float) -> None:
        """Keep the time in which a guest computed."""
        if paused_at > resumed_at:
            self.add(GuestRun(worker, resumed_at, paused_at))
