"""One turn of a trajectory: asked for, dispatched, completed.

Keeps true
- (trajectory, turn, attempt) names one execution, and a result is applied once per (trajectory, turn).
- An assembled context has the length and the digest of its request; any other case is a `ContextMissing`.
"""

import hashlib
from collections.abc import Mapping
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import Annotated, ClassVar, NamedTuple, Self, TypedDict

import msgspec
from msgspec import Meta

from rose.schemas.arrays import ITEM_BYTES, count
from rose.schemas.errors import RoseError
from rose.schemas.limits import (
    MAX_CHAIN,
    MAX_CONTEXT_TOKENS,
    MAX_SPANS,
    MAX_TURN_TOKENS,
    MAX_TURNS,
    Count,
    Digest,
    GroupId,
    Id,
    Moment,
    Seconds,
    Text,
    Tokens,
    TrajectoryId,
    TurnLogprobs,
    TurnTokens,
    Version,
)
from rose.schemas.prompts import Environment, Sampling
from rose.schemas.record import Record
from rose.schemas.sampled_tokens import SampledTokens, VersionSpan

Partition = Annotated[int, Meta(ge=0, lt=2**31)]
Turn = Annotated[int, Meta(ge=0, lt=MAX_TURNS)]
Attempt = Annotated[int, Meta(ge=0, lt=2**16)]


MAX_WORKER_CLASSES = 8
"""Most worker classes that a record distinguishes."""

DeviceSeconds = Annotated[dict[Annotated[str, Meta(max_length=32)], Seconds], Meta(max_length=MAX_WORKER_CLASSES)]
"""Device seconds by worker class."""

MAX_DEVICE_SECONDS = 1e9
"""Most device seconds of one turn in one class, some thirty years: sums of them stay within the bound of a record."""


class TurnKey(NamedTuple):
    """Names one execution of one turn."""

    trajectory_id: str
    turn: int
    attempt: int


def held_hash(key: TurnKey) -> int:
    """Return 8 bytes of BLAKE2b as a little-endian number, which stand for an execution in a heartbeat's `holds`."""
    name = f"{key.trajectory_id}/{key.turn}/{key.attempt}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


class TurnRequest(Record, frozen=True, kw_only=True):
    """A request for the next turn of a trajectory, written by an environment worker.

    It carries the tokens since the trajectory's previous request, and its chain: the offsets of the requests that it
    appends to. An anchor has no chain and carries the whole context. Anchors are the first request of a trajectory, a
    request whose chain would be longer than MAX_CHAIN, and a request that is repeated because its chain is unreadable.

        turn 0, offset 7    chain ()         appended: 10 tokens   context_tokens 10
        turn 1, offset 19   chain (7,)       appended: 6           context_tokens 16
        turn 2              chain (7, 19)    appended: 5           context_tokens 21
    """

    SCHEMA: ClassVar[str] = "turn-request/5"

    MAX_BYTES: ClassVar[int] = ITEM_BYTES * MAX_CONTEXT_TOKENS + 32 * 1024
    """Most bytes of a request: its dispatch must have room for all that may have been sampled."""

    trajectory_id: TrajectoryId
    group_id: GroupId
    home: Partition
    """Partition of the prompt; the result comes back to the same partition."""
    environment: Environment
    """Environment of the prompt: how long turns get is learned for each environment by itself."""
    turn: Turn
    appended: Tokens
    """Tokens since the last request: sampled tokens and the observation that followed; in an anchor, all tokens so
    far."""
    context_tokens: Annotated[int, Meta(ge=0, le=MAX_CONTEXT_TOKENS)]
    """Number of all tokens so far: observations and sampled tokens."""
    digest: Digest
    """Digest of the whole context (`context_digest`)."""
    chain: Annotated[tuple[Count, ...], Meta(max_length=MAX_CHAIN)] = ()
    """Offsets, in the home's requests, of the requests that it appends to: the anchor first, the previous request
    last."""
    sampling: Sampling
    requested_at: Moment
    """Unix seconds by the environment worker's clock."""
    patience_seconds: Annotated[float, Meta(gt=0, le=1e12)]
    """Longest time that the turn waits for an executor; then the router fails it."""
    pinned_version: Version | None = None
    """Policy version of the executors that the turn may be sent to; None: any version."""
    withdrawn: bool = False
    """Whether the request for this turn is withdrawn: the trajectory has ended, and no result of the turn is applied.
    Such a request has an empty context. An older router drops it as a duplicate."""
    hold: bool = False
    """Whether this turn, requested before, is put on hold until it is requested again: its group is deferred. Such a
    request has an empty context, too."""

    @property
    def stops(self) -> bool:
        """Whether it asks for no turn: it withdraws one, or puts one on hold."""
        return self.withdrawn or self.hold

    @property
    def is_anchor(self) -> bool:
        """Whether the request carries its context whole."""
        return not self.chain

    @property
    def validation_error(self) -> str | None:
        """Contradiction within the request; None if there is none."""
        appended = count(self.appended)
        if len(self.appended) % ITEM_BYTES or appended > self.context_tokens:
            return f"{len(self.appended)} bytes are appended to a context that has {self.context_tokens} tokens then"
        if self.is_anchor and appended != self.context_tokens:
            return f"an anchor of {self.context_tokens} tokens carries {appended}"
        if any(later <= earlier for earlier, later in pairwise(self.chain)):
            return "its chain goes back"
        return None


class ContextMissing(RoseError):
    """A context cannot be assembled from these requests. A new request with an anchor mends that."""


class ContextFields(TypedDict):
    """Fields of a request that describe its context."""

    appended: bytes
    context_tokens: int
    digest: bytes
    chain: tuple[int, ...]


def context_fields(context: bytes, chain: tuple[int, ...] = (), *, known_tokens: int = 0) -> ContextFields:
    """Return the context fields of a request.

    `context`: the whole context, packed. `chain`: offsets of the requests that the request goes on from. These have
    appended the first `known_tokens` tokens.
    """
    return {
        "appended": context[ITEM_BYTES * known_tokens :],
        "context_tokens": count(context),
        "digest": context_digest(context),
        "chain": chain,
    }


def context_digest(context: bytes) -> bytes:
    """Return the digest of a packed context: 16 bytes of BLAKE2b."""
    return hashlib.blake2b(context, digest_size=16).digest()


def matches_context(request: TurnRequest, context: bytes) -> bool:
    """Whether these packed tokens are the context of the request."""
    return len(context) == ITEM_BYTES * request.context_tokens and context_digest(context) == request.digest


def assemble_context(request: TurnRequest, requests: Mapping[int, TurnRequest]) -> bytes:
    """Return the packed context of a request.

    `requests`: the requests of its chain, by offset. Raises ContextMissing.
    """
    parts = []
    for offset in request.chain:
        link = requests.get(offset)
        if link is None or link.trajectory_id != request.trajectory_id:
            raise ContextMissing(
                f"the request at offset {offset}, which turn {request.turn} goes on from, is not on the log"
            )
        parts.append(link.appended)
    context = b"".join((*parts, request.appended))
    if not matches_context(request, context):
        raise ContextMissing(
            f"the requests that turn {request.turn} goes on from are not its {request.context_tokens} tokens"
        )
    return context


class Part(SampledTokens, frozen=True, kw_only=True):
    """Tokens that were sampled of a turn so far, and their cost."""

    tokens: TurnTokens
    logprobs: TurnLogprobs
    device_seconds: DeviceSeconds = {}

    def followed_by(self, later: SampledTokens) -> Self:
        """Return this part, then `later`. Device seconds are added by worker class."""
        more = later.device_seconds if isinstance(later, Part) else {}
        seconds = add_device_seconds(self.device_seconds, more)
        return msgspec.structs.replace(super().followed_by(later), device_seconds=seconds)

    @property
    def validation_error(self) -> str | None:
        """Why no executor can continue from this part, and no trainer can learn from it; None if it is valid."""
        if any(abs(seconds) > MAX_DEVICE_SECONDS for seconds in self.device_seconds.values()):
            return f"it took more than {MAX_DEVICE_SECONDS:g} device-seconds"
        return super().validation_error


def add_device_seconds(first: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Return the sums by worker class."""
    return {each: first.get(each, 0.0) + more.get(each, 0.0) for each in {**first, **more}}


class PlacementCost(msgspec.Struct, frozen=True, kw_only=True):
    """Terms of the cost by which a worker was chosen, and the best worker that was passed over."""

    wait_seconds: Seconds
    prefill_seconds: Seconds
    decode_seconds: Seconds
    risk_seconds: Seconds = 0.0
    """Cost of staleness, of a lender that may take its slack back, and of the delay for other turns."""
    cached_tokens: Count = 0
    """Tokens of the context that the router believes to be in the worker's prefix cache."""
    passed_over: Id | None = None
    """Second best worker, if there was one."""
    passed_over_seconds: Seconds = 0.0


_request = msgspec.msgpack.Decoder(TurnRequest)

FENCING_KEY = "router"
"""Key of the tombstone by which a router claims an inbox; its offset is the claim."""


class TurnDispatch(Record, frozen=True, kw_only=True, dict=True):
    """The router puts a turn into one executor's inbox.

    It carries what was generated of a preempted turn and does not name the PREEMPTED result by its place: the router
    has read that result anyway, and its pure core stays one of records alone. A token of context takes 4 bytes and a
    generated one 8, so with both at their bounds a dispatch is still one record.
    """

    SCHEMA: ClassVar[str] = "turn-dispatch/6"

    MAX_BYTES: ClassVar[int] = TurnRequest.MAX_BYTES + 2 * ITEM_BYTES * MAX_TURN_TOKENS + 96 * 1024
    """Most bytes of a dispatch: its request, and what was sampled of the turn."""

    request_wire: Annotated[msgspec.Raw, Meta(extra={"record": "TurnRequest"})] = msgspec.field(name="request")
    """Bytes of the TurnRequest as they came, so that fields of a newer writer pass an older router."""
    home: Partition
    """Partition in which the request lay; the result goes there."""
    offset: Count
    """Offset of the request in its home."""
    cut: bool = False
    """Whether `appended` of the request was left out; the executor reads it back from the log."""
    attempt: Attempt = 0
    """Number of the attempt, which the router increases when it reissues a turn."""
    worker: Id
    slot: Partition
    incarnation: Count
    """Start of the worker that this is meant for; any other start drops it."""
    claim: Count
    """Fencing token: offset of the router's claim of this inbox. After a newer claim the dispatch is dropped."""
    failures: Attempt = 0
    """Failed attempts so far; refusals for lack of room and preemptions do not count."""
    dispatched_at: Moment
    cost: PlacementCost
    queued_at: Moment = 0.0
    """Unix seconds since which this attempt has waited in the router."""
    partial: Part | None = msgspec.field(default=None, name="begun")
    """Partial output of earlier attempts, from which this attempt goes on."""
    withdrawn: bool = False
    """Whether the executor is to stop this attempt, which was dispatched before: its turn is withdrawn or on hold. The
    request is the one that stops the turn. An older executor drops such a dispatch as a duplicate; if it has answered
    the attempt, it refuses the empty context."""

    @cached_property
    def request(self) -> TurnRequest:
        """The request, decoded at the first access.

        Raises ValueError if it is no TurnRequest; a dispatch that was read has a valid one.
        """
        try:
            return _request.decode(self.request_wire)
        except msgspec.MsgspecError as error:
            raise ValueError(f"the dispatched request is no {TurnRequest.SCHEMA}: {error}") from error

    @property
    def key(self) -> TurnKey:
        """Trajectory, turn and attempt."""
        return TurnKey(self.request.trajectory_id, self.request.turn, self.attempt)


class TurnOutcome(Enum):
    """How one attempt at a turn ended. COMPLETED and FAILED also end the turn."""

    COMPLETED = "completed"
    PREEMPTED = "preempted"
    """The executor stopped the turn, for instance because serving needs the room; the result has the tokens so far."""
    REFUSED = "refused"
    """The executor did not start the turn; the reason says why."""
    FAILED = "failed"
    """The router gave the turn up: attempts or patience ran out, or the turn can never run."""


class Refusal(Enum):
    """Why an executor did not start a turn."""

    ROOM = "room"
    """The executor has no room; this is no failure."""
    VERSION = "version"
    """The executor has proven no policy version yet; this is no failure."""
    CONTEXT = "context"
    """The context cannot be read back; this is no failure, and the turn is requested again with an anchor."""
    ENGINE = "engine"
    """The engine cannot run the turn as requested."""


class TurnTimes(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """When a turn passed each station, in Unix seconds; 0 if it did not pass."""

    requested_at: Moment = 0.0
    committed_at: Moment = 0.0
    """The environment worker learned that the request is committed; no reader can read it earlier."""
    queued_at: Moment = 0.0
    """The router accepted the request, which then waits for an executor until `dispatched_at`."""
    dispatched_at: Moment = 0.0
    received_at: Moment = 0.0
    """The executor took it from its inbox."""
    scheduled_at: Moment = 0.0
    """The engine began its prefill."""
    first_token_at: Moment = 0.0
    finished_at: Moment = 0.0
    applied_at: Moment = 0.0
    """The environment worker applied the result."""


class TurnResult(Record, frozen=True, kw_only=True):
    """The result of one attempt at one turn.

    `tokens`, `logprobs`, `spans` and `device_seconds` cover the whole turn so far: earlier attempts, then this attempt.
    All other fields describe this attempt alone.
    """

    SCHEMA: ClassVar[str] = "turn-result/3"

    trajectory_id: TrajectoryId
    group_id: GroupId
    home: Partition
    turn: Turn
    attempt: Attempt
    outcome: TurnOutcome
    reason: Text = ""
    refusal: Refusal | None = None
    """Kind of refusal, with the outcome `refused`."""
    worker: Id | None = None
    """Executor that ran the attempt; None if the router wrote the result."""
    incarnation: Count = 0
    tokens: TurnTokens = b""
    """Sampled tokens, including the stop token."""
    logprobs: TurnLogprobs = b""
    """Logprob of each sampled token under the distribution that it was drawn from."""
    finish_reason: Annotated[str, Meta(max_length=32)] = ""
    """`stop` or `length`; empty unless the turn is completed."""
    spans: Annotated[tuple[VersionSpan, ...], Meta(max_length=MAX_SPANS)] = ()
    """Policy versions over `tokens`, in order, without gaps."""
    context_tokens: Count = 0
    """Tokens that this attempt began with: the turn's context, and what earlier attempts had sampled."""
    cached_tokens: Count = 0
    """How many of `context_tokens` were found in the prefix cache."""
    times: TurnTimes = TurnTimes()
    device_seconds: DeviceSeconds = {}
    """The turn's share of its steps, by worker class."""

    @property
    def key(self) -> TurnKey:
        """Trajectory, turn and attempt."""
        return TurnKey(self.trajectory_id, self.turn, self.attempt)

    @property
    def part(self) -> Part:
        """The partial output of the turn."""
        return Part.from_record(self)
