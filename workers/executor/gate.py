"""Whether an executor takes turns at this moment, and why not.

Keeps true: closed, it holds nothing for long: what it holds goes back, and nothing more is taken on. A dedicated
executor's gate is always open.

Pure, but for the leave that it asks for.
"""

from collections.abc import Callable
from dataclasses import dataclass

from workers.executor.words import NO_LIMIT, Park, Tick, Wake


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Whether a lender may lend at this moment, and how much."""

    refused: str = ""
    """Why it may not; empty where it may."""
    kv_bytes: int = 0
    """That turns may hold; 0 sets no limit."""
    token_budget: int = 0


FREELY = Leave()
"""As much as it has."""

Granted = Callable[[], Leave]
"""What a lender may do now."""

HELD_SECONDS = 5.0
"""Turns whose engine might not compute for so long go back: elsewhere they go on from where they are."""


class Gate:
    """An executor's."""

    def __init__(self, granted: Granted | None) -> None:
        """`granted`: of a lender alone."""
        self.lends = granted is not None
        """Whether its engine is a guest, that parks and wakes."""
        self.reason = ""
        """Why no turn is taken; empty where turns are."""
        self.budget_tokens = 0
        """That turns may hold."""
        self._granted = granted
        self._told: Wake | Park | None = None
        """What the guest was told last."""

    def follow(self, tick: Tick) -> Wake | Park | None:
        """Look again, the engine's newest tick at hand; returns what the engine is to be told."""
        leave = FREELY if self._granted is None else self._granted()
        self.reason, self.budget_tokens = why_closed(tick, leave), budget_tokens(tick, leave)
        order = told_of(leave)
        if not self.lends or order == self._told:
            return None
        self._told = order
        return order


def told_of(leave: Leave) -> Wake | Park:
    """What it is to a guest."""
    return Park() if leave.refused else Wake(leave.kv_bytes or NO_LIMIT)


def why_closed(tick: Tick, leave: Leave) -> str:
    """Why no turn is taken; empty where turns are."""
    if leave.refused or tick.parked:
        return leave.refused or tick.parked
    if tick.held_seconds >= HELD_SECONDS:
        return f"serving left it no moment to compute in for {HELD_SECONDS:.0f} s"
    return ""


def budget_tokens(tick: Tick, leave: Leave) -> int:
    """Tokens that turns may hold: as many as the engine has room for, and no more than its leave says."""
    tokens = tick.kv_bytes_total // tick.kv_bytes_per_token
    if leave.kv_bytes:
        tokens = min(tokens, leave.kv_bytes // tick.kv_bytes_per_token)
    return min(tokens, leave.token_budget) if leave.token_budget else tokens
