"""A turn that is not finished yet, and what is known of its trajectory between its turns.

They are many, so neither is tracked by the garbage collector: nothing in them leads back to them.
"""

import msgspec

from pipeline.routing.lengths import Means
from schemas.arrays import count
from schemas.turns import Part, TurnKey, TurnRequest

KEPT_BYTES = 1024
"""Of a request: one that is larger goes whole with its first dispatch, and by its place with those that may follow."""

NO_TOKENS = msgspec.Raw(msgspec.msgpack.encode(b""))

_fields = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
"""A record's fields by name, none of them looked into: who decoded the record has passed over what it does not know."""


def without_tokens(wire: bytes) -> bytes:
    """The request's bytes less what it appends: all else, known here or not, is as it came, and takes no more room."""
    return msgspec.msgpack.encode({**_fields.decode(wire), "appended": NO_TOKENS})


class Trajectory(msgspec.Struct, eq=False, gc=False):
    """What is known of a trajectory between its turns."""

    turn: int = -1
    """The newest that has finished, one way or the other."""
    worker: str = ""
    """Where its newest execution left its tokens; empty where none has."""
    incarnation: int = 0
    cache: int = 0
    """Of that start."""
    version: int = -1
    tokens: int = 0

    def left(self, worker: str, incarnation: int, cache: int, version: int, tokens: int) -> None:
        """Remember where the newest execution left its tokens."""
        self.worker, self.incarnation, self.cache, self.version = worker, incarnation, cache, version
        self.tokens = tokens


class Turn(msgspec.Struct, eq=False, gc=False, kw_only=True):
    """One unfinished turn. Times are the router's own, in seconds. The request is not kept, but its bytes."""

    trajectory_id: str
    group_id: str
    turn: int
    home: int
    max_tokens: int
    seeded: bool
    patience_seconds: float
    requested_at: float
    """Unix seconds, of the environment worker's clock."""
    digest: bytes
    """Of its context."""
    anchors: bool
    """Whether it was asked for with its context whole."""
    wire: bytes
    """The request as it came, for its dispatches."""
    offset: int
    """Of the request in its home."""
    trajectory: Trajectory
    """What is known of its trajectory."""
    lengths: Means
    """Of its environment."""
    context_tokens: int
    epoch: int
    """The router's epoch in which it was asked for."""
    room_tokens: int
    """Context and the most that it may generate; of a turn at an executor, as it was sent there."""
    due: float
    """When its first patience ends: its place in the order."""
    queued_at: float
    """Since when it waits, or waited before it was dispatched."""
    attempt: int = 0
    """The one that runs or is to run next."""
    next_attempt: int = 0
    """Above that of every dispatch of it."""
    failures: int = 0
    """Attempts that ended by somebody's fault."""
    worker: str = ""
    """The executor that holds it; empty while it waits."""
    execution: bytes = b""
    """The dispatch that is outstanding, as heartbeats list it."""
    new_tokens: float = 0.0
    """Expected when it was dispatched."""
    prefill_seconds: float = 0.0
    """The same."""
    seen_at: float = 0.0
    """When it was dispatched, or its executor said last but one that it holds it: see `Executor.listed`."""
    seen_clock: float = 0.0
    """The same, on the clock of `Liveness`."""
    unlisted_since: float = 0.0
    """See `Execution`."""
    taken_by: str = ""
    """The executor that took it back, until it is known what that costs."""
    ticket: int = 0
    """Its place in the waiting order, 0 when it does not wait."""
    begun: Part | None = None
    """The most that any attempt handed back of it: the next one goes on from there."""
    cut: bool = False
    """`wire` lacks what the request appends."""
    torn: bool = False
    """It waits for its anchor: no executor can read its context back."""

    @classmethod
    def of(
        cls,
        request: TurnRequest,
        wire: bytes,
        offset: int,
        *,
        trajectory: Trajectory,
        lengths: Means,
        epoch: int,
        now: float,
    ) -> "Turn":
        """One that waits since now. `wire`: the request's bytes as they came; `offset`: where, in its home."""
        sampling = request.sampling
        return cls(
            trajectory_id=request.trajectory_id,
            group_id=request.group_id,
            turn=request.turn,
            home=request.home,
            max_tokens=sampling.max_tokens,
            seeded=sampling.seed is not None,
            patience_seconds=request.patience_seconds,
            requested_at=request.requested_at,
            digest=request.digest,
            anchors=request.anchors,
            wire=wire,
            offset=offset,
            trajectory=trajectory,
            lengths=lengths,
            context_tokens=request.context_tokens,
            epoch=epoch,
            room_tokens=request.context_tokens + sampling.max_tokens,
            due=now + request.patience_seconds,
            queued_at=now,
        )

    def asked_by(self, request: TurnRequest, wire: bytes, offset: int) -> None:
        """It is asked for by this from now on, which has the same context."""
        self.anchors, self.requested_at = request.anchors, request.requested_at
        self.patience_seconds = request.patience_seconds
        self.max_tokens, self.seeded = request.sampling.max_tokens, request.sampling.seed is not None
        self.wire, self.offset, self.cut = wire, offset, False

    def sent(self) -> None:
        """What it appends is with an executor, and on the log."""
        if len(self.wire) > KEPT_BYTES and not self.cut:
            self.wire, self.cut = without_tokens(self.wire), True

    @property
    def key(self) -> TurnKey:
        return TurnKey(self.trajectory_id, self.turn, self.attempt)

    @property
    def begun_tokens(self) -> int:
        return 0 if self.begun is None else count(self.begun.tokens)

    def keep(self, part: Part) -> None:
        """Go on from this if it is sound, leaves something to sample, and is more than what is known."""
        longer = self.begun_tokens < count(part.tokens) < self.max_tokens
        if longer and not part.flaw:
            self.begun = part
