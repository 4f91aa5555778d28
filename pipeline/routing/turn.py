"""An unfinished turn, the state of its trajectory between turns, and how many tokens it is expected to generate.

Keeps true
- The expected number of tokens lies between 1 and the turn's `max_tokens`. It depends only on the results seen and
  their order, and is learned for each environment and turn number.
- There are many turns and trajectory states, so the garbage collector does not track them: nothing in them refers back
  to them.
"""

import msgspec

from rose.pipeline.routing.candidates import ANY_VERSION
from rose.pipeline.running_mean import RunningMean
from rose.schemas.arrays import count
from rose.schemas.turns import Part, TurnKey, TurnRequest

LENGTH_WEIGHT = 0.02
"""Weight of the newest result in a running mean. The mean covers about the last hundred turns."""

TRACKED_TURNS = 64
"""Turn numbers with a running mean each. All higher turn numbers share the last mean."""

TRACKED_ENVIRONMENTS = 64
"""Environments with running means each, in order of their first request. All other environments share one set."""


class OutputLengths:
    """Running means, by turn number, of the fraction of `max_tokens` that turns of one environment generate."""

    def __init__(self) -> None:
        self._fractions = [RunningMean(1.0, LENGTH_WEIGHT) for _ in range(TRACKED_TURNS)]
        self._newest = 1.0
        """Fraction that is expected of a turn number without a result: the mean of the newest result's turn number; 1
        before the first result."""

    def record(self, turn: int, tokens: int, max_tokens: int) -> None:
        """Add a result: turn number `turn` generated `tokens` tokens."""
        fraction = self._fractions[turn if turn < TRACKED_TURNS else -1]
        fraction.add(tokens / max_tokens if tokens < max_tokens else 1.0)
        self._newest = fraction.value

    def expected(self, turn: int, max_tokens: int) -> float:
        """Expected tokens of a turn, between 1 and `max_tokens`."""
        fraction = self._fractions[turn if turn < TRACKED_TURNS else -1]
        tokens = max_tokens * (fraction.value if fraction.count else self._newest)
        return tokens if tokens > 1.0 else 1.0


class LengthsByEnvironment:
    """The `OutputLengths` of each environment."""

    def __init__(self) -> None:
        self._by_environment: dict[str, OutputLengths] = {}
        self._others = OutputLengths()

    def for_environment(self, environment: str) -> OutputLengths:
        """The lengths of an environment; the shared lengths once TRACKED_ENVIRONMENTS are known."""
        known = self._by_environment.get(environment)
        if known is not None:
            return known
        if len(self._by_environment) >= TRACKED_ENVIRONMENTS:
            return self._others
        return self._by_environment.setdefault(environment, OutputLengths())


MAX_KEPT_BYTES = 1024
"""Largest request that every dispatch carries whole. A larger request is carried whole by its first dispatch; later
dispatches carry its offset and all but its tokens."""

NO_TOKENS = msgspec.Raw(msgspec.msgpack.encode(b""))

_fields = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
"""Decodes a record's fields by name and leaves their values encoded, so fields that this version does not know are
kept."""


def without_tokens(wire: bytes) -> bytes:
    """The request's bytes with an empty `appended`. All other fields, also unknown fields, stay as they came."""
    return msgspec.msgpack.encode({**_fields.decode(wire), "appended": NO_TOKENS})


class TrajectoryState(msgspec.Struct, eq=False, gc=False):
    """State of a trajectory between its turns: the newest finished turn, and the cached prefix."""

    turn: int = -1
    """The newest finished turn, completed or failed."""
    worker: str = ""
    """Executor whose cache has the tokens of the newest execution; empty if there is none."""
    incarnation: int = 0
    cache_generation: int = 0
    """Cache generation of the incarnation."""
    version: int = -1
    tokens: int = 0

    def set_prefix(self, worker: str, incarnation: int, cache_generation: int, version: int, tokens: int) -> None:
        """Record the executor, cache and policy version that hold the first `tokens` tokens of the context."""
        self.worker = worker
        self.incarnation = incarnation
        self.cache_generation = cache_generation
        self.version = version
        self.tokens = tokens


class Turn(msgspec.Struct, eq=False, gc=False, kw_only=True):
    """One unfinished turn. Times are seconds on the router's clock. The request is kept as bytes."""

    trajectory_id: str
    group_id: str
    turn: int
    home: int
    max_tokens: int
    seeded: bool
    pinned_version: int = ANY_VERSION
    """Policy version of the executors that the turn may be sent to."""
    patience_seconds: float
    requested_at: float
    """Unix seconds on the environment worker's clock."""
    digest: bytes
    """Digest of the context."""
    is_anchor: bool
    """Whether the request holds the whole context."""
    request_bytes: bytes
    """The encoded request, for dispatches."""
    offset: int
    """Offset of the request in its home."""
    trajectory: TrajectoryState
    lengths: OutputLengths
    """Output lengths of the turn's environment."""
    context_tokens: int
    epoch: int
    """The router's epoch in which the request was accepted."""
    room_tokens: int
    """Tokens of the context and the most tokens that the turn may generate; as dispatched, while an executor holds the
    turn."""
    due: float
    """When the turn's first patience ends. Orders the queue."""
    queued_at: float
    """Since when the turn is queued, or was queued before its dispatch."""
    attempt: int = 0
    """The attempt that runs or runs next."""
    next_attempt: int = 0
    """Greater than the attempt number of every dispatch of the turn."""
    failures: int = 0
    """Attempts that ended by a fault."""
    worker: str = ""
    """The executor that holds the turn; empty while the turn is queued."""
    execution_key: bytes = b""
    """The outstanding dispatch, as heartbeats list it."""
    new_tokens: float = 0.0
    """New tokens that were expected at the dispatch."""
    prefill_seconds: float = 0.0
    """Seconds of prefill that were expected at the dispatch."""
    seen_at: float = 0.0
    """When the turn was dispatched, or was last listed before it was missing. While the newest heartbeat lists the
    turn, `Executor.heartbeat_at` counts instead."""
    seen_clock: float = 0.0
    """`seen_at` on the liveness clock."""
    unlisted_since: float = 0.0
    """See `Execution`."""
    preempted_by: str = ""
    """The executor that preempted the turn, until the next dispatch shows how many tokens are computed again."""
    ticket: int = 0
    """Ticket in the queue; 0 while the turn is not queued."""
    partial: Part | None = None
    """The longest partial of any attempt; the next attempt continues from it."""
    by_reference: bool = False
    """Whether `request_bytes` lacks the appended tokens."""
    context_missing: bool = False
    """Whether the turn waits for its anchor because no executor can read its context back."""
    on_hold: bool = False
    """Whether the turn waits for another request because its group is deferred."""

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
        """A turn that is queued since `now`. `request_bytes`: the encoded request; `offset`: its offset in its home."""
        sampling = request.sampling
        return cls(
            trajectory_id=request.trajectory_id,
            group_id=request.group_id,
            turn=request.turn,
            home=request.home,
            max_tokens=sampling.max_tokens,
            seeded=sampling.seed is not None,
            pinned_version=ANY_VERSION if request.pinned_version is None else request.pinned_version,
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
        """Use another request, an anchor of the same context, for the later dispatches of this turn."""
        self.is_anchor, self.requested_at = request.is_anchor, request.requested_at
        self.patience_seconds = request.patience_seconds
        self.max_tokens, self.seeded = request.sampling.max_tokens, request.sampling.seed is not None
        self.request_bytes, self.offset, self.by_reference = request_bytes, offset, False

    def on_dispatched(self) -> None:
        """Drop the tokens of a large request: the executor has them, and the log keeps them."""
        if len(self.request_bytes) > MAX_KEPT_BYTES and not self.by_reference:
            self.request_bytes, self.by_reference = without_tokens(self.request_bytes), True

    @property
    def key(self) -> TurnKey:
        """Trajectory, turn and attempt."""
        return TurnKey(self.trajectory_id, self.turn, self.attempt)

    @property
    def partial_tokens(self) -> int:
        """Number of tokens that earlier attempts sampled."""
        return 0 if self.partial is None else count(self.partial.tokens)

    def patience_reason(self, *, refuses_seeds: bool, lacks_version: bool) -> str:
        """Return what the turn has waited for all its patience.

        `refuses_seeds`: whether no executor takes seeds. `lacks_version`: whether no executor has the pinned version.
        """
        patience = f"{self.patience_seconds:g} s"
        if self.worker:
            return f"{self.worker}, which has the turn, did not list it as running for {patience}"
        if self.seeded and refuses_seeds:
            return "no executor takes turns with a seed"
        if lacks_version:
            return f"no executor has version {self.pinned_version}, to which it is pinned"
        if self.context_missing:
            return f"its context cannot be read, and no anchor request came within {patience}"
        return f"no executor has taken it up in {patience}"

    def keep_partial(self, part: Part) -> None:
        """Keep a partial for the next attempt if it is valid, longer than the known partial, and not complete."""
        longer = self.partial_tokens < count(part.tokens) < self.max_tokens
        if longer and not part.validation_error:
            self.partial = part
