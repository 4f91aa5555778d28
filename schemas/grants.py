"""Grants: how much a serving worker may lend, how long and to which job; drains of workers; cells of workers.

Keeps true
- The source of a grant is in its key, and the newest grant of each source counts. So a renewal cannot override an
  operator, and after the end of a drain the earlier manual grant holds again.
- A grant with a lease holds for the time of the lease after its lender has read the grant, by the lender's own clock,
  unless the grant is renewed. A manual grant overrides it until the manual grant is deleted.
- A drain overrides both. Every executor can be drained, also an executor that lends nothing.
- A grant names the RL job that the worker lends to: at most one on a serving worker.
- The cell of a worker can be set for every executor, under a separate key. The setting holds without renewal until
  another cell is set. An executor without the setting stays in its cell.

Example:
    rl-executor-0            lend, for 30 s
    rl-executor-0/by-hand    park                             -> it is parked
    rl-executor-0/drain      take nothing, end in 60 s        -> it is drained, until this is deleted
    rl-executor-0/cell       cell 1                           -> it goes there, and is drained there as well
"""

from enum import Enum
from typing import Annotated, ClassVar

from msgspec import Meta

from rose.schemas.cells import Cell
from rose.schemas.limits import Count, Id, Moment, Text
from rose.schemas.record import Record
from rose.schemas.setting_bounds import MAX_FINISH_SECONDS

MAX_LEASE_SECONDS = 3600.0


class GrantSource(Enum):
    """Source of a grant. The value is the part of the key behind the worker's name."""

    LEASED = ""
    """The control app, which decides whether a lender lends."""
    BY_HAND = "/by-hand"
    """An operator, who decides whether and how much a lender lends."""
    DRAIN = "/drain"
    """An operator who drains the worker: it takes no turns, whatever other grants allow."""
    CELL = "/cell"
    """The control app, which sets the cell of the worker; this says nothing about lending."""


Job = Annotated[str, Meta(pattern=r"^([A-Za-z0-9._:-]{1,128})?\Z")]
"""RL job, `namespace:run`; empty: every job that reads the grant."""


class CapacityGrant(Record, frozen=True, kw_only=True):
    """A grant of one source for one worker. The newest record of a key holds; a tombstone deletes the grant."""

    SCHEMA: ClassVar[str] = "capacity-grant/4"

    worker: Id
    lend: bool
    """Whether the worker lends; False parks it."""
    kv_bytes: Count
    """Bytes of the worker's KV cache that turns may hold; 0 sets no limit."""
    token_budget: Count
    """Context and new tokens that turns may hold; 0 sets no limit."""
    granted_at: Moment
    """Unix seconds by the clock of the granting process; for people, compared with no other clock."""
    reason: Text = ""
    lease_seconds: Annotated[float, Meta(ge=0, le=MAX_LEASE_SECONDS)] = 0.0
    """Time that the grant holds, from when its lender reads it; 0: until it is replaced or deleted."""
    job: Job = ""
    """RL job that the worker may lend to."""
    finish_seconds: Annotated[float, Meta(ge=0, le=MAX_FINISH_SECONDS)] = 0.0
    """In a drain: time that running turns of the worker may take to end, from when it reads this. Others go back at
    once."""
    cell: Cell | None = None
    """Cell that the worker is to be in; None if the grant says nothing of it."""


def grant_key(worker: str, source: GrantSource) -> str:
    """Return the key of a worker's grants of one source."""
    return f"{worker}{source.value}"


def parse_grant_key(key: str) -> tuple[str, GrantSource | None]:
    """Return worker and source of a key; the source is None if it is not known."""
    worker, slash, suffix = key.partition("/")
    return worker, next((source for source in GrantSource if source.value == slash + suffix), None)
