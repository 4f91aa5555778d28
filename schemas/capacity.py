"""How much a serving worker may lend, for how long, and to whom.

Keeps true
- A grant with a lease holds for so long after its lender has read it, by the lender's own clock, unless it is renewed.
  One without a lease is by hand: it has a key of its own, and overrides the leased ones until it is deleted.
- A grant names the RL job that the worker lends to: at most one on a serving worker.
"""

from typing import Annotated, ClassVar

from msgspec import Meta

from schemas.limits import Count, Id, Moment, Text
from schemas.record import Record

LONGEST_LEASE_SECONDS = 3600.0

BY_HAND = "/by-hand"
"""What the key of a grant by hand has behind the worker's name."""

Job = Annotated[str, Meta(pattern=r"^([A-Za-z0-9._:-]{1,128})?\Z")]
"""`namespace:run`; empty: whichever reads this."""


class CapacityGrant(Record, frozen=True, kw_only=True):
    SCHEMA: ClassVar[str] = "capacity-grant/2"

    worker: Id
    lend: bool
    """False parks it."""
    kv_bytes: Count
    """Of its KV cache that turns may hold; 0 sets no limit."""
    token_budget: Count
    """Context and new tokens that turns may hold; 0 sets no limit."""
    granted_at: Moment
    """Unix seconds of whoever granted it: for people, and compared with no clock."""
    reason: Text = ""
    lease_seconds: Annotated[float, Meta(ge=0, le=LONGEST_LEASE_SECONDS)] = 0.0
    """For which it holds, from when its lender reads it; 0: until it is replaced or deleted."""
    job: Job = ""
    """The RL job that the worker may lend to."""


def key_by_hand(worker: str) -> str:
    """The key of a grant by hand; leased ones have the worker's name alone."""
    return f"{worker}{BY_HAND}"
