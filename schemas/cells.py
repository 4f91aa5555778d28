"""The summary of a cell, which its router writes every second. The control app decides by summaries, not heartbeats.

A cell is a share of the homes, inboxes and executors, with its own routing core (`topics.cells`).
"""

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from rose.schemas.heartbeats import ExecutorState, Rate
from rose.schemas.limits import Count, Id, Moment, Seconds, Version
from rose.schemas.record import Record

MAX_EXECUTORS = 3_072
"""Most executors in one summary: as many as fit into a record, however long their names are."""

Cell = Annotated[int, Meta(ge=0, lt=2**16)]


class ExecutorLine(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Summary of one executor; on the wire a list of values, to which more values may be appended."""

    worker: Id
    serving: bool
    """Whether the executor is a serving worker; otherwise it is dedicated."""
    by_grant: bool
    """Whether grants decide if it takes turns."""
    state: ExecutorState
    open: bool
    """Whether it is sent turns: it is live and ready, and has refused no turn since its newest heartbeat."""
    free_turns: Count
    """Turns that it would take in addition to those that it holds; 0 if it is not open."""
    free_tokens: Count
    held_turns: Count
    held_tokens: Count
    load_seconds: Seconds
    """Time that it needs for the turns that it holds, by its own rates."""
    prefill_tokens_per_second: Rate
    decode_tokens_per_second: Rate
    """Rate of one sequence."""
    lanes: Annotated[int, Meta(ge=1, le=2**31)]
    """Turns that it runs at once."""
    lag_versions: Count
    """Policy versions that it is behind the newest served version."""
    serving_running: Count
    """Running requests of the server's own users."""
    serving_waiting: Count


class CellSummary(Record, frozen=True, kw_only=True):
    """Summary of a cell, which its router writes every second and the control app reads."""

    SCHEMA: ClassVar[str] = "cell-summary/2"

    cell: Cell
    cells: Annotated[int, Meta(ge=1, le=2**16)]
    """Number of cells of the run."""
    router: Id
    """Name of the router that serves the cell."""
    waiting_turns: Count
    """Turns that wait for room, or are assigned to silent executors."""
    outstanding_turns: Count
    """Turns that are assigned to executors that send heartbeats."""
    wanted_tokens: Count
    """Room that the waiting turns need: their contexts, and the most tokens that they may generate."""
    prefill_tokens: Count
    """Context tokens of the waiting turns."""
    new_tokens: Count
    """Tokens that the waiting turns are expected to generate."""
    waiting_seconds: Seconds
    """Time that the open executors together need for the waiting turns; 0 if nothing waits or no executor is open."""
    policy_version: Version
    """Newest policy version that is served."""
    executors: Annotated[tuple[ExecutorLine, ...], Meta(max_length=MAX_EXECUTORS)] = ()
    """Executors that are not gone; lenders first."""
    written_at: Moment
    """Unix seconds by the router's clock; compared with no other clock."""
