"""What a router's core has counted; `metrics` says it to others."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """What has happened since the start. All only grow."""

    requested: int = 0
    """Turns taken in."""
    finished: int = 0
    failed: int = 0
    """Turns given up by the router."""
    dispatched: int = 0
    reissued: int = 0
    """Times that a turn waited again."""
    late: int = 0
    """Results of executions that no longer mattered."""
    duplicate: int = 0
    """Requests for turns already known."""
    lost: int = 0
    """Dispatches that a living executor did not hold."""
    torn: int = 0
    """Times that a turn waited for an anchor."""
    overtaken: int = 0
    """Turns finished by the request for the next one, which was read before their result."""
