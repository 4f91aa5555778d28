"""An unfinished turn, the state of its trajectory between turns, and how many tokens it is expected to generate.

Keeps true
- The expected number of tokens lies between 1 and the turn's `max_tokens`. It depends only on the results seen and
  their order, and is learned for each environment and turn number.
- There are many turns and trajectory states, so the garbage collector does not track them: nothing in them refers back
  to them.
"""

import msgspec

from rose.schemas.arrays import count
from rose.schemas.turns import Part, TurnKey, TurnRequest

LENGTH_WEIGHT = 0.02
"""Of the newest result in a running mean: the last hundred or so turns count."""

TRACKED_TURNS = 64
"""Turns whose numbers are told apart; all later ones are as one."""

TRACKED_ENVIRONMENTS = 64
"""Environments that are told apart, those that were asked for first; all others are as one."""


class OutputLengths:
    """Of one environment: running means of the fraction of `max_tokens` that turns really used."""

    def __init__(self) -> None:
        self._fractions = [1.0] * TRACKED_TURNS
        self._seen = [0] * TRACKED_TURNS
        self._begins = 1.0
        """Where the mean of a turn begins that was not seen yet: at that of the newest result's turn; 1 before it."""

    def record(self, turn: int, tokens: int, max_tokens: int) -> None:
        if turn >= TRACKED_TURNS:
            turn = TRACKED_TURNS - 1
        seen = self._seen[turn] = self._seen[turn] + 1
        fraction = self._fractions[turn]
        weight = LENGTH_WEIGHT if seen * LENGTH_WEIGHT > 1.0 else 1.0 / seen
        fraction += weight * ((tokens / max_tokens if tokens < max_tokens else 1.0) - fraction)
        self._fractions[turn] = self._begins = fraction

    def expected(self, turn: int, max_tokens: int) -> float:
        if turn >= TRACKED_TURNS:
            turn = TRACKED_TURNS - 1
        tokens = max_tokens * (self._fractions[turn] if self._seen[turn] else self._begins)
        return tokens if tokens > 1.0 else 1.0


class LengthsByEnvironment:
    """Of all environments."""

    def __init__(self) -> None:
        self._by_environment: dict[str, OutputLengths] = {}
        self._others = OutputLengths()

    def for_environment(self, environment: str) -> OutputLengths:
        """What is learned of it, and goes on to be."""
        known = self._by_environment.get(environment)
        if known is not None:
            return known
        if len(self._by_environment) >= TRACKED_ENVIRONMENTS:
            return self._others
        return self._by_environment.setdefault(environment, OutputLengths())


MAX_KEPT_BYTES = 1024
"""Of a request: one that is larger goes whole with its first dispatch, and by its place with those that may follow."""

NO_TOKENS = msgspec.Raw(msgspec.msgpack.encode(b""))

_fields = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
"""A record's fields by name, none of them looked into: who decoded the record has passed over what it does not know."""


def without_tokens(wire: bytes) -> bytes:
    """The request's bytes less what it appends: all else, known here or not, is as it came, and takes no more room."""
    return msgspec.msgpack.encode({**_fields.decode(wire), "appended": NO_TOKENS})


class TrajectoryState(msgspec.Struct, eq=False, gc=False):
    """What is known of a trajectory between its turns."""

    turn: int = -1
    """The newest that has finished, one way or the other."""
    worker: str = ""
    """Where its newest execution left its tokens; empty where none has."""
    incarnation: int = 0
    cache_generation: int = 0
    """Of that start."""
    version: int = -1
    tokens: int = 0

    def set_prefix(self, worker: str, incarnation: int, cache_generation: int, version: int, tokens: int) -> None:
        """Remember where the newest execution left its tokens."""
        self.worker, self.incarnation, self.cache_generation, self.version = (
            worker,
            incarnation,
            cache_generation,
            version,
        )
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
    is_anchor: bool
    """Whether it was asked for with its context whole."""
    request_bytes: bytes
    """The request as it came, for its dispatches."""
    offset: int
    """Of the request in its home."""
    trajectory: TrajectoryState
    """What is known of its trajectory."""
    lengths: OutputLengths
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
    execution_key: bytes = b""
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
    preempted_by: str = ""
    """The executor that took it back, until it is known what that costs."""
    ticket: int = 0
    """Its place in the waiting order, 0 when it does not wait."""
    partial: Part | None = None
    """The most that any attempt handed back of it: the next one goes on from there."""
    by_reference: bool = False
    """`request_bytes` lacks what the request appends."""
    context_missing: bool = False
    """It waits for its anchor: no executor can read its context back."""

    @classmethod
    def from_request(
        cls,
        request: TurnRequest,
        request_bytes: bytes,
        offset: int,
        *,
        trajectory: TrajectoryState,
        lengths: OutputLengths,
        epoch: int,
        now: float,
    ) -> "Turn":
        """One that waits since now. `request_bytes`: the request's bytes as they came; `offset`: where, in its home."""
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
            is_anchor=request.is_anchor,
            request_bytes=request_bytes,
            offset=offset,
            trajectory=trajectory,
            lengths=lengths,
            context_tokens=request.context_tokens,
            epoch=epoch,
            room_tokens=request.context_tokens + sampling.max_tokens,
            due=now + request.patience_seconds,
            queued_at=now,
        )

    def replace_request(self, request: TurnRequest, request_bytes: bytes, offset: int) -> None:
        """It is asked for by this from now on, which has the same context."""
        self.is_anchor, self.requested_at = request.is_anchor, request.requested_at
        self.patience_seconds = request.patience_seconds
        self.max_tokens, self.seeded = request.sampling.max_tokens, request.sampling.seed is not None
        self.request_bytes, self.offset, self.by_reference = request_bytes, offset, False

    def on_dispatched(self) -> None:
        """What it appends is with an executor, and on the log."""
        if len(self.request_bytes) > MAX_KEPT_BYTES and not self.by_reference:
            self.request_bytes, self.by_reference = without_tokens(self.request_bytes), True

    @property
    def key(self) -> TurnKey:
        return TurnKey(self.trajectory_id, self.turn, self.attempt)

    @property
    def partial_tokens(self) -> int:
        return 0 if self.partial is None else count(self.partial.tokens)

    def keep_partial(self, part: Part) -> None:
        """Go on from this if it is sound, leaves something to sample, and is more than what is known."""
        longer = self.partial_tokens < count(part.tokens) < self.max_tokens
        if longer and not part.validation_error:
            self.partial = part
