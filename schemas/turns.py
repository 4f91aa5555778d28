"""One turn of a trajectory: asked for, dispatched, completed.

Keeps true: (trajectory, turn, attempt) names one execution, and a result is applied once per (trajectory, turn).
"""

import hashlib
from collections.abc import Mapping
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import Annotated, ClassVar, NamedTuple, Self

import msgspec
from msgspec import Meta

from rose.schemas.arrays import ITEM_BYTES, count
from rose.schemas.limits import (
    MAX_CHAIN,
    MAX_CONTEXT_TOKENS,
    MAX_SPANS,
    MAX_TURNS,
    Count,
    Digest,
    GroupId,
    Id,
    Logprobs,
    Moment,
    Seconds,
    Text,
    Tokens,
    TrajectoryId,
)
from rose.schemas.prompts import Environment, Sampling
from rose.schemas.record import Record
from rose.schemas.sampled_tokens import SampledTokens, VersionSpan

Partition = Annotated[int, Meta(ge=0, lt=2**31)]
Turn = Annotated[int, Meta(ge=0, lt=MAX_TURNS)]
Attempt = Annotated[int, Meta(ge=0, lt=2**16)]


MAX_WORKER_CLASSES = 8
"""Worker classes that a record tells apart."""

DeviceSeconds = Annotated[dict[Annotated[str, Meta(max_length=32)], Seconds], Meta(max_length=MAX_WORKER_CLASSES)]
"""By worker class."""

MAX_DEVICE_SECONDS = 1e9
"""Of one turn in one class, some thirty years: sums of them stay within the bound of a record."""


class TurnKey(NamedTuple):
    """Names one execution of one turn."""

    trajectory_id: str
    turn: int
    attempt: int


def held_hash(key: TurnKey) -> int:
    """BLAKE2b with a digest of 8 bytes, little-endian, that stands for an execution in a heartbeat's `holds`."""
    name = f"{key.trajectory_id}/{key.turn}/{key.attempt}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


class TurnRequest(Record, frozen=True, kw_only=True):
    """An environment worker asks for the next turn of a trajectory.

    It carries what its context has become longer by since the trajectory's request before, and names the places of
    those it goes on from. An anchor goes on from none and carries its context whole: the first request of a trajectory,
    each that would go on from more than `CHAIN`, and one that is asked again because its chain could not be read.

        turn 0, offset 7    chain ()         appended: 10 tokens   context_tokens 10
        turn 1, offset 19   chain (7,)       appended: 6           context_tokens 16
        turn 2              chain (7, 19)    appended: 5           context_tokens 21
    """

    SCHEMA: ClassVar[str] = "turn-request/5"

    MAX_BYTES: ClassVar[int] = ITEM_BYTES * MAX_CONTEXT_TOKENS + 32 * 1024
    """What else it says, and what a newer writer adds, leaves its dispatch room for all that may have been sampled."""

    trajectory_id: TrajectoryId
    group_id: GroupId
    home: Partition
    """The partition of the prompt; the result comes back to the same one."""
    environment: Environment
    """Of the prompt: how long turns get is learned for each by itself."""
    turn: Turn
    appended: Tokens
    """What was sampled since the request before and the observation that followed; of an anchor, all tokens so far."""
    context_tokens: Annotated[int, Meta(ge=0, le=MAX_CONTEXT_TOKENS)]
    """All tokens so far: observations and sampled tokens alike."""
    digest: Digest
    """`contexts.context_digest` of them."""
    chain: Annotated[tuple[Count, ...], Meta(max_length=MAX_CHAIN)] = ()
    """Offsets, in the home's requests, of those it goes on from: its anchor first, the request before last."""
    sampling: Sampling
    requested_at: Moment
    """Unix seconds, of the environment worker's clock."""
    patience_seconds: Annotated[float, Meta(gt=0, le=1e12)]
    """The router fails the turn once it has waited for so long and no executor has taken it up."""

    @property
    def is_anchor(self) -> bool:
        """Whether it carries its context whole."""
        return not self.chain

    @property
    def validation_error(self) -> str:
        """Where it contradicts itself; empty when it does not."""
        appended = count(self.appended)
        if len(self.appended) % ITEM_BYTES or appended > self.context_tokens:
            return f"{len(self.appended)} bytes are appended to a context that has {self.context_tokens} tokens then"
        if self.is_anchor and appended != self.context_tokens:
            return f"an anchor of {self.context_tokens} tokens carries {appended}"
        if any(later <= earlier for earlier, later in pairwise(self.chain)):
            return "its chain goes back"
        return ""


class Part(SampledTokens, frozen=True, kw_only=True):
    """What was sampled of a turn up to some token of it, and what that cost."""

    device_seconds: DeviceSeconds = {}

    def followed_by(self, later: SampledTokens) -> Self:
        """Return this part, then `later`. Device seconds are added by worker class."""
        more = later.device_seconds if isinstance(later, Part) else {}
        seconds = add_device_seconds(self.device_seconds, more)
        return msgspec.structs.replace(super().followed_by(later), device_seconds=seconds)

    @property
    def validation_error(self) -> str:
        """Why no executor can continue from this part, and no trainer can learn from it; empty if it is whole."""
        if any(abs(seconds) > MAX_DEVICE_SECONDS for seconds in self.device_seconds.values()):
            return f"it took more than {MAX_DEVICE_SECONDS:g} device-seconds"
        return super().validation_error


def add_device_seconds(first: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Return the sums by worker class."""
    return {each: first.get(each, 0.0) + more.get(each, 0.0) for each in {**first, **more}}


class PlacementCost(msgspec.Struct, frozen=True, kw_only=True):
    """Why a worker was chosen: the terms of its cost, and the best that was passed over."""

    wait_seconds: Seconds
    prefill_seconds: Seconds
    decode_seconds: Seconds
    risk_seconds: Seconds = 0.0
    """The price of staleness, of a lender that may take its slack back, and of what the turn delays."""
    cached_tokens: Count = 0
    """Tokens of the context that the router believes to be in the worker's prefix cache."""
    passed_over: Id | None = None
    """The second best worker, if there was one."""
    passed_over_seconds: Seconds = 0.0


_request = msgspec.msgpack.Decoder(TurnRequest)

FENCING_KEY = "router"
"""Of the tombstone by which a router claims an inbox; its offset is the claim."""


class TurnDispatch(Record, frozen=True, kw_only=True, dict=True):
    """The router puts a turn into one executor's inbox.

    It carries what was generated of a preempted turn and does not name the PREEMPTED result by its place: the router
    has read that result anyway, and its pure core stays one of records alone. A token of context takes 4 bytes and a
    generated one 8, so with both at their bounds a dispatch is still one record.
    """

    SCHEMA: ClassVar[str] = "turn-dispatch/6"

    asked: Annotated[msgspec.Raw, Meta(extra={"record": "TurnRequest"})] = msgspec.field(name="request")
    """The TurnRequest's bytes as they came: what a newer writer added passes an older router unharmed."""
    home: Partition
    """Where the request lay, whatever it says itself; the result goes there."""
    offset: Count
    """Of the request in its home."""
    cut: bool = False
    """What it appends was left out: it is read back where it lies."""
    attempt: Attempt = 0
    """The router counts up when it issues a turn again."""
    worker: Id
    slot: Partition
    incarnation: Count
    """The start of the worker that this is meant for; any other start drops it."""
    claim: Count
    """Offset of the router's claim in this inbox: once a newer one is there, this is of a router that was replaced."""
    failures: Attempt = 0
    """Attempts that ended by somebody's fault; refusals for lack of room and preemptions are nobody's."""
    dispatched_at: Moment
    cost: PlacementCost
    queued_at: Moment = 0.0
    """Unix seconds; since when this attempt has waited in the router."""
    begun: Part | None = None
    """What attempts before this one sampled: the turn goes on from there."""

    @cached_property
    def request(self) -> TurnRequest:
        """What was asked, decoded when it is looked at first. Raises ValueError when it is no TurnRequest, which none
        that was read is.
        """
        try:
            return _request.decode(self.asked)
        except msgspec.MsgspecError as error:
            raise ValueError(f"what was asked is no {TurnRequest.SCHEMA}: {error}") from error

    @property
    def key(self) -> TurnKey:
        return TurnKey(self.request.trajectory_id, self.request.turn, self.attempt)


class TurnOutcome(Enum):
    """How one attempt at a turn ended. COMPLETED and FAILED end the turn, too."""

    COMPLETED = "completed"
    PREEMPTED = "preempted"
    """The executor gave it up, as when serving needs the room; what was generated is in the result."""
    REFUSED = "refused"
    """The executor would not start it; the reason says why."""
    FAILED = "failed"
    """Given up: attempts or deadline ran out, or the turn can never run. Written by the router."""


class Refusal(Enum):
    """Why an executor would not start a turn."""

    ROOM = "room"
    """It holds as much as it offers; nobody's fault."""
    VERSION = "version"
    """It has proven no policy version yet; nobody's fault."""
    CONTEXT = "context"
    """The requests that it goes on from cannot be read back: nobody's fault, and asked again with an anchor."""
    ENGINE = "engine"
    """Its engine can't run it as it was asked for."""


class TurnTimes(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """When a turn passed each station, in unix seconds; 0 where it never came by."""

    requested_at: Moment = 0.0
    committed_at: Moment = 0.0
    """The environment worker had committed the request, as it heard: before that nobody could read it."""
    queued_at: Moment = 0.0
    """The router took it in: until `dispatched_at` it waits for an executor with room."""
    dispatched_at: Moment = 0.0
    received_at: Moment = 0.0
    """The executor took it from its inbox."""
    scheduled_at: Moment = 0.0
    """The engine began its prefill."""
    first_token_at: Moment = 0.0
    finished_at: Moment = 0.0
    applied_at: Moment = 0.0
    """The environment worker took the result in."""


class TurnResult(Record, frozen=True, kw_only=True):
    """What became of one attempt at one turn.

    `tokens`, `logprobs`, `spans` and `device_seconds` are of the whole turn so far: this attempt's, behind those of the
    attempts that it went on from. All else is this attempt's own.
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
    """With `refused`."""
    worker: Id | None = None
    """None when the router wrote it."""
    incarnation: Count = 0
    tokens: Tokens = b""
    """Sampled tokens, the stop token included."""
    logprobs: Logprobs = b""
    """Of each sampled token under the distribution that it was drawn from."""
    finish_reason: Annotated[str, Meta(max_length=32)] = ""
    """`stop` or `length`; empty unless completed."""
    spans: Annotated[tuple[VersionSpan, ...], Meta(max_length=MAX_SPANS)] = ()
    """Over `tokens`, in order, without gaps."""
    context_tokens: Count = 0
    """That this attempt began with: the turn's context, and what attempts before it had sampled."""
    cached_tokens: Count = 0
    """Of those, found in the prefix cache."""
    times: TurnTimes = TurnTimes()
    device_seconds: DeviceSeconds = {}
    """The turn's share of its steps, by worker class."""

    @property
    def key(self) -> TurnKey:
        return TurnKey(self.trajectory_id, self.turn, self.attempt)

    @property
    def part(self) -> Part:
        """What was sampled of the turn."""
        return Part.from_record(self)
