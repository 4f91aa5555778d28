"""What an executor says of itself, several times a second. Silence past the TTL means: no slack."""

from enum import Enum
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from rose.schemas.limits import Count, Id, Moment, Seconds, Text, Version
from rose.schemas.record import Record

MAX_HELD_TURNS = 4_096
"""Turns that an executor may hold at once."""


TTL_SECONDS = 2.0
"""How long a heartbeat is valid: an executor that is silent for longer is taken to have no slack. The executor writes
this value into its heartbeats (`ttl_seconds`), and the router's liveness clock applies what a heartbeat says."""

Rate = Annotated[float, Meta(ge=1e-3, le=1e12)]
"""Tokens a second: what divides by it stays finite."""


MOVING_REASON = "it goes to cell"
"""What one that leaves for another cell says first of it."""

DRAINED_REASON = "it is drained"
"""What an executor that an operator drained says first of why it takes no turns."""


class WorkerClass(Enum):
    """Whose GPU an executor runs on: the rollouts' own, or one that serves and lends."""

    DEDICATED = "dedicated"
    SERVING = "serving"


class ExecutorState(Enum):
    """What an executor says of taking turns."""

    STARTING = "starting"
    """Has proven no policy version yet: may be sent weights, not turns."""
    READY = "ready"
    PAUSED = "paused"
    """Takes no new turns, and gives back those that it holds; of one that is drained, those that do not end in time."""
    STOPPING = "stopping"


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """Rates as the executor measures them on itself."""

    device: Annotated[str, Meta(max_length=128)] = "cpu"
    prefill_tokens_per_second: Rate
    decode_tokens_per_second: Rate
    """Of one sequence at the present batch."""


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one tenant in the engine."""

    running: Count = 0
    waiting: Count = 0


class SlackHeartbeat(Record, frozen=True, kw_only=True):
    """What an executor has at this moment. Older than `ttl_seconds` it says that there is nothing."""

    SCHEMA: ClassVar[str] = "slack-heartbeat/6"

    worker: Id
    incarnation: Count
    """Grows with every start of the worker."""
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
    """Turns that it will hold at once, running and waiting."""
    token_budget: Count
    """Context and new tokens that rollouts may hold in its KV cache at this moment."""
    prefill_headroom_seconds: Seconds | None = None
    """Least S_prf over serving's waiting requests (ROSE, dual-SLO admission); None without a serving tenant."""
    decode_headroom_seconds: Seconds | None = None
    ttl_seconds: Annotated[float, Meta(gt=0, le=60)]
    holds: Annotated[bytes, Meta(max_length=8 * MAX_HELD_TURNS)] = b""
    """`held_hash` of every turn whose answer is not on the log yet, packed as little-endian u64. With STOPPING: of
    those that it has answered with its last words, all of which are on the log."""
    refused_version: Version = -1
    """The newest policy version that it does not take; -1 if there is none."""
    refused_reason: Text = ""
    sent_at: Moment
    """Unix seconds of its own clock: compared with nobody's, but to tell a clock that is wrong."""
    swap_seconds: Seconds = 0.0
    """The engine's pause at its latest weight swap."""
    paused_reason: Text = ""
    """Why it takes no new turns, where it does not."""
    cuts: Count = 0
    """Times since its start that serving took room back from rollouts at once."""
    frozen: bool = False
    """It was cut: its budget may shrink further, and does not grow for now."""
    seeded: bool = True
    """Whether it takes turns with a seed, which draw by position."""
    by_grant: bool = False
    """Whether grants say if it takes turns."""
