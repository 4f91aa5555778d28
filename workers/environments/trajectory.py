"""One trajectory: which results count, what is asked next, when it ends. Pure.

Keeps true
- For every turn exactly one result is applied: the first COMPLETED one in log order. The rest is told apart, not lost.
- A context only grows. Sampled tokens stay as they were sampled; mask, logprobs and version spans cover every token.
- The same log gives the same state: `take_in` and `observe` are used alike by the life and by its recovery.
- An infrastructure failure is a sample without a reward and with the reason, never a reward of 0.

Example, a task of two turns
    begin(observation `+1+2`)                   -> request of turn 0
    result of turn 0, attempt 0, PREEMPTED      -> ROUTERS: it will come again
    result of turn 0, attempt 1, COMPLETED      -> APPLY; the environment steps; request of turn 1
    result of turn 0, attempt 2, COMPLETED      -> LATE
    result of turn 1, COMPLETED                 -> APPLY; the environment is done; the sample
"""

import hashlib
import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec
import numpy as np

from schemas.arrays import ITEM_BYTES, count, unpack_logprobs
from schemas.environments import EnvSnapshot, LogPosition
from schemas.errors import RecordError
from schemas.limits import CONTEXT_TOKENS
from schemas.prompts import Prompt, Sampling, trajectory_id
from schemas.record import Record
from schemas.samples import Sample, SampleTurn
from schemas.turns import Applied, TurnOutcome, TurnRequest, TurnResult, VersionSpan
from schemas.wire import encode

FAILURE_CHARACTERS = 1_000
"""Longest failure text of a sample; what an exception says beyond it is cut off."""


class Verdict(Enum):
    """What a result means to its trajectory."""

    APPLY = "apply"
    FAIL = "fail"
    """The router gave the turn up."""
    ROUTERS = "routers"
    """Preempted or refused: the router issues the turn again."""
    LATE = "late"
    """Of a turn that has passed."""
    DUPLICATE = "duplicate"
    """Of the present turn, whose result is being applied already."""


class Ending(Enum):
    """How a trajectory ended."""

    DONE = "done"
    MAX_TURNS = "max_turns"
    CONTEXT = "context"
    """No room for another token."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What holds for all trajectories of a worker."""

    sampling: Sampling
    """Of prompts that bring none. Its stop tokens are those of every prompt that names none."""
    turn_deadline_seconds: float
    max_context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """What one step of the environment gave."""

    observation: bytes
    """Tokens to append, framed, packed."""
    reward: float
    done: bool
    success: bool
    info: dict[str, Any]
    state: bytes
    """The environment's snapshot after the step."""
    environment_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What one event of a trajectory puts on the log: a request and perhaps a snapshot, or the sample that ends it."""

    request: TurnRequest | None = None
    snapshot: EnvSnapshot | None = None
    sample: Sample | None = None
    ending: Ending | None = None
    """Set with `sample`."""


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """The state between two turns. All of it can be built again from the log."""

    trajectory_id: str
    index: int
    prompt: Prompt
    home: int
    opened: LogPosition
    state: bytes
    """The environment's newest snapshot."""
    digest: bytes
    turn: int = -1
    """The turn that is asked for; -1 before the first observation."""
    tokens: bytes = b""
    mask: bytes = b""
    logprobs: bytes = b""
    spans: list[VersionSpan] = field(default_factory=list)
    turns: list[SampleTurn] = field(default_factory=list)
    device_seconds: dict[str, float] = field(default_factory=dict)
    reward: float = 0.0
    applying: bool = field(default=False, compare=False)
    """A result of the present turn was accepted, its step is under way. Not on the log: a restart accepts it anew."""

    def judge(self, result: TurnResult) -> Verdict:
        """What this result means now."""
        if result.outcome in (TurnOutcome.PREEMPTED, TurnOutcome.REFUSED):
            return Verdict.ROUTERS
        if result.turn != self.turn:
            return Verdict.LATE
        if self.applying:
            return Verdict.DUPLICATE
        return Verdict.FAIL if result.outcome is TurnOutcome.FAILED else Verdict.APPLY

    def take_in(self, result: TurnResult, applied: Applied) -> None:
        """Append the sampled tokens of the present turn and all that is said of them."""
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
                start=start,
                end=start + sampled,
                cached_tokens=result.cached_tokens,
                times=msgspec.structs.replace(result.times, applied_at=applied.applied_at),
                environment_seconds=applied.environment_seconds,
            )
        )
        for worker_class, seconds in result.device_seconds.items():
            self.device_seconds[worker_class] = self.device_seconds.get(worker_class, 0.0) + seconds
        self.reward = applied.reward

    def observe(self, observation: bytes) -> None:
        """Append an observation's tokens; the next turn begins."""
        self.tokens += observation
        self.mask += bytes(count(observation))
        self.logprobs += bytes(len(observation))  # 0.0 a token
        self.turn += 1
        self.applying = False


def digest_of(state: bytes) -> bytes:
    """Names an environment state."""
    return hashlib.blake2b(state, digest_size=16).digest()


def begin(
    prompt: Prompt, index: int, *, home: int, opened: LogPosition, observation: bytes, state: bytes
) -> Trajectory:
    """A trajectory that has seen its first observation."""
    trajectory = Trajectory(
        trajectory_id=trajectory_id(prompt.group_id, index),
        index=index,
        prompt=prompt,
        home=home,
        opened=opened,
        state=state,
        digest=digest_of(state),
    )
    trajectory.observe(observation)
    return trajectory


def first_request(trajectory: Trajectory, rules: Rules, now: float) -> Written:
    """The snapshot and request that open a trajectory, or its failure when they cannot be written."""
    room = rules.max_context_tokens - count(trajectory.tokens)
    if room <= 0:
        tokens = count(trajectory.tokens)
        reason = (
            f"the first observation's {tokens} tokens leave no room in max_context_tokens {rules.max_context_tokens}"
        )
        return failed(trajectory, reason, now)
    snapshot = _snapshot(trajectory)
    if problem := _unwritable(snapshot):
        return failed(trajectory, f"the environment's state cannot be saved: {problem}", now)
    return Written(request=_request(trajectory, rules, now, None), snapshot=snapshot)


def advance(
    trajectory: Trajectory, result: TurnResult, stepped: Stepped, *, rules: Rules, applied_at: float, now: float
) -> Written:
    """Take a result and the step that it led to in; ask for the next turn or end."""
    applied = Applied(applied_at, stepped.environment_seconds, trajectory.reward + stepped.reward)
    trajectory.take_in(result, applied)
    if not math.isfinite(applied.reward):
        return failed(trajectory, f"the environment's reward is {stepped.reward}", now)
    ending = _ending(trajectory, stepped, rules)
    if ending is not None:
        return _ended(trajectory, stepped, ending, now)
    trajectory.observe(stepped.observation)
    digest = digest_of(stepped.state)
    snapshot = None
    if digest != trajectory.digest:
        trajectory.state, trajectory.digest = stepped.state, digest
        snapshot = _snapshot(trajectory)
        if problem := _unwritable(snapshot):
            return failed(trajectory, f"the environment's state cannot be saved: {problem}", now)
    return Written(request=_request(trajectory, rules, now, applied), snapshot=snapshot)


def broken(trajectory: Trajectory, result: TurnResult, failure: str, *, applied_at: float, now: float) -> Written:
    """End because the environment failed at this result; what was sampled and spent is kept."""
    trajectory.take_in(result, Applied(applied_at, 0.0, trajectory.reward))
    return failed(trajectory, failure, now)


def failed(trajectory: Trajectory, failure: str, now: float) -> Written:
    """End by an infrastructure failure: what was sampled so far, no reward."""
    sample = _sample(trajectory, reward=None, success=False, failure=failure, info={}, now=now)
    if _unwritable(sample):
        sample = failed_at_opening(trajectory.prompt, trajectory.index, failure, now)
    return Written(sample=sample, ending=Ending.FAILED)


def failed_at_opening(prompt: Prompt, index: int, failure: str, now: float) -> Sample:
    """The sample of a trajectory of which there is nothing but the reason of its failure."""
    return Sample(
        trajectory_id=trajectory_id(prompt.group_id, index),
        group_id=prompt.group_id,
        group_size=prompt.group_size,
        environment=prompt.environment,
        seed=prompt.seed,
        tokens=b"",
        loss_mask=b"",
        logprobs=b"",
        spans=(),
        turns=(),
        reward=None,
        success=False,
        failure=_printable(failure),
        completed_at=now,
    )


def problem_of(result: TurnResult, context_tokens: int) -> str:
    """Why a COMPLETED result cannot be applied to a context of so many tokens; empty when it can."""
    sampled = count(result.tokens)
    if len(result.tokens) % ITEM_BYTES or not sampled:
        return f"{len(result.tokens)} bytes of tokens are no whole number of tokens above 0"
    if len(result.logprobs) != len(result.tokens):
        return f"{len(result.logprobs)} bytes of logprobs for {len(result.tokens)} bytes of tokens"
    if not np.isfinite(unpack_logprobs(result.logprobs)).all():
        return "a logprob is not finite"
    if context_tokens + sampled > CONTEXT_TOKENS:
        return f"{context_tokens} tokens of context and {sampled} sampled ones are more than {CONTEXT_TOKENS}"
    at = 0
    for span in result.spans:
        if span.start != at or span.end <= at or span.version < 0:
            return f"version spans do not follow on one another at token {at}"
        at = span.end
    return "" if at == sampled else f"version spans cover {at} of {sampled} tokens"


def turn_sampling(prompt: Prompt, index: int, turn: int, *, room_tokens: int, default: Sampling) -> Sampling:
    """How this turn is sampled: never past the context limit, and with a seed of its own.

    One seed for all would make a group's trajectories alike: each turn's is drawn from the prompt's by hashing.
    """
    sampling = prompt.sampling or default
    seed = sampling.seed
    if seed is not None:
        drawn = hashlib.blake2b(f"{seed}/{trajectory_id(prompt.group_id, index)}/{turn}".encode(), digest_size=8)
        seed = int.from_bytes(drawn.digest(), "little") >> 1
    return Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=min(sampling.max_tokens, room_tokens),
        stop_token_ids=sampling.stop_token_ids or default.stop_token_ids,
        seed=seed,
    )


def _request(trajectory: Trajectory, rules: Rules, now: float, applied: Applied | None) -> TurnRequest:
    room = rules.max_context_tokens - count(trajectory.tokens)
    return TurnRequest(
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.prompt.group_id,
        home=trajectory.home,
        turn=trajectory.turn,
        context=trajectory.tokens,
        sampling=turn_sampling(
            trajectory.prompt, trajectory.index, trajectory.turn, room_tokens=room, default=rules.sampling
        ),
        requested_at=now,
        deadline=now + rules.turn_deadline_seconds,
        applied=applied,
    )


def _snapshot(trajectory: Trajectory) -> EnvSnapshot:
    return EnvSnapshot(
        trajectory_id=trajectory.trajectory_id,
        index=trajectory.index,
        prompt=trajectory.prompt,
        home=trajectory.home,
        turn=trajectory.turn,
        digest=trajectory.digest,
        state=trajectory.state,
        opened=trajectory.opened,
    )


def _ending(trajectory: Trajectory, stepped: Stepped, rules: Rules) -> Ending | None:
    if stepped.done:
        return Ending.DONE
    if trajectory.turn + 1 >= trajectory.prompt.max_turns:
        return Ending.MAX_TURNS
    if count(trajectory.tokens) + count(stepped.observation) >= rules.max_context_tokens:
        return Ending.CONTEXT
    return None


def _ended(trajectory: Trajectory, stepped: Stepped, ending: Ending, now: float) -> Written:
    sample = _sample(
        trajectory,
        reward=trajectory.reward,
        success=stepped.success and stepped.done,
        failure="",
        info=stepped.info,
        now=now,
    )
    if problem := _unwritable(sample):
        return failed(trajectory, f"the sample cannot be written: {problem}", now)
    return Written(sample=sample, ending=ending)


def _sample(
    trajectory: Trajectory, *, reward: float | None, success: bool, failure: str, info: dict[str, Any], now: float
) -> Sample:
    return Sample(
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.prompt.group_id,
        group_size=trajectory.prompt.group_size,
        environment=trajectory.prompt.environment,
        seed=trajectory.prompt.seed,
        tokens=trajectory.tokens,
        loss_mask=trajectory.mask,
        logprobs=trajectory.logprobs,
        spans=tuple(trajectory.spans),
        turns=tuple(trajectory.turns),
        reward=reward,
        success=success,
        failure=_printable(failure),
        info=info,
        device_seconds=trajectory.device_seconds,
        completed_at=now,
    )


def _unwritable(record: Record) -> str:
    """Why a record that holds what an environment made up cannot be encoded; empty when it can."""
    try:
        encode(record)
    except (RecordError, TypeError, ValueError, OverflowError, RecursionError) as error:
        return str(error)
    return ""


def _printable(text: str) -> str:
    """At most FAILURE_CHARACTERS, and nothing that UTF-8 cannot hold."""
    return text[:FAILURE_CHARACTERS].encode(errors="replace").decode()
