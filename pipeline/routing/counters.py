"""Counts of a router's events."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Counts of events since the start. Counts only grow."""

    requested: int = 0
    """Turns accepted."""
    finished: int = 0
    failed: int = 0
    """Turns given up by the router."""
    withdrawn: int = 0
    """Turns whose request was withdrawn before they finished."""
    dispatched: int = 0
    reissued: int = 0
    """Times that a turn was queued again."""
    late: int = 0
    """Results of executions that no longer mattered."""
    duplicate: int = 0
    """Requests for turns already known."""
    lost: int = 0
    """Dispatches that an executor with heartbeats did not list."""
    context_missing: int = 0
    """Times that a turn waited for an anchor."""
    overtaken: int = 0
    """Turns finished by the request for the next one, which was read before their result."""
