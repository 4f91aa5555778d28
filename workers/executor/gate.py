"""Whether an executor takes turns at this moment, and why not.

Keeps true
- Closed, it takes nothing on, and holds nothing for long: what it holds goes back.
- Only to one that is drained is time left, to end what runs. Its guest is told to park once that is over.
- To leave for another cell is to close too, but tells the engine nothing: it stays as it is.
- A dedicated executor's gate is open unless it is drained; its engine is told nothing of it.

Pure, but for the leave that it asks for.
"""

from collections.abc import Callable
from dataclasses import dataclass

from workers.executor.words import NO_LIMIT, Park, Tick, Wake


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Whether an executor may take turns at this moment, and how much a lender may lend."""

    refused: str = ""
    """Why it may not; empty where it may."""
    finishing: bool = False
    """Though it may not, the turns that run may go on for now."""
    kv_bytes: int = 0
    """That turns may hold; 0 sets no limit."""
    token_budget: int = 0
    cell: int | None = None
    """That it is to be in; None: where it is."""


FREELY = Leave()
"""As much as it has."""

Granted = Callable[[], Leave]
"""What an executor may do now."""

HELD_SECONDS = 5.0
"""Turns whose engine might not compute for so long go back: elsewhere they go on from where they are."""


class Gate:
    """An executor's."""

    def __init__(self, granted: Granted, *, lends: bool) -> None:
        self.lends = lends
        """Whether its engine is a guest, that parks and wakes."""
        self.reason = ""
        """Why no turn is taken; empty where turns are."""
        self.finishing = False
        """Though none is taken, those that run go on."""
        self.budget_tokens = 0
        """That turns may hold."""
        self.cell = granted().cell
        """That it is to be in; None: where it is."""
        self._granted = granted
        self._told: Wake | Park | None = None
        """What the guest was told last."""

    @property
    def shut(self) -> bool:
        """Whether what runs goes back as well."""
        return bool(self.reason) and not self.finishing

    def follow(self, tick: Tick, *, busy: bool, leaving: str = "") -> Wake | Park | None:
        """Look again, the engine's newest tick at hand; returns what the engine is to be told.

        `busy`: turns run; `leaving`: for where, if it is on its way to another cell.
        """
        leave = self._granted()
        self.cell, self.budget_tokens = leave.cell, budget_tokens(tick, leave)
        self.reason = leave.refused or unable(tick) or leaving
        self.finishing = leave.finishing and busy and not unable(tick)
        order = told_of(leave)
        if not self.lends or self.finishing or order == self._told:
            return None
        self._told = order
        return order


def told_of(leave: Leave) -> Wake | Park:
    """What it is to a guest."""
    return Park() if leave.refused else Wake(leave.kv_bytes or NO_LIMIT)


def unable(tick: Tick) -> str:
    """Why its engine can run no turn; empty where it can."""
    if tick.parked:
        return tick.parked
    if tick.held_seconds >= HELD_SECONDS:
        return f"serving left it no moment to compute in for {HELD_SECONDS:.0f} s"
    return ""


def budget_tokens(tick: Tick, leave: Leave) -> int:
    """Tokens that turns may hold: as many as the engine has room for, and no more than its leave says."""
    tokens = tick.kv_bytes_total // tick.kv_bytes_per_token
    if leave.kv_bytes:
        tokens = min(tokens, leave.kv_bytes // tick.kv_bytes_per_token)
    return min(tokens, leave.token_budget) if leave.token_budget else tokens
