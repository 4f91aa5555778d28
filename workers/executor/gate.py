"""Whether an executor takes turns at this moment, and why not.

Keeps true: closed, it holds nothing for long: what it holds goes back, and nothing more is taken on. A dedicated
executor's gate is always open.

Pure, but for the grant that it asks for.
"""

from collections.abc import Callable

from schemas.capacity import CapacityGrant
from workers.executor.words import NO_LIMIT, Park, Tick, Wake

Granted = Callable[[], CapacityGrant | None]
"""The newest grant of this executor; None while there is none."""

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
        grant = self._granted() if self._granted is not None else None
        self.reason, self.budget_tokens = why_closed(tick, grant), budget_tokens(tick, grant)
        order = told_of(grant)
        if not self.lends or order == self._told:
            return None
        self._told = order
        return order


def told_of(grant: CapacityGrant | None) -> Wake | Park:
    """What a grant is to a guest."""
    if grant is None:
        return Wake()
    return Wake(grant.kv_bytes or NO_LIMIT) if grant.lend else Park()


def why_closed(tick: Tick, grant: CapacityGrant | None) -> str:
    """Why no turn is taken; empty where turns are."""
    if grant is not None and not grant.lend:
        return f"a grant parked it{_because(grant.reason)}"
    if tick.parked:
        return tick.parked
    if tick.held_seconds >= HELD_SECONDS:
        return f"serving left it no moment to compute in for {HELD_SECONDS:.0f} s"
    return ""


def budget_tokens(tick: Tick, grant: CapacityGrant | None) -> int:
    """Tokens that turns may hold: as many as the engine has room for, and no more than the grant says."""
    tokens = tick.kv_bytes_total // tick.kv_bytes_per_token
    if grant is not None and grant.kv_bytes:
        tokens = min(tokens, grant.kv_bytes // tick.kv_bytes_per_token)
    if grant is not None and grant.token_budget:
        tokens = min(tokens, grant.token_budget)
    return tokens


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""
