"""How much a serving worker may lend. The newest grant of a worker counts; one without any lends all that it has."""

from typing import ClassVar

from schemas.limits import Count, Id, Moment, Text
from schemas.record import Record


class CapacityGrant(Record, frozen=True, kw_only=True):
    SCHEMA: ClassVar[str] = "capacity-grant/1"

    worker: Id
    lend: bool
    """False parks it."""
    kv_bytes: Count
    """Of its KV cache that turns may hold; 0 sets no limit."""
    token_budget: Count
    """Context and new tokens that turns may hold; 0 sets no limit."""
    granted_at: Moment
    """Unix seconds of whoever granted it."""
    reason: Text = ""
