"""The engine of an emulated executor: the simulator's engine, which computes only how long a real engine would take.

Keeps true
- Sampled tokens depend on trajectory and turn alone. So a turn sampled in parts equals the turn sampled at once, and
  all arms of a benchmark sample the same tokens.
- The engine's clock stands while the device does not compute for the executor.
- Batches, prefix cache and preemption are those of `rose.pipeline.simulation.engine`, with a cost model from rates: a
  step takes the time of one token, and each prompt token of the step adds its time.

Pure; times are unix seconds, compute is in seconds of the device.

Example, 500 tokens/s of prefill and 10 of decode
    a turn of 100 new context tokens that samples 8 -> a step of 0.3 s, and seven of 0.1 s
    with users who take half of the device          -> 2 s
"""

import math
import random
from bisect import bisect_left

import msgspec

from rose.pipeline.simulation.cost_model import CostModel, Profile, linear_profile
from rose.pipeline.simulation.engine import Engine as SimulatedEngine
from rose.pipeline.simulation.engine import EngineRequest, EngineResult
from rose.pipeline.simulation.prefix_cache import Segment
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

STEP_TOKENS = 8192
"""Most tokens of a step."""


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of a device without other load."""

    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    """Rate of one sequence, while no prompt is computed."""
    max_turns: int
    """Most turns that run at once; each runs at the full rate."""
    kv_tokens: int
    """Most tokens that turns and cached prefixes may hold."""


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


def profile_of(rates: Rates) -> Profile:
    """Return the profile of a device with these rates."""
    return linear_profile(
        "the rates of an emulated executor",
        card="emulated",
        kv_tokens=rates.kv_tokens,
        step_seconds=1.0 / rates.decode_tokens_per_second,
        prefill_token_seconds=1.0 / rates.prefill_tokens_per_second,
    )


class Engine:
    """The turns of one executor."""

    def __init__(self, rates: Rates, prompts: dict[str, int] | None = None) -> None:
        """`prompts`: tokens of the prompt of each group, which the engines of a fleet learn from first turns."""
        self._engine = SimulatedEngine(
            CostModel.of(profile_of(rates)),
            max_running=rates.max_turns,
            step_tokens=STEP_TOKENS,
            kv_tokens=rates.kv_tokens,
        )
        self._outputs: dict[str, tuple[bytes, str]] = {}
        """Tokens that each turn samples here, and its finish reason."""
        self._prompts = {} if prompts is None else prompts
        self._clock = 0.0
        """Seconds of compute so far."""
        self._clocks: list[float] = []
        self._times: list[float] = []
        """Unix seconds of each look at the engine, and its clock then."""

    @property
    def names(self) -> list[str]:
        """Return the names of all turns."""
        return list(self._outputs)

    @property
    def held_tokens(self) -> int:
        """Return the KV tokens that running turns hold."""
        return self._engine.held_tokens

    def take(self, name: str, request: TurnRequest, context_tokens: int, rest: bytes, finish: str) -> None:
        """Start a turn. `rest`: tokens that the turn samples here, after `context_tokens`."""
        if request.turn == 0:
            self._prompts[request.group_id] = request.context_tokens
        prompt = self._prompts.get(request.group_id, 0)
        segments = (
            Segment(f"group {request.group_id}", prompt),
            Segment(request.trajectory_id, context_tokens - prompt),
        )
        self._outputs[name] = rest, finish
        self._engine.add(EngineRequest(name, segments, count(rest), self._clock), self._clock)

    def advance(self, seconds: float, now: float) -> list[TurnFinished]:
        """Compute for `seconds` up to `now`; return the turns that have ended."""
        if seconds > 0.0:
            self._clock += seconds
            self._clocks.append(self._clock)
            self._times.append(now)
        ended = self._engine.advance(self._clock)
        return [self._finished(result, self._outputs[result.request.name][1], now) for result in ended]

    def give_up(self, name: str, now: float, reason: str = "") -> TurnFinished:
        """Remove a turn; return it with its sampled tokens."""
        return self._finished(self._engine.abort(name, self._clock), ABORTED, now, reason)

    def youngest(self) -> str:
        """Return the name of the running turn that began last."""
        return self._engine.youngest()

    def drop(self) -> None:
        """Drop the cache."""
        self._engine.drop_cache()

    def _finished(self, result: EngineResult, finish_reason: str, now: float, reason: str = "") -> TurnFinished:
        name, many = result.request.name, result.sampled_tokens
        tokens, _ = self._outputs.pop(name)
        sampled = SampledTokens(
            tokens=tokens[: 4 * many],
            logprobs=pack_logprobs([-0.25 * (place % 8) for place in range(many)]),
            spans=(VersionSpan(0, many, VERSION),) if many else (),
        )
        turn = FinishedTurn(
            name=name,
            sampled=sampled,
            finish_reason=finish_reason,
            context_tokens=result.request.context_tokens,
            cached_tokens=result.cached_tokens,
            times=TurnTimes(
                scheduled_at=self._seen_at(result.scheduled_at, now) if result.scheduled_at or many else 0.0,
                first_token_at=self._seen_at(result.first_token_at, now) if many else 0.0,
                finished_at=now,
            ),
        )
        return TurnFinished(turn, device_seconds=result.device_seconds, reason=reason)

    def _seen_at(self, clock: float, now: float) -> float:
        """Return the unix seconds of the first look at which the engine's clock had reached `clock`."""
        place = bisect_left(self._clocks, clock)
        return self._times[place] if place < len(self._times) else now
