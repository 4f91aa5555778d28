"""One trajectory between two turns: its context, which results are applied, and how the next turn is sampled. Pure.

Keeps true
- For every turn exactly one result is applied: the first COMPLETED one in log order. Other results are classified.
- A context only grows. Sampled tokens are not changed; mask, logprobs and version spans cover every token.
- The same log gives the same state: normal operation and recovery both use `observe`, `begin_turn` and `apply_result`.
- The tokens that its requests have appended, in the order of the chain with the current request last, are its context.

Example, a task of two turns (`transitions.py` says what each of them writes)
    begin(observation `+1+2`)                   -> request of turn 0
    result of turn 0, attempt 0, PREEMPTED      -> ROUTERS: the router issues the turn again
    result of turn 0, attempt 1, COMPLETED      -> APPLY; the environment steps; request of turn 1
    result of turn 0, attempt 2, COMPLETED      -> LATE
    result of turn 1, REFUSED, `context`        -> ANCHOR; request of turn 1 again, with the whole context
    result of turn 1, COMPLETED                 -> APPLY; the environment is done; the sample
"""

import hashlib
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from rose.schemas.arrays import count
from rose.schemas.limits import MAX_CHAIN, MAX_CONTEXT_TOKENS
from rose.schemas.progress import Applied, TrajectoryProgress
from rose.schemas.prompts import Prompt, PromptSampling, Sampling, trajectory_id
from rose.schemas.sampled_tokens import NOTHING_SAMPLED, SampledTokens
from rose.schemas.samples import SampleTurn
from rose.schemas.turns import Refusal, TurnOutcome, TurnResult, add_device_seconds


class ResultVerdict(Enum):
    """How a trajectory handles a result."""

    APPLY = "apply"
    FAIL = "fail"
    """The router has failed the turn."""
    ROUTERS = "routers"
    """The turn was preempted or refused: the router issues it again."""
    ANCHOR = "anchor"
    """The context could not be read back: the router waits for a request with the whole context."""
    LATE = "late"
    """The result is of an earlier turn."""
    DUPLICATE = "duplicate"
    """A result of the current turn is being applied already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryRules:
    """Settings of all trajectories of a worker."""

    model_id: str
    sampling: Sampling
    """Defaults for sampling settings that a prompt does not set."""
    turn_patience_seconds: float
    max_context_tokens: int
    vocabulary: int | None = None
    """Number of tokens of the model; None if it is not known."""
    members_ratio: float = 1.0
    """Trajectories with which a group is opened, relative to the size that its prompt asks for."""
    deadline_seconds: float = 0.0
    """Longest time that a trajectory may take from the opening of its group; 0 for no limit."""


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """The state between two turns, which can be built again from the log."""

    trajectory_id: str
    index: int
    prompt: Prompt
    """The prompt with its full sampling, see `with_full_sampling`."""
    home: int
    state: bytes
    """Newest snapshot of the environment."""
    digest: bytes
    """Digest of `state`."""
    turn: int = -1
    """The current turn; -1 before the first observation."""
    prompted: int = 0
    """Number of tokens of the first observation."""
    sampling: Sampling = field(default_factory=Sampling)
    """Sampling of the current turn."""
    context: SampledTokens = NOTHING_SAMPLED
    """Observations and sampled tokens so far."""
    turns: list[SampleTurn] = field(default_factory=list)
    applied: list[Applied] = field(default_factory=list)
    """The applied results of the turns before the current one."""
    device_seconds: dict[str, float] = field(default_factory=dict)
    reward: float = 0.0
    chain: tuple[int, ...] = ()
    """Offsets of the requests that the current request appends to."""
    requested: int = 0
    """Number of tokens in the requests before the current one."""
    requested_from: int = field(default=0, compare=False)
    """The current request is at or after this offset of the home's requests."""
    request_offset: int | None = field(default=None, compare=False)
    """Offset of the current request, once it is known."""
    committed_at: float = field(default=0.0, compare=False)
    """Unix seconds of the commit of the current request; 0 before the commit."""
    applying: bool = field(default=False, compare=False)
    """A result of the current turn was accepted and its step is running. Not on the log: after a restart a result is
    accepted again."""

    @property
    def tokens(self) -> bytes:
        """All tokens of the context, packed."""
        return self.context.tokens

    def classify(self, result: TurnResult) -> ResultVerdict:
        """How to handle this result in the current state."""
        if result.outcome is TurnOutcome.REFUSED and result.refusal is Refusal.CONTEXT:
            torn = result.turn == self.turn and self.chain and not self.applying
            return ResultVerdict.ANCHOR if torn else ResultVerdict.LATE
        if result.outcome in (TurnOutcome.PREEMPTED, TurnOutcome.REFUSED):
            return ResultVerdict.ROUTERS
        if result.turn != self.turn:
            return ResultVerdict.LATE
        if self.applying:
            return ResultVerdict.DUPLICATE
        return ResultVerdict.FAIL if result.outcome is TurnOutcome.FAILED else ResultVerdict.APPLY

    def begin_turn(self, max_context_tokens: int) -> None:
        """Set the sampling of the current turn."""
        room = max(1, max_context_tokens - count(self.tokens))
        self.sampling = turn_sampling(self.prompt, self.index, self.turn, room_tokens=room)

    def apply_result(self, result: TurnResult, applied: Applied) -> None:
        """Append the sampled tokens of the current turn with their metadata. The result must have no `result_error`."""
        assert result.worker is not None
        self._extend_chain()
        start = count(self.tokens)
        self.context = self.context.followed_by(result.part)
        self.turns.append(
            SampleTurn(
                turn=result.turn,
                attempt=result.attempt,
                worker=result.worker,
                sampling=self.sampling,
                start=start,
                end=count(self.tokens),
                cached_tokens=min(result.cached_tokens, start),
                times=msgspec.structs.replace(
                    result.times, applied_at=applied.applied_at, committed_at=applied.committed_at
                ),
                environment_seconds=applied.environment_seconds,
            )
        )
        self.device_seconds = add_device_seconds(self.device_seconds, result.device_seconds)
        self.applied.append(applied)
        self.reward = applied.reward

    def anchor(self) -> None:
        """Drop the chain: the next request has the whole context."""
        self.chain, self.requested, self.request_offset = (), 0, None

    def observe(self, observation: bytes) -> None:
        """Append an observation's tokens and begin the next turn."""
        self.context = self.context.with_observation(observation)
        if self.turn < 0:
            self.prompted = count(observation)
        self.turn += 1
        self.applying = False

    def _extend_chain(self) -> None:
        """Append the current request to the chain if its offset is above the chain's offsets.

        Otherwise the next request is an anchor.

        The offset can be lower after a broker has lost its newest records and reuses their offsets.
        """
        behind = self.request_offset is not None and self.request_offset > max(self.chain, default=-1)
        if self.request_offset is None or not behind or len(self.chain) >= MAX_CHAIN:
            self.anchor()
            return
        self.chain, self.requested, self.request_offset = (*self.chain, self.request_offset), count(self.tokens), None

    @property
    def needs_from(self) -> int:
        """The first offset of the home's requests that the context needs."""
        return self.chain[0] if self.chain else self.requested_from

    @property
    def oldest_version(self) -> int | None:
        """Oldest policy version that sampled one of its tokens; None if none was sampled."""
        return min((span.version for span in self.context.spans), default=None)

    def progress(self) -> TrajectoryProgress:
        """The progress record: where the trajectory's request and results are."""
        return TrajectoryProgress(
            trajectory_id=self.trajectory_id,
            group_id=self.prompt.group_id,
            index=self.index,
            turn=self.turn,
            requested_from=self.requested_from,
            prompted=self.prompted,
            applied=tuple(self.applied),
        )


def digest_of(state: bytes) -> bytes:
    """The digest of an environment's state."""
    return hashlib.blake2b(state, digest_size=16).digest()


def begin(prompt: Prompt, index: int, *, home: int, observation: bytes, state: bytes) -> Trajectory:
    """A trajectory after its first observation. `prompt` must have its full sampling."""
    trajectory = Trajectory(
        trajectory_id=trajectory_id(prompt.group_id, index),
        index=index,
        prompt=prompt,
        home=home,
        state=state,
        digest=digest_of(state),
    )
    trajectory.observe(observation)
    return trajectory


def result_error(result: TurnResult, context_tokens: int) -> str | None:
    """Why a COMPLETED result cannot be applied to a context of `context_tokens` tokens; None if it can."""
    sampled = count(result.tokens)
    if result.worker is None:
        return "no worker is named"
    if context_tokens + sampled > MAX_CONTEXT_TOKENS:
        return f"{context_tokens} tokens of context and {sampled} sampled ones are more than {MAX_CONTEXT_TOKENS}"
    return result.part.validation_error


def with_full_sampling(prompt: Prompt, default: Sampling) -> Prompt:
    """Return the prompt with all sampling settings.

    Later changes of a worker's defaults then do not change open trajectories.
    """
    return msgspec.structs.replace(
        prompt, sampling=PromptSampling.from_sampling(prompt.sampling.with_defaults(default))
    )


def turn_sampling(prompt: Prompt, index: int, turn: int, *, room_tokens: int) -> Sampling:
    """The sampling of a turn, limited to `room_tokens` tokens and with its own seed.

    The seed of each turn is a hash of the prompt's seed, trajectory and turn. With one seed for all, the trajectories
    of a group would be alike.
    """
    sampling = prompt.sampling.with_defaults(Sampling())
    seed = sampling.seed
    if seed is not None:
        drawn = hashlib.blake2b(f"{seed}/{trajectory_id(prompt.group_id, index)}/{turn}".encode(), digest_size=8)
        seed = int.from_bytes(drawn.digest(), "little") >> 1
    return msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, room_tokens), seed=seed)
