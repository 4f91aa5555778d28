"""An emulated engine: it computes nothing, and the durations of its turns follow from its rates.

Keeps true
- Sampled tokens depend on trajectory and turn alone. So a turn sampled in parts equals the turn sampled at once, and
  all arms of a benchmark sample the same tokens.
- Prefills run one after another, and decodes run in parallel, each at the rate of one sequence.
- A prefix is cached where it was computed, until room is needed or the cache is dropped.

Pure; times are unix seconds, compute is in seconds of the device.

Example, 500 tokens/s of prefill and 10 of decode
    a turn of 100 new context tokens that samples 8 -> 0.2 s + 0.8 s of compute
    with users who take half of the device          -> 2 s
"""

import math
import random
from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from rose.schemas.arrays import count, pack_logprobs, pack_tokens
from rose.schemas.prompts import Sampling
from rose.schemas.sampled_tokens import SampledTokens, VersionSpan
from rose.schemas.turns import TurnRequest, TurnTimes
from rose.workers.executor.ipc.messages import ABORTED, TurnFinished
from rose.workers.executor.vllm.types import FinishedTurn

VERSION = 0
"""Policy version of emulated executors, which are never trained."""

LEAST_TOKENS = 2
"""Least sampled tokens of a turn: one token and the stop token."""

NEARLY = 1e-9
"""Tolerance for rounding errors of float sums."""


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of a device without other load."""

    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    """Rate of one sequence."""
    max_turns: int
    """Most turns that run at once; each runs at the full rate."""
    kv_tokens: int
    """Most tokens that turns may hold."""


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of the sampled length: log-normal, with a long tail."""

    median_tokens: float
    """Median tokens of a turn."""
    trajectory_sigma: float
    """Standard deviation between trajectories, of the logarithm."""
    turn_sigma: float
    """Standard deviation between the turns of a trajectory, of the logarithm."""
    token: int
    """The sampled token, except for the stop token at the end."""


def sampled_of(trajectory: str, turn: int, sampling: Sampling, lengths: Lengths) -> tuple[bytes, str]:
    """Return the packed tokens of the whole turn, and its finish reason."""
    alike = random.Random(trajectory).gauss(0.0, lengths.trajectory_sigma)
    own = random.Random(f"{trajectory}/{turn}").gauss(0.0, lengths.turn_sigma)
    many = max(LEAST_TOKENS, round(lengths.median_tokens * math.exp(alike + own)))
    if many > sampling.max_tokens or not sampling.stop_token_ids:
        return pack_tokens([lengths.token] * min(many, sampling.max_tokens)), "length"
    return pack_tokens([lengths.token] * (many - 1) + [sampling.stop_token_ids[0]]), "stop"


@dataclass(slots=True, eq=False)
class Work:
    """One turn in the engine."""

    name: str
    trajectory: str
    group: str
    prompt_tokens: int
    """Prompt tokens that the turn's group shares; 0 if nothing is shared."""
    context_tokens: int
    cached_tokens: int
    tokens: bytes
    """Tokens that the turn samples here."""
    finish_reason: str
    scheduled_at: float
    prefill_left: float
    """Prefill tokens that are left."""
    sampled: float = 0.0
    """Sampled tokens so far, including a fraction."""
    first_token_at: float = 0.0
    device_seconds: float = 0.0

    @property
    def done_tokens(self) -> int:
        """Return the number of completely sampled tokens."""
        return min(count(self.tokens), int(self.sampled + NEARLY))


class Engine:
    """The turns of one executor."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.running: dict[str, Work] = {}
        """Running turns in order of arrival."""
        self._cache: OrderedDict[str, int] = OrderedDict()
        """Cached tokens of each trajectory or group, the least recently used first."""
        self._cached = 0

    @property
    def held_tokens(self) -> int:
        """Return the KV tokens that running turns hold."""
        return sum(work.context_tokens + work.done_tokens for work in self.running.values())

    def take(self, name: str, request: TurnRequest, context_tokens: int, rest: bytes, finish: str, now: float) -> None:
        """Start a turn. `rest`: tokens that the turn samples here, after `context_tokens`."""
        group = f"group {request.group_id}"
        found = max(self._look_up(request.trajectory_id), self._look_up(group) if request.turn == 0 else 0)
        cached = min(found, context_tokens - 1)
        prompt = request.context_tokens if request.turn == 0 else 0
        self.running[name] = Work(
            name=name,
            trajectory=request.trajectory_id,
            group=group,
            prompt_tokens=prompt,
            context_tokens=context_tokens,
            cached_tokens=cached,
            tokens=rest,
            finish_reason=finish,
            scheduled_at=now,
            prefill_left=context_tokens - cached,
        )

    def advance(self, seconds: float, now: float) -> list[TurnFinished]:
        """Compute for `seconds` up to `now`; return the turns that have ended."""
        ended, prefill = [], seconds
        decoding = [work for work in self.running.values() if work.prefill_left <= NEARLY]
        left = dict.fromkeys((work.name for work in decoding), seconds)
        for work in self.running.values():
            if work.name in left:
                continue
            takes = min(prefill, work.prefill_left / self.rates.prefill_tokens_per_second)
            prefill -= takes
            work.prefill_left -= takes * self.rates.prefill_tokens_per_second
            work.device_seconds += takes
            if work.prefill_left > NEARLY:
                break
            self._computed(work)
            left[work.name] = prefill
        for name, more in left.items():
            work = self.running[name]
            work.device_seconds += more / self.rates.max_turns
            work.sampled += more * self.rates.decode_tokens_per_second
            if work.done_tokens and not work.first_token_at:
                work.first_token_at = now
            if work.done_tokens == count(work.tokens):
                ended.append(self._leave(work, work.finish_reason, now))
        return ended

    def give_up(self, name: str, now: float, reason: str = "") -> TurnFinished:
        """Remove a turn; return it with its sampled tokens."""
        return self._leave(self.running[name], ABORTED, now, reason)

    def youngest(self) -> str:
        """Return the name of the turn with the fewest sampled tokens, of equal turns the newest."""
        return min(self.running.values(), key=lambda work: (work.sampled, -work.scheduled_at)).name

    def drop(self) -> None:
        """Drop the cache."""
        self._cache.clear()
        self._cached = 0

    def _leave(self, work: Work, finish_reason: str, now: float, reason: str = "") -> TurnFinished:
        del self.running[work.name]
        many = work.done_tokens
        if work.prefill_left <= NEARLY:
            self._keep(work.trajectory, work.context_tokens + many)
        sampled = SampledTokens(
            tokens=work.tokens[: 4 * many],
            logprobs=pack_logprobs([-0.25 * (place % 8) for place in range(many)]),
            spans=(VersionSpan(0, many, VERSION),) if many else (),
        )
        first_token_at = work.first_token_at if many else 0.0
        turn = FinishedTurn(
            name=work.name,
            sampled=sampled,
            finish_reason=finish_reason,
            context_tokens=work.context_tokens,
            cached_tokens=work.cached_tokens,
            times=TurnTimes(scheduled_at=work.scheduled_at, first_token_at=first_token_at, finished_at=now),
        )
        return TurnFinished(turn, device_seconds=work.device_seconds, reason=reason)

    def _computed(self, work: Work) -> None:
        work.prefill_left = 0.0
        if work.prompt_tokens:
            self._keep(work.group, work.prompt_tokens)

    def _look_up(self, name: str) -> int:
        if name in self._cache:
            self._cache.move_to_end(name)
        return self._cache.get(name, 0)

    def _keep(self, name: str, tokens: int) -> None:
        self._cached += tokens - self._cache.pop(name, 0)
        self._cache[name] = tokens
        while self._cached > self.rates.kv_tokens:
            self._cached -= self._cache.popitem(last=False)[1]
