"""Whether an executor takes turns at this moment, and why not.

Keeps true: closed, it holds nothing for long: what it holds goes back, and nothing more is taken on. A dedicated
executor's gate is always open.

Pure.
"""

from collections.abc import Callable

from schemas.capacity import CapacityGrant
from workers.executor.words import Tick

Granted = Callable[[], CapacityGrant | None]
"""The newest grant of this executor; None while there is none."""

HELD_SECONDS = 5.0
"""Turns whose engine might not compute for so long go back: elsewhere they go on from where they are."""


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
