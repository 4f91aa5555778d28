"""An emulated engine: it computes nothing, and its turns take the time that its rates give.

Keeps true
- What is sampled is a function of trajectory and turn alone. So a turn sampled in parts is what it is in one, and all
  arms of a benchmark sample the same.
- Prefills are run one after another, and decodes beside them, each at the rate of one sequence.
- A prefix is cached where it was computed, until there is no room or everything is dropped.

Pure; times are unix seconds, compute is in seconds of the device.

Example, 500 tokens/s of prefill and 10 of decode
    a turn of 100 new context tokens that samples 8 -> 0.2 s + 0.8 s of compute
    beside users who take half of the device        -> 2 s
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
"""That emulated executors serve: nobody trains."""

LEAST_TOKENS = 2
"""Of a turn: a token and the stop token."""

NEARLY = 1e-9
"""What sums of floats leave over."""


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What a device with nothing else to do makes of turns."""

    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    """Of one sequence."""
    max_turns: int
    """That run at once; each is as fast as alone."""
    kv_tokens: int
    """That turns may hold."""


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """How much is sampled: log-normal, with a long tail."""

    median_tokens: float
    """Of a turn."""
    trajectory_sigma: float
    """How much a trajectory differs from another, in the logarithm."""
    turn_sigma: float
    """And its turns among themselves."""
    token: int
    """The one that is sampled, but for the stop token at the end."""


def sampled_of(trajectory: str, turn: int, sampling: Sampling, lengths: Lengths) -> tuple[bytes, str]:
    """The packed tokens of the whole turn, and why it ends."""
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
    """That all of its group begin with; 0 where nothing is shared."""
    context_tokens: int
    cached_tokens: int
    tokens: bytes
    """That it will have sampled here."""
    finish_reason: str
    scheduled_at: float
    prefill_left: float
    """Tokens."""
    sampled: float = 0.0
    """Tokens."""
    first_token_at: float = 0.0
    device_seconds: float = 0.0

    @property
    def done_tokens(self) -> int:
        """Whole ones."""
        return min(count(self.tokens), int(self.sampled + NEARLY))


class Engine:
    """The turns of one executor."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.running: dict[str, Work] = {}
        """In the order in which they came."""
        self._cache: OrderedDict[str, int] = OrderedDict()
        """By trajectory or group: how many tokens of it; the longest unused first."""
        self._cached = 0

    @property
    def held_tokens(self) -> int:
        """Of KV that running turns hold."""
        return sum(work.context_tokens + work.done_tokens for work in self.running.values())

    def take(self, name: str, request: TurnRequest, context_tokens: int, rest: bytes, finish: str, now: float) -> None:
        """Run it: `rest` is what it samples here, behind `context_tokens`."""
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
        """So much was computed up to now; the turns that have ended."""
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
        """Take a turn out, with what was sampled of it."""
        return self._leave(self.running[name], ABORTED, now, reason)

    def youngest(self) -> str:
        """The turn of which least is lost."""
        return min(self.running.values(), key=lambda work: (work.sampled, -work.scheduled_at)).name

    def drop(self) -> None:
        """Nothing is cached any more."""
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
