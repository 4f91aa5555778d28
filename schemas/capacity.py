"""How much a serving worker may lend, as the control app decides it."""

from typing import ClassVar

from schemas.limits import Count, Id, Text
from schemas.record import Record


class CapacityGrant(Record, frozen=True, kw_only=True):
    SCHEMA: ClassVar[str] = "capacity-grant/1"

    worker: Id
    lend: bool
    kv_bytes: Count
    token_budget: Count
    granted_at: float
    reason: Text = ""
