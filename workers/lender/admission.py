"""Admission: whether the guest may compute now, and how much. Decided in the serving process before each guest step.

Keeps true
- While serving holds no request, the guest may always compute: one step of at most `yield_seconds` as predicted, or of
  one token if not even one token fits (so that a cost learned from a stall is unlearned). A request that arrives waits
  at most for this step: `yield_seconds` is the yield bound.
- While serving has a waiting request, an ended request that is not released yet (its KV blocks may still be sent), or
  an unread message in its input queue, the guest does not compute. Beside a server with async scheduling it begins no
  work either while a request runs or a batch is in flight.
- While serving computes, the guest may compute as long as all of these limits allow, and never longer than the yield
  bound:
  prefill    `S_prf = (arrival + ttft) - now - T_prf` of each request without a first token, where T_prf includes all
             prompts ahead, and of the prompts that may arrive meanwhile: the guest's step makes no prefill late
  decode     `S_dec = (last token + tpot) - now - T_dec` of each decoding request, with those prompts in its next step
  occupancy  the seconds that serving's own steps have earned for guests (`OccupancyGuard`)
  All three limits charge the guest for the extra time of serving's next step after a guest step.
- Slack is not used in small pieces: the guest waits until at least `MIN_USEFUL_SHARE` of the seconds of its next work
  is left, or all of them if the work cannot be done in part.
- All guest work is admitted by the same rules, including the build of the guest and its first step, whose cost is not
  known yet: a server that is never idle but has slack lends too. If not even one token fits with its error, a step of
  one token runs when almost all of the yield bound is left, provided that the step is expected to end within it.
  Otherwise the estimated cost of the step fades while no step runs: something other than the guest may have caused it.

One dial, from 0 to 1, sets how many requests serving may hold: at most `1 / (1 - dial)` times as many as without a
guest.
- 0 is `strict`: as many as without a guest. The guest computes only while serving has nothing to do.
- above 0 is `slo`: the guest also computes within the slack. At 0.09 serving may hold a tenth more, at 0.5 twice as
  many.
- 1 uses the slack alone, without an occupancy guard. It is the end of the scale, not a setting for a real server.

Units: seconds, tokens; `now` and all other times are of one monotonic clock. Pure.

Calls: `on_arrival` for each prompt, `on_serving_step` after each serving step, `admit` before each guest step,
`on_guest_run` after it. The learned step costs, with their prediction errors, are in `serving.prefill`,
`serving.decode` and `guest`. The caller that runs the guest's steps observes them in `guest`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from rose.schemas.errors import UsageError
from rose.schemas.setting_bounds import YEAR_SECONDS
from rose.workers.executor.ipc.messages import NextWork, WorkKind
from rose.workers.executor.step_cost import INITIAL_COST, StepCost

AFTER_GUEST_RATE = 0.1
"""Rate at which `after_guest_seconds` follows the excess of a step over its prediction: about the last ten steps
count."""

AFTER_GUEST_FADING = 0.001
"""Share of a learned cost of the guest that fades with each serving step without a guest step before: half in 700."""


class ServingCost:
    """Predicts the seconds of serving's steps, which decode requests and compute prompts."""

    def __init__(self, *, step_tokens: int) -> None:
        self.step_tokens = step_tokens
        """Most tokens that one serving step computes; longer prompts take several."""
        self.decode = StepCost(**INITIAL_COST)
        self.prefill = StepCost(**INITIAL_COST)
        self.after_guest_seconds = 0.0
        """Extra seconds of the first serving step after a guest step."""

    def observe(self, *, prompt_tokens: int, decoding: int, seconds: float, after_guest: bool = False) -> float:
        """Learn from one serving step. Return its fixed cost: the seconds that any batch takes without a guest.

        `prompt_tokens`: prompt tokens that the step computed, in addition to one token for each of `decoding` requests.
        `after_guest`: whether the guest has computed since the serving step before.
        """
        fit, tokens = self.prefill if prompt_tokens else self.decode, prompt_tokens + decoding
        if after_guest:
            self._observe_after_guest(fit, tokens, seconds)
            seconds = max(0.0, seconds - self.after_guest_seconds)
        else:
            self.after_guest_seconds *= 1.0 - AFTER_GUEST_FADING
        fit.observe(tokens, seconds)
        return min(fit.base_seconds, seconds)

    def _observe_after_guest(self, fit: StepCost, tokens: int, seconds: float) -> None:
        """Learn `after_guest_seconds` from a step, if the cost of serving's steps without a guest is known.

        The change is bounded by the prediction error: the excess of the worst steps has other causes.
        """
        if not fit.has_observed:
            return
        alone = fit.seconds(tokens)
        usual = fit.error * alone
        longer = seconds - alone - self.after_guest_seconds
        self.after_guest_seconds = max(
            0.0, self.after_guest_seconds + AFTER_GUEST_RATE * min(max(longer, -usual), usual)
        )

    def prefill_seconds(self, tokens: int, decoding: int) -> float:
        """T_prf: seconds until the last of `tokens` prompt tokens is computed, in steps that also decode."""
        if not tokens:
            return 0.0
        steps = -(-tokens // max(1, self.step_tokens - decoding))
        return self.prefill.cautious_seconds(tokens + steps * decoding, steps=steps)

    def step_seconds(self, tokens: int, decoding: int) -> float:
        """T_dec: seconds of the next step, which decodes and computes as many of `tokens` prompt tokens as fit."""
        if not tokens:
            return self.decode.cautious_seconds(decoding)
        return self.prefill.cautious_seconds(min(tokens + decoding, self.step_tokens))


STALLED_STEPS = 50.0
"""A guest step is charged for at most this many times the longest guest step: 1 s at the default yield bound."""


class OccupancyGuard:
    """Bounds the requests that serving holds in addition because of the guest.

    Keeps the request-seconds that serving's own steps have earned and the guest has not spent.
    """

    def __init__(self, *, dial: float, longest_seconds: float) -> None:
        self._share = dial / (1.0 - dial) if dial < 1.0 else math.inf
        self._longest_seconds = longest_seconds
        self._earned = 0.0

    def on_serving_step(self, held: int, fixed_seconds: float) -> None:
        """Earn from a serving step with `held` requests, of which `fixed_seconds` were its fixed cost."""
        if self._share < math.inf:
            earned = self._earned + self._share * held * fixed_seconds
            self._earned = min(earned, held * self._longest_seconds)

    def on_guest_run(self, held: int, seconds: float) -> None:
        """Spend `seconds` of guest work while serving held `held` requests."""
        if self._share < math.inf:
            self._earned -= held * min(seconds, STALLED_STEPS * self._longest_seconds)

    def available_seconds(self, held: int) -> float:
        """Seconds that the guest may compute while serving holds `held` requests, which must be above 0."""
        return self._earned / held if self._share < math.inf else math.inf


ARRIVAL_MEMORY_SECONDS = 3.0
"""Time constant of the arrival rate: an arrival counts for 1/e after so many seconds."""

ARRIVAL_DEVIATIONS = 2.0
"""Standard deviations above the mean that `ArrivalRate.expected_tokens` adds."""


class ArrivalRate:
    """Exponentially fading rate of arriving prompt tokens."""

    def __init__(self) -> None:
        self._tokens = self._squares = 0.0
        self._latest = -math.inf

    def on_arrival(self, tokens: int, now: float) -> None:
        """Record that a prompt of `tokens` tokens arrived at serving."""
        fading = self._fading(now)
        self._tokens = self._tokens * fading + tokens
        self._squares = self._squares * fading + tokens * tokens
        self._latest = max(self._latest, now)

    def expected_tokens(self, seconds: float, now: float) -> int:
        """Upper estimate of the prompt tokens that arrive within `seconds`."""
        share = self._fading(now) * seconds / ARRIVAL_MEMORY_SECONDS
        return round(self._tokens * share + ARRIVAL_DEVIATIONS * math.sqrt(self._squares * share))

    def _fading(self, now: float) -> float:
        return math.exp(min(0.0, self._latest - now) / ARRIVAL_MEMORY_SECONDS)


STRICT = 0.0
"""Dial of the strict policy."""

SLO = 0.09
"""Default dial of the slo policy: serving's requests take at most a tenth longer than without a guest."""

MIN_USEFUL_SHARE = 0.5
"""Share of the seconds of the next work, or of the longest step if that is less, below which a step is not worth its
fixed cost."""

FULL_SHARE = 0.9
"""Share of the yield bound, or of the most slack if that is less, at which all of it counts as left: more is rarely
left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """The latency targets that serving keeps while it lends.

    Raises UsageError for a value out of its range.
    """

    dial: float = STRICT
    """From 0 to 1. 0 (strict): guests compute while serving has no request. Above 0 (slo): guests also compute within
    the slack of the two budgets, and serving may hold up to `1 / (1 - dial)` times the requests that it would hold
    alone."""
    ttft_seconds: float = 1.0
    """Budget B_TTFT, above 0: time from a request's arrival to its first token."""
    tpot_seconds: float = 0.1
    """Budget B_TPOT, above 0: time from one token to the next."""
    yield_seconds: float = 0.02
    """Yield bound, below `ttft_seconds`: the longest predicted guest step. An arriving request waits for at most one
    guest step; where the guest computes in the server's process, for at most one layer of it."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.dial <= 1.0:
            raise UsageError(f"the dial is a number from 0 (strict) to 1 (the slack alone), not {self.dial}")
        if not (0.0 < self.tpot_seconds <= YEAR_SECONDS and 0.0 < self.ttft_seconds <= YEAR_SECONDS):
            raise UsageError("the TTFT and TPOT budgets are seconds above 0, of a year at most")
        if not 0.0 < self.yield_seconds < self.ttft_seconds:
            raise UsageError(f"the yield bound is above 0 s and below the TTFT budget, not {self.yield_seconds} s")


@dataclass(frozen=True, slots=True)
class ServingState:
    """The requests that serving holds at one moment."""

    prefills: Sequence[tuple[float, int]] = ()
    """Requests without a first token, in the order of serving's queue: arrival (seconds), and prompt tokens that are
    neither computed nor cached."""
    last_tokens: Sequence[float] = ()
    """Time of the latest token of each decoding request, seconds."""
    waiting: int = 0
    """Requests that hold no slot: new requests, and requests that serving has preempted."""
    queued: bool = False
    """Whether serving's input queue holds an unread message."""
    overlaps: bool = False
    """Whether serving with async scheduling holds a running request or a batch in flight. Steps of such a server
    overlap, so their times are not known, and `prefills` and `last_tokens` are empty."""
    ending: bool = False
    """Whether only ended requests are left, and serving needs a further step for them: a KV connector may still send
    their blocks, or read blocks that are free."""

    @property
    def held(self) -> int:
        """Number of requests in serving's scheduler."""
        return len(self.prefills) + len(self.last_tokens)


class HoldReason(Enum):
    """Why the guest may not compute now: a waiting request, or the tightest limit."""

    WAITING = "waiting"
    """Serving has a waiting request, an unread message, or an ended request that is not released yet."""
    OCCUPANCY = "occupancy"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class AdmissionDecision:
    """The limits of the guest until the next decision."""

    seconds: float
    """The longest that the guest may compute; 0.0 if the guest may not compute."""
    tokens: int
    """The most tokens of a guest step; 0 for no step, while `seconds` may still allow other work."""
    hold_reason: HoldReason | None
    """Why the guest may not compute; None if it may."""
    prefill_headroom: float | None
    """Least S_prf, seconds; None while no request waits for its first token."""
    decode_headroom: float | None
    """Least S_dec, seconds; None while no request decodes."""


class Admission:
    """Decides when the guest may compute, from serving's promise and the learned step costs of both tenants."""

    def __init__(self, promise: Promise, *, serving_step_tokens: int) -> None:
        """`serving_step_tokens`: the most tokens that one serving step computes."""
        self.promise = promise
        self.serving = ServingCost(step_tokens=serving_step_tokens)
        self.guest = StepCost(**INITIAL_COST)
        self._after_guest = False
        """Whether the guest has computed since the latest serving step."""
        self._untried = 0
        """Serving steps since the latest guest step."""
        self._observed = 0
        """Guest steps that were observed at the latest serving step."""
        self._arrivals = ArrivalRate()
        self._occupancy = OccupancyGuard(dial=promise.dial, longest_seconds=promise.yield_seconds)

    def on_arrival(self, prompt_tokens: int, now: float) -> None:
        """Record the arrival of a request at serving."""
        self._arrivals.on_arrival(prompt_tokens, now)

    def on_serving_step(self, *, prompt_tokens: int, decoding: int, held: int, seconds: float) -> None:
        """Learn from a serving step of `seconds`.

        The step computed `prompt_tokens` tokens of prompts and one token for each of `decoding` requests. `held`:
        requests in serving's scheduler.
        """
        after, self._after_guest = self._after_guest, False
        self._untried = self._untried + 1 if self.guest.observed == self._observed else 0
        self._observed = self.guest.observed
        fixed = self.serving.observe(prompt_tokens=prompt_tokens, decoding=decoding, seconds=seconds, after_guest=after)
        self._occupancy.on_serving_step(held, fixed)

    def on_guest_run(self, *, held: int, seconds: float) -> None:
        """Charge the guest for `seconds` of work while serving held `held` requests."""
        self._after_guest = True
        self._occupancy.on_guest_run(held, seconds + self.serving.after_guest_seconds)

    def admit(self, serving: ServingState, next_work: NextWork, *, now: float) -> AdmissionDecision:
        """Decide whether and for how long the guest may compute its `next_work` at `now`."""
        bound, held = self.promise.yield_seconds, serving.held
        prefill, decode, newcomer, most = self._slack(serving, now)
        hold: HoldReason | None = None
        if serving.queued or serving.waiting or serving.ending:
            seconds, hold = 0.0, HoldReason.WAITING
        elif serving.overlaps:
            seconds, hold = 0.0, HoldReason.OCCUPANCY
        elif not held:
            seconds = bound
        else:
            earned = self._occupancy.available_seconds(held)
            limits = (
                (earned, HoldReason.OCCUPANCY),
                (min(prefill, newcomer), HoldReason.PREFILL),
                (decode, HoldReason.DECODE),
            )
            seconds, tightest = min(limits, key=lambda limit: limit[0])
            seconds = min(seconds - self.serving.after_guest_seconds, bound)
            if seconds <= 0.0 or seconds < self._min_useful_seconds(
                next_work, min(most, bound) - self.serving.after_guest_seconds
            ):
                seconds, hold = 0.0, tightest
        step = not held or next_work.kind is WorkKind.STEP
        return AdmissionDecision(
            seconds=seconds,
            tokens=0 if hold else max(int(step), self.guest.tokens_within(seconds)),
            hold_reason=hold,
            prefill_headroom=prefill if serving.prefills else None,
            decode_headroom=decode if serving.last_tokens else None,
        )

    def _min_useful_seconds(self, next_work: NextWork, most_seconds: float) -> float:
        """Fewest seconds that are worth a start of `next_work` while serving computes.

        `most_seconds`: the most seconds that can be left while serving holds as many requests.
        """
        if next_work.kind is WorkKind.ATOMIC:
            return min(next_work.seconds, FULL_SHARE * most_seconds)
        if next_work.kind is WorkKind.STEP and not self.guest.has_observed:
            return FULL_SHARE * most_seconds
        work_seconds = MIN_USEFUL_SHARE * min(next_work.seconds, most_seconds)
        if next_work.kind is not WorkKind.STEP:
            return work_seconds
        token = self.guest.bounded_seconds(1)
        if self.guest.seconds(1) * (1.0 - AFTER_GUEST_FADING) ** self._untried <= FULL_SHARE * most_seconds:
            token = min(token, FULL_SHARE * most_seconds)
        return max(work_seconds, token)

    def _slack(self, serving: ServingState, now: float) -> tuple[float, float, float, float]:
        """Return four slacks in seconds; inf where there is no request.

        The least S_prf, the least S_dec, the S_prf of prompts that arrive when the guest step begins, and the most that
        the second and third can be while serving holds as many requests.
        """
        decoding, left = len(serving.last_tokens), 0
        prefill = decode = math.inf
        for arrived, tokens in serving.prefills:
            left += tokens
            due = arrived + self.promise.ttft_seconds
            prefill = min(prefill, due - now - self.serving.prefill_seconds(left, decoding))
        left += self._arrivals.expected_tokens(self.promise.yield_seconds, now)
        newcomer = self.promise.ttft_seconds - self.serving.prefill_seconds(left, decoding)
        most = newcomer
        if serving.last_tokens:
            most = self.promise.tpot_seconds - self.serving.step_seconds(left, decoding)
            decode = min(serving.last_tokens) - now + most
        return prefill, decode, newcomer, min(most, newcomer)
