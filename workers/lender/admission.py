"""Admission: may a guest compute now, and how much. Asked before every guest step, answered where serving runs.

Keeps true
- While serving holds nothing, a guest always may: one step, of at most `yield_seconds` as predicted, and of one token
  where not even that fits (so a cost learned from a stall is unlearned). A request that arrives waits for that step at
  most: `yield_seconds` is the yield bound.
- While serving has something waiting, or unread in its input queue, no guest computes.
- While serving computes, a guest may only as long as all of these allow, and never longer than the yield bound:
  prefill  `S_prf = (arrival + ttft) - now - T_prf` of each request without a first token, with all that is computed
           before it, and of the prompts that may arrive meanwhile: none is predicted late for the guest's step
  decode   `S_dec = (last token + tpot) - now - T_dec` of each request that decodes, with those prompts in its next step
  occupancy  what serving's own steps have earned for guests: see `rose.workers.lender.admission`
  What serving's next step takes longer because the guest computed is the guest's own time in all three.
- What is left over is not chopped up: less than `MIN_USEFUL_SHARE` of what the guest wants waits for more, and less
  than all of it where what it wants cannot be done in part.
- All of a guest's work is admitted alike, also that of building it, and its first step, which has no price yet: a
  serving that is never idle and has slack lends. Of a step of which not even one token fits with its error, one is
  computed where almost all of the yield bound is left, if it is expected to end within that. Of one that is not, the
  price fades while it is not tried: it may have been somebody else's doing.

One dial, from 0 to 1, says how many requests serving may come to hold: `1 / (1 - dial)` times what it would alone.
- 0 is `strict`: as alone. Guests compute only while serving has nothing to do.
- above 0 is `slo`: guests compute inside the slack too. At 0.09 serving may hold a tenth more, at 0.5 twice as many.
- 1 is the slack alone, without an occupancy guard: the far end of the curve, not a setting to serve with.

Units: seconds, tokens; `now` and every time handed in are of one monotonic clock. Pure.

Calls: `on_arrival` for each prompt, `on_serving_step` after each serving step, `admit` before each guest step,
`on_guest_run` after it. What was learned of steps, with its calibration error, is in `serving.prefill`,
`serving.decode` and `guest`, which whoever runs the guest's steps tells of them.
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
"""Share by which `after_guest_seconds` follows what a step took above its prediction: about the last ten count."""

AFTER_GUEST_FADING = 0.001
"""Share that what is known of guests loses with each step of serving's before which none computed: half in 700."""


class ServingCost:
    """Predicted seconds of a tenant that decodes `decoding` requests and computes prompts beside them."""

    def __init__(self, *, step_tokens: int) -> None:
        self.step_tokens = step_tokens
        """Most tokens that one serving step computes; longer prompts take several."""
        self.decode = StepCost(**INITIAL_COST)
        self.prefill = StepCost(**INITIAL_COST)
        self.after_guest_seconds = 0.0
        """What the first step after the guest takes longer."""

    def observe(self, *, prompt_tokens: int, decoding: int, seconds: float, after_guest: bool = False) -> float:
        """Take in one serving step; returns how many of its seconds it would have taken for any batch, and alone: its
        fixed cost.

        `prompt_tokens` were computed of prompts, beside one token for each of `decoding` requests; `after_guest`: the
        guest has computed since the step before.
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
        """From a step whose price alone is known; what one in ten takes beyond its error is no addition."""
        if not fit.has_observed:
            return
        alone = fit.seconds(tokens)
        usual = fit.error * alone
        longer = seconds - alone - self.after_guest_seconds
        self.after_guest_seconds = max(
            0.0, self.after_guest_seconds + AFTER_GUEST_RATE * min(max(longer, -usual), usual)
        )

    def prefill_seconds(self, tokens: int, decoding: int) -> float:
        """T_prf: until the last of `tokens` prompt tokens is computed, in steps that decode beside it."""
        if not tokens:
            return 0.0
        steps = -(-tokens // max(1, self.step_tokens - decoding))
        return self.prefill.cautious_seconds(tokens + steps * decoding, steps=steps)

    def step_seconds(self, tokens: int, decoding: int) -> float:
        """T_dec: the next step, which decodes and computes as much of `tokens` prompt tokens as one step holds."""
        if not tokens:
            return self.decode.cautious_seconds(decoding)
        return self.prefill.cautious_seconds(min(tokens + decoding, self.step_tokens))


STALLED_STEPS = 50.0
"""Times the longest guest step: a second, as steps are."""


class OccupancyGuard:
    """What guests have earned by serving's own steps and not yet spent."""

    def __init__(self, *, dial: float, longest_seconds: float) -> None:
        self._share = dial / (1.0 - dial) if dial < 1.0 else math.inf
        self._longest_seconds = longest_seconds
        self._earned = 0.0

    def on_serving_step(self, held: int, fixed_seconds: float) -> None:
        """Serving made a step while it held `held` requests; `fixed_seconds` of it were its fixed cost."""
        if self._share < math.inf:
            earned = self._earned + self._share * held * fixed_seconds
            self._earned = min(earned, held * self._longest_seconds)

    def on_guest_run(self, held: int, seconds: float) -> None:
        """A guest computed for `seconds` while serving held `held` requests."""
        if self._share < math.inf:
            self._earned -= held * min(seconds, STALLED_STEPS * self._longest_seconds)

    def available_seconds(self, held: int) -> float:
        """What a guest may take now that serving holds `held` requests, above 0."""
        return self._earned / held if self._share < math.inf else math.inf


ARRIVAL_MEMORY_SECONDS = 3.0
"""After so long an arrival counts for 1/e."""

ARRIVAL_DEVIATIONS = 2.0
"""Standard deviations above the mean."""


class ArrivalRate:
    """Fading rates of what arrived."""

    def __init__(self) -> None:
        self._tokens = self._squares = 0.0
        self._latest = -math.inf

    def on_arrival(self, tokens: int, now: float) -> None:
        """A prompt of `tokens` tokens came to serving."""
        fading = self._fading(now)
        self._tokens = self._tokens * fading + tokens
        self._squares = self._squares * fading + tokens * tokens
        self._latest = max(self._latest, now)

    def expected_tokens(self, seconds: float, now: float) -> int:
        """Prompt tokens that may arrive within `seconds`."""
        share = self._fading(now) * seconds / ARRIVAL_MEMORY_SECONDS
        return round(self._tokens * share + ARRIVAL_DEVIATIONS * math.sqrt(self._squares * share))

    def _fading(self, now: float) -> float:
        return math.exp(min(0.0, self._latest - now) / ARRIVAL_MEMORY_SECONDS)


STRICT = 0.0
"""The dial of the strict policy."""

SLO = 0.09
"""The dial of the slo policy, unless another is given: serving's requests stay a tenth longer than alone at most."""

MIN_USEFUL_SHARE = 0.5
"""Share of what a guest wants, or of a bounded step if that is less, for which its step's fixed cost is paid."""

FULL_SHARE = 0.9
"""Share of the yield bound that is left for what wants all of it, or of the slack where that never comes to as much:
more hardly ever is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What serving is promised while it lends. Raises UsageError."""

    dial: float = STRICT
    """0 strict: guests compute while serving has nothing to do. Above 0 slo: also inside the slack of the two budgets,
    and serving may come to hold `1 / (1 - dial)` times the requests that it would alone."""
    ttft_seconds: float = 1.0
    """B_TTFT: from a request's arrival to its first token."""
    tpot_seconds: float = 0.1
    """B_TPOT: from each token to the next."""
    yield_seconds: float = 0.02
    """The yield bound: the longest guest step, as predicted; a request that arrives waits for one at most, and where
    the guest's model is in the same process for one layer of it."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.dial <= 1.0:
            raise UsageError(f"the dial is a number from 0 (strict) to 1 (the slack alone), not {self.dial}")
        if not (0.0 < self.tpot_seconds <= YEAR_SECONDS and 0.0 < self.ttft_seconds <= YEAR_SECONDS):
            raise UsageError("the TTFT and TPOT budgets are seconds above 0, of a year at most")
        if not 0.0 < self.yield_seconds < self.ttft_seconds:
            raise UsageError(f"the yield bound is above 0 s and below the TTFT budget, not {self.yield_seconds} s")


@dataclass(frozen=True, slots=True)
class ServingState:
    """What serving holds at a moment."""

    prefills: Sequence[tuple[float, int]] = ()
    """Of each request without a first token, in the order of serving's queue: when it arrived (seconds), and the prompt
    tokens left to compute, cached ones left out."""
    last_tokens: Sequence[float] = ()
    """When each decoding request got its latest token, seconds."""
    waiting: int = 0
    """Requests that hold no slot: new ones, and those that serving preempted."""
    queued: bool = False
    """Whether its input queue holds something unread."""

    @property
    def held(self) -> int:
        """Requests in serving's scheduler."""
        return len(self.prefills) + len(self.last_tokens)


class HoldReason(Enum):
    """Why a guest may not compute now."""

    WAITING = "waiting"
    """Serving has something waiting, or unread."""
    OCCUPANCY = "occupancy"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class AdmissionDecision:
    """What a guest may do before serving is looked at again."""

    seconds: float
    """The longest that it may compute, 0.0 for not at all."""
    tokens: int
    """The most tokens of a guest step, 0 for none: there may be time for other work alone."""
    hold_reason: HoldReason | None
    """Why not; None if it may."""
    prefill_headroom: float | None
    """Least S_prf, seconds; None while no request waits for its first token."""
    decode_headroom: float | None
    """Least S_dec, seconds; None while none decodes."""


class Admission:
    """Serving's promise, and what has been learned of both tenants' steps."""

    def __init__(self, promise: Promise, *, serving_step_tokens: int) -> None:
        """`serving_step_tokens`: the most tokens that one step of serving computes."""
        self.promise = promise
        self.serving = ServingCost(step_tokens=serving_step_tokens)
        self.guest = StepCost(**INITIAL_COST)
        self._after_guest = False
        """Whether the guest has computed since serving's latest step."""
        self._untried = 0
        """Steps of serving since the guest's latest."""
        self._observed = 0
        """Steps of the guest."""
        self._arrivals = ArrivalRate()
        self._occupancy = OccupancyGuard(dial=promise.dial, longest_seconds=promise.yield_seconds)

    def on_arrival(self, prompt_tokens: int, now: float) -> None:
        """A request came to serving."""
        self._arrivals.on_arrival(prompt_tokens, now)

    def on_serving_step(self, *, prompt_tokens: int, decoding: int, held: int, seconds: float) -> None:
        """Serving made a step: `prompt_tokens` of prompts and one token for each of `decoding`, of `held` requests."""
        after, self._after_guest = self._after_guest, False
        self._untried = self._untried + 1 if self.guest.observed == self._observed else 0
        self._observed = self.guest.observed
        fixed = self.serving.observe(prompt_tokens=prompt_tokens, decoding=decoding, seconds=seconds, after_guest=after)
        self._occupancy.on_serving_step(held, fixed)

    def on_guest_run(self, *, held: int, seconds: float) -> None:
        """The guest computed for `seconds` while serving held `held` requests."""
        self._after_guest = True
        self._occupancy.on_guest_run(held, seconds + self.serving.after_guest_seconds)

    def admit(self, serving: ServingState, next_work: NextWork, *, now: float) -> AdmissionDecision:
        """May the guest compute now?"""
        bound, held = self.promise.yield_seconds, serving.held
        prefill, decode, newcomer, most = self._slack(serving, now)
        hold: HoldReason | None = None
        if serving.queued or serving.waiting:
            seconds, hold = 0.0, HoldReason.WAITING
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
        """Seconds for which it is worth to begin while serving computes, of which `most` may ever be left."""
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
        """Least S_prf, least S_dec, and the S_prf of prompts that arrive as a guest's step begins; inf where none. And
        the most that the last two can come to while serving holds as much.
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
