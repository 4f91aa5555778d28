"""One trajectory between two turns: what it has seen, which results count, how its next turn is sampled. Pure.

Keeps true
- For every turn exactly one result is applied: the first COMPLETED one in log order. The rest is told apart, not lost.
- A context only grows. Sampled tokens stay as they were sampled; mask, logprobs and version spans cover every token.
- The same log gives the same state: `observe`, `ask` and `apply_result` are used alike by the life and by its recovery.
- What its requests have appended, in the order of its chain and the present one last, is its context.

Example, a task of two turns (`transitions.py` says what each of them writes)
    begin(observation `+1+2`)                   -> request of turn 0
    result of turn 0, attempt 0, PREEMPTED      -> ROUTERS: it will come again
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
from rose.schemas.samples import SampleTurn
from rose.schemas.turns import Refusal, TurnOutcome, TurnResult, VersionSpan


class ResultVerdict(Enum):
    """What a result means to its trajectory."""

    APPLY = "apply"
    FAIL = "fail"
    """The router gave the turn up."""
    ROUTERS = "routers"
    """Preempted or refused: the router issues the turn again."""
    ANCHOR = "anchor"
    """Its context could not be read back: the router waits for a request that carries it whole."""
    LATE = "late"
    """Of a turn that has passed."""
    DUPLICATE = "duplicate"
    """Of the present turn, whose result is being applied already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryRules:
    """What holds for all trajectories of a worker."""

    model_id: str
    sampling: Sampling
    """For what a prompt leaves open."""
    turn_patience_seconds: float
    max_context_tokens: int


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """The state between two turns. All of it can be built again from the log."""

    trajectory_id: str
    index: int
    prompt: Prompt
    """With its sampling said in full, see `with_full_sampling`."""
    home: int
    state: bytes
    """The environment's newest snapshot."""
    digest: bytes
    """Of `state`."""
    turn: int = -1
    """The turn that is asked for; -1 before the first observation."""
    prompted: int = 0
    """Tokens of the first observation."""
    sampling: Sampling = field(default_factory=Sampling)
    """How the present turn is sampled."""
    tokens: bytes = b""
    mask: bytes = b""
    logprobs: bytes = b""
    spans: list[VersionSpan] = field(default_factory=list)
    turns: list[SampleTurn] = field(default_factory=list)
    applied: list[Applied] = field(default_factory=list)
    """Of the turns before the present one."""
    device_seconds: dict[str, float] = field(default_factory=dict)
    reward: float = 0.0
    chain: tuple[int, ...] = ()
    """That the present request goes on from."""
    requested: int = 0
    """Tokens that the requests before the present one have appended."""
    requested_from: int = field(default=0, compare=False)
    """The present request lies at or after this offset of the home's requests."""
    request_offset: int | None = field(default=None, compare=False)
    """Where the present request lies, once it is known."""
    committed_at: float = field(default=0.0, compare=False)
    """Unix seconds; when the present request was committed, once it is."""
    applying: bool = field(default=False, compare=False)
    """A result of the present turn was accepted, its step is under way. Not on the log: a restart accepts it anew."""

    def classify(self, result: TurnResult) -> ResultVerdict:
        """What this result means now."""
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
        """Settle how the present turn is sampled."""
        room = max(1, max_context_tokens - count(self.tokens))
        self.sampling = turn_sampling(self.prompt, self.index, self.turn, room_tokens=room)

    def apply_result(self, result: TurnResult, applied: Applied) -> None:
        """Append the sampled tokens of the present turn and all that is said of them. It has no `result_error`."""
        assert result.worker is not None
        self._extend_chain()
        start, sampled = count(self.tokens), count(result.tokens)
        self.tokens += result.tokens
        self.mask += b"\x01" * sampled
        self.logprobs += result.logprobs
        self.spans += [VersionSpan(span.start + start, span.end + start, span.version) for span in result.spans]
        self.turns.append(
            SampleTurn(
                turn=result.turn,
                attempt=result.attempt,
                worker=result.worker,
                sampling=self.sampling,
                start=start,
                end=start + sampled,
                cached_tokens=min(result.cached_tokens, start),
                times=msgspec.structs.replace(
                    result.times, applied_at=applied.applied_at, committed_at=applied.committed_at
                ),
                environment_seconds=applied.environment_seconds,
            )
        )
        for worker_class, seconds in result.device_seconds.items():
            self.device_seconds[worker_class] = self.device_seconds.get(worker_class, 0.0) + seconds
        self.applied.append(applied)
        self.reward = applied.reward

    def anchor(self) -> None:
        """The present turn is asked for with all tokens so far."""
        self.chain, self.requested, self.request_offset = (), 0, None

    def observe(self, observation: bytes) -> None:
        """Append an observation's tokens; the next turn begins."""
        self.tokens += observation
        self.mask += bytes(count(observation))
        self.logprobs += bytes(len(observation))  # 0.0 a token
        if self.turn < 0:
            self.prompted = count(observation)
        self.turn += 1
        self.applying = False

    def _extend_chain(self) -> None:
        """The next request goes on from the present one, if that lies behind its chain; else it is an anchor.

        It may lie before it where a broker lost its newest records: it gives their offsets again.
        """
        behind = self.request_offset is not None and self.request_offset > max(self.chain, default=-1)
        if self.request_offset is None or not behind or len(self.chain) >= MAX_CHAIN:
            self.anchor()
            return
        self.chain, self.requested, self.request_offset = (*self.chain, self.request_offset), count(self.tokens), None

    @property
    def needs_from(self) -> int:
        """The first offset of the home's requests that its context is made of."""
        return self.chain[0] if self.chain else self.requested_from

    def progress(self) -> TrajectoryProgress:
        """Where the parts of it lie."""
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
    """Names an environment state."""
    return hashlib.blake2b(state, digest_size=16).digest()


def begin(prompt: Prompt, index: int, *, home: int, observation: bytes, state: bytes) -> Trajectory:
    """A trajectory that has seen its first observation. The prompt's sampling is said in full."""
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


def result_error(result: TurnResult, context_tokens: int) -> str:
    """Why a COMPLETED result cannot be applied to a context of so many tokens; empty when it can."""
    sampled = count(result.tokens)
    if result.worker is None:
        return "no worker is named"
    if context_tokens + sampled > MAX_CONTEXT_TOKENS:
        return f"{context_tokens} tokens of context and {sampled} sampled ones are more than {MAX_CONTEXT_TOKENS}"
    return result.part.validation_error


def with_full_sampling(prompt: Prompt, default: Sampling) -> Prompt:
    """The prompt with its sampling in full: what a worker is configured to later changes no trajectory that is open."""
    return msgspec.structs.replace(
        prompt, sampling=PromptSampling.from_sampling(prompt.sampling.with_defaults(default))
    )


def turn_sampling(prompt: Prompt, index: int, turn: int, *, room_tokens: int) -> Sampling:
    """How this turn is sampled: never past the context limit, and with a seed of its own.

    One seed for all would make a group's trajectories alike: each turn's is drawn from the prompt's by hashing.
    """
    sampling = prompt.sampling.with_defaults(Sampling())
    seed = sampling.seed
    if seed is not None:
        drawn = hashlib.blake2b(f"{seed}/{trajectory_id(prompt.group_id, index)}/{turn}".encode(), digest_size=8)
        seed = int.from_bytes(drawn.digest(), "little") >> 1
    return msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, room_tokens), seed=seed)
