"""One cell in short: what its router says every second to whoever decides on capacity, who reads no heartbeats.

A cell is a share of the homes, inboxes and executors with a routing core of its own (`topics.cells`).
"""

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from rose.schemas.heartbeats import ExecutorState, Rate
from rose.schemas.limits import Count, Id, Moment, Seconds, Version
from rose.schemas.record import Record

MAX_EXECUTORS = 3_072
"""In one summary: as many as fit into a record whatever they are called."""

Cell = Annotated[int, Meta(ge=0, lt=2**16)]


class ExecutorLine(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One executor in short; on the wire a list of values, of which more may come at the end."""

    worker: Id
    serving: bool
    """Its class; else it is dedicated."""
    by_grant: bool
    """Grants say whether it lends."""
    state: ExecutorState
    open: bool
    """It is sent turns: live, ready, and it has refused none since its newest heartbeat."""
    free_turns: Count
    """Turns that it would take on beside those that it holds; 0 for an executor that is not open."""
    free_tokens: Count
    held_turns: Count
    held_tokens: Count
    load_seconds: Seconds
    """Until it has done what it holds, by its own rates."""
    prefill_tokens_per_second: Rate
    decode_tokens_per_second: Rate
    """Rate of one sequence."""
    lanes: Annotated[int, Meta(ge=1, le=2**31)]
    """Turns that it runs at once."""
    lag_versions: Count
    """How far it is behind the newest policy version that is served."""
    serving_running: Count
    """Requests of its own users."""
    serving_waiting: Count


class CellSummary(Record, frozen=True, kw_only=True):
    """A cell as its router sees it, written every second: what elasticity is decided from."""

    SCHEMA: ClassVar[str] = "cell-summary/2"

    cell: Cell
    cells: Annotated[int, Meta(ge=1, le=2**16)]
    """How many there are."""
    router: Id
    """Who serves the cell."""
    waiting_turns: Count
    """Turns that have no room, or are with executors of which none is heard."""
    outstanding_turns: Count
    """Turns with executors that are heard."""
    wanted_tokens: Count
    """Room that the waiting turns want: context, and the most that they may generate."""
    prefill_tokens: Count
    """Context tokens of the waiting turns."""
    new_tokens: Count
    """Expected of the waiting turns."""
    waiting_seconds: Seconds
    """Time that the open executors together need for the waiting turns; 0 if nothing waits or no executor is open."""
    policy_version: Version
    """The newest that is served."""
    executors: Annotated[tuple[ExecutorLine, ...], Meta(max_length=MAX_EXECUTORS)] = ()
    """Those that are not gone; lenders first."""
    written_at: Moment
    """Unix seconds of its router: compared with no clock."""
