"""Reports of a process on itself: heartbeats of executors, several times a second, and starts of roles.

An executor without a heartbeat for `TTL_SECONDS` counts as silent (`pipeline/routing/liveness.py`).
"""

from enum import Enum
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from rose.schemas.limits import Count, Id, Moment, Seconds, Text, Version
from rose.schemas.record import Record

MAX_HELD_TURNS = 4_096
"""Most turns that an executor may hold at once."""


TTL_SECONDS = 2.0
"""How long a heartbeat is valid: an executor that is silent for longer is taken to have no slack. The executor writes
this value into its heartbeats (`ttl_seconds`), and the router's liveness clock applies what a heartbeat says."""

Rate = Annotated[float, Meta(ge=1e-3, le=1e12)]
"""Tokens per second, above 0, so that dividing by a rate stays finite."""


MOVING_REASON = "it goes to cell"
"""Beginning of the pause reason of an executor that moves to another cell."""

DRAINED_REASON = "it is drained"
"""Beginning of the pause reason of a drained executor."""

NOT_RESUMED_REASON = "it was not told to lend"
"""Pause reason of a lender whose guest is parked."""

BUILDING_REASON = "its guest is being built"
"""Pause reason of a lender that was woken and has no guest yet."""


class WorkerClass(Enum):
    """Owner of the GPU that an executor runs on: the rollouts, or a server that lends."""

    DEDICATED = "dedicated"
    SERVING = "serving"


class ExecutorState(Enum):
    """Whether an executor takes turns."""

    STARTING = "starting"
    """It has proven no policy version yet: it may be sent weights, not turns."""
    READY = "ready"
    PAUSED = "paused"
    """It takes no new turns and returns the turns that it holds; a drained executor returns turns that do not end in
    time."""
    STOPPING = "stopping"


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """Rates that the executor measures."""

    device: Annotated[str, Meta(max_length=128)] = "cpu"
    prefill_tokens_per_second: Rate
    decode_tokens_per_second: Rate
    """Rate of one sequence at the present batch."""


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one tenant in the engine."""

    running: Count = 0
    waiting: Count = 0


class SlackHeartbeat(Record, frozen=True, kw_only=True):
    """State and load of an executor. A heartbeat older than `ttl_seconds` means that the executor offers nothing."""

    SCHEMA: ClassVar[str] = "slack-heartbeat/6"

    worker: Id
    incarnation: Count
    """Number of the worker's start; it grows with every start."""
    slot: Annotated[int, Meta(ge=0, lt=2**31)]
    sequence: Count
    worker_class: WorkerClass
    state: ExecutorState
    policy_version: Version
    hardware: Hardware
    kv_bytes_total: Count
    kv_bytes_free: Count
    kv_bytes_per_token: Count
    rollout: Tenant = Tenant()
    serving: Tenant = Tenant()
    max_turns: Annotated[int, Meta(ge=0, le=MAX_HELD_TURNS)]
    """Most turns that it holds at once, running and waiting."""
    token_budget: Count
    """Context and new tokens that rollouts may hold in its KV cache at this moment."""
    prefill_headroom_seconds: Seconds | None = None
    """Least prefill slack S_prf over serving's waiting requests (ROSE, dual-SLO admission); None without a serving
    tenant."""
    decode_headroom_seconds: Seconds | None = None
    ttl_seconds: Annotated[float, Meta(gt=0, le=60)]
    holds: Annotated[bytes, Meta(max_length=8 * MAX_HELD_TURNS)] = b""
    """`held_hash` of every turn whose answer is not on the log yet, packed as little-endian u64. In a heartbeat with
    STOPPING: of the turns that it answered last, whose answers are all on the log."""
    refused_version: Version = -1
    """Newest policy version that it refuses; -1 if there is none."""
    refused_reason: Text = ""
    sent_at: Moment
    """Unix seconds by the executor's clock; used only to detect a wrong clock."""
    swap_seconds: Seconds = 0.0
    """Pause of the engine at its latest weight swap."""
    paused_reason: Text = ""
    """Why it takes no new turns; empty if it takes them."""
    cuts: Count = 0
    """Number of times since its start that serving took memory back from rollouts."""
    frozen: bool = False
    """Whether its budget was cut: for now the budget may shrink further and does not grow."""
    seeded: bool = True
    """Whether it takes turns with a seed, whose tokens are drawn by position."""
    by_grant: bool = False
    """Whether grants decide if it takes turns."""
    devices: Annotated[int, Meta(ge=1, le=2**16)] = 1
    """Number of devices that its engine occupies."""


class RoleBegun(Record, frozen=True, kw_only=True):
    """A process has started, or has failed and restarts in place. A healthy process writes this once."""

    SCHEMA: ClassVar[str] = "role-begun/1"

    role: Id
    """Name of the process, as in its log."""
    times: Annotated[int, Meta(ge=1, le=2**53)] = 1
    """Number of restarts since its last record."""
    reason: Text = ""
    """Why it restarts; empty if the process has just started."""
    place: Text = ""
    """Where the process runs: its host, and its number among the processes of its name there. A restarted process has
    the same place; processes of one name that run at once have different places. Empty if not known."""
