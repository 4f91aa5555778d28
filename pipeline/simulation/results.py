"""Figures of finished simulations, the ratios between arms, and the checks.

Keeps true
- Every figure follows from what the simulation did; a result holds no wall-clock time, so one seed gives one result.
- The figures of steps and turns leave out the warm-up: the steps whose groups were opened at the start. If groups of
  several steps are open at once, their steps are of uneven length and repeat, so the figures cover whole rounds of as
  many steps. The figures of users, of devices and of answers cover the whole simulation.
- Latencies of users are over all requests (TTFT) and over all tokens (TPOT) of all servers, not means of means.
- Serving alone is the same serving fleet with the same users for the same time, without rollouts.

Pure.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, Literal

import msgspec

from rose.pipeline.simulation.costs import simulated_cost
from rose.pipeline.simulation.fleet import Fleet
from rose.pipeline.simulation.latency_histogram import LatencyHistogram
from rose.pipeline.simulation.rollout import TurnFigures
from rose.pipeline.simulation.scenario import Scenario
from rose.pipeline.simulation.trainer import StepFigures
from rose.schemas.turns import add_device_seconds

ROSE = "rose"
"""The arm that is compared with each other arm."""

OWN = "dedicated"
"""Kind of the workers whose GPUs belong to the rollouts."""

LEAST_OVER_FIXED, LEAST_OVER_ELASTIC, MOST_OF_ALONE = 1.3, 1.2, 1.10
"""Bounds of the checks `fixed`, `elastic` and `promise`, as ratios."""


class UserFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the users of a serving fleet."""

    requests: int
    kept: float
    """Share of the requests within both targets of the promise."""
    ttft_p50: float
    """Seconds to the first token."""
    ttft_p99: float
    tpot_p50: float
    """Seconds between two tokens, over all tokens."""
    tpot_p99: float


class ArmFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one arm."""

    simulated_seconds: float
    measured_steps: int
    """Training steps that the figures of steps and turns cover: all without the warm-up."""
    step_seconds: float
    """Mean time of a training step, from its first group to the new version."""
    rollout_seconds: float
    """Mean time until the batch of a step was complete."""
    trajectories_per_hour: float
    """Trained trajectories: the end-to-end throughput."""
    tokens_per_second: float
    """Tokens of trained trajectories, observations included."""
    turns: int
    """Applied turns."""
    turns_by_kind: dict[str, int]
    """Applied turns by the kind of worker that ended them: dedicated, lender, moved (by an allocator) or trainer."""
    wait_p50: float
    """Seconds from the request of a turn until an engine began to compute it."""
    wait_p99: float
    cached_share: float
    """Share of the context tokens that were in the prefix cache."""
    reused_share: float
    """Share of the tokens that the turn before had computed under the same version and that were in the cache."""
    attempts_repeated: int
    """Attempts at applied turns that were returned or lost."""
    lent_gpu_hours: float
    """GPU time in which turns were computed on GPUs that do not belong to the rollouts."""
    cuts: int
    """Times that serving took KV memory back."""
    preempted: int
    """Times that an engine preempted a request because its KV memory was full."""
    outcomes: dict[str, int]
    """Settled trajectories by outcome."""
    correct: int
    """Trained trajectories that solved their task, in all steps."""
    device_seconds: dict[str, float]
    """Engine time of all settled trajectories by worker class."""
    gpu_hours_per_answer: float | None
    """Device time of the whole run for each correct answer; None without a correct answer."""
    cost_per_answer: float | None
    """Cost of each correct answer; None without prices, or without a correct answer."""
    currency: str
    users: UserFigures | None
    alone: UserFigures | None = None
    """Figures of the users if the fleet only serves; None without users."""
    ttft_of_alone: float | None = None
    """p99 of TTFT relative to serving alone."""
    tpot_of_alone: float | None = None
    """p99 of TPOT relative to serving alone."""
    events: int
    """Handled events of the simulation."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The arm `rose` over another arm."""

    throughput: float
    """How many times the end-to-end throughput of the other arm."""
    rollout: float
    """How many times longer the rollouts of the other arm take."""
    paper: float | None
    """Ratio that the paper reports for `paper_figure`; None if the paper has none."""
    paper_figure: Literal["throughput", "rollout"]


class ScenarioResult(msgspec.Struct, frozen=True, kw_only=True):
    """All arms of one scenario."""

    name: str
    about: str
    seed: int
    arms: dict[str, ArmFigures]
    over: dict[str, Comparison]
    """Comparisons, by the name of the other arm."""
    paper: dict[str, float]
    """Copy of the scenario's `paper`."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """A figure with its bound."""

    name: str
    value: float
    unit: str
    bound: float
    direction: Literal["min", "max"]
    """`min`: the value must be at least the bound; `max`: at most."""
    against: str
    details: dict[str, float]
    """The figure in each setting; `value` is the worst."""

    @property
    def met(self) -> bool:
        """Whether the value is within the bound."""
        return self.value >= self.bound if self.direction == "min" else self.value <= self.bound


def arm_figures(fleet: Fleet) -> ArmFigures:
    """Return the figures of a simulation that has ended, without those of serving alone."""
    steps = measured(fleet.trainer.figures.steps, fleet.scenario.open_steps)
    turns = [turn for turn in fleet.rollout.turns if turn.requested_at >= steps[0].began_at]
    waits, kinds = LatencyHistogram(), Counter(worker_kind(turn.worker) for turn in turns)
    for turn in turns:
        waits.add(turn.scheduled_at - turn.requested_at)
    seconds = steps[-1].ended_at - steps[0].began_at
    engines = [each.engine for each in fleet.executors.values()] + [each.engine for each in fleet.serving]
    settled = fleet.trainer.figures.settled
    cost = simulated_cost(fleet)
    device_seconds = cost.device_seconds_per_correct
    return ArmFigures(
        simulated_seconds=fleet.events.now,
        measured_steps=len(steps),
        step_seconds=seconds / len(steps),
        rollout_seconds=sum(step.collected_at - step.began_at for step in steps) / len(steps),
        trajectories_per_hour=3600 * sum(step.trained for step in steps) / seconds,
        tokens_per_second=sum(step.tokens for step in steps) / seconds,
        turns=len(turns),
        turns_by_kind=dict(sorted(kinds.items())),
        wait_p50=waits.percentile(0.5),
        wait_p99=waits.percentile(0.99),
        cached_share=_share(sum(turn.cached_tokens for turn in turns), sum(turn.context_tokens for turn in turns)),
        reused_share=reused_share(turns),
        attempts_repeated=sum(turn.attempts - 1 for turn in turns),
        lent_gpu_hours=lent_gpu_seconds(fleet) / 3600,
        cuts=sum(lender.cuts for lender in fleet.lenders),
        preempted=sum(engine.preempted for engine in engines),
        outcomes=dict(_outcomes(fleet)),
        correct=sum(step.correct for step in fleet.trainer.figures.steps),
        device_seconds=reduce(add_device_seconds, (sample.device_seconds for sample, _, _ in settled), {}),
        gpu_hours_per_answer=None if device_seconds is None else device_seconds / 3600,
        cost_per_answer=cost.cost_per_correct,
        currency=cost.currency,
        users=user_figures(fleet),
        events=fleet.events.handled,
    )


def with_alone(figures: ArmFigures, alone: UserFigures | None) -> ArmFigures:
    """Return the figures with what the users see if the fleet only serves."""
    users = figures.users
    if users is None or alone is None:
        return figures
    return msgspec.structs.replace(
        figures,
        alone=alone,
        ttft_of_alone=_ratio(users.ttft_p99, alone.ttft_p99),
        tpot_of_alone=_ratio(users.tpot_p99, alone.tpot_p99),
    )


def measured(steps: Sequence[StepFigures], open_steps: int) -> Sequence[StepFigures]:
    """Return the steps without the warm-up: the last steps, in whole rounds of `open_steps`.

    The groups of `open_steps` steps are opened at the start, and end nearly together. So of each round of as many
    steps, the first waits long and the others do not: part of a round is no sample of a run. With too few steps for a
    round these are all steps but the first, or the only step.
    """
    rounds = len(steps) // open_steps - 1
    if rounds < 1:
        return steps[1:] if len(steps) > 1 else steps
    return steps[-rounds * open_steps :]


def worker_kind(worker: str) -> str:
    """Return the kind of a simulated worker: dedicated, lender, moved or trainer."""
    return worker.partition("-")[0]


def reused_share(turns: Sequence[TurnFigures]) -> float:
    """Return the share of the reusable tokens that were not computed again."""
    reusable = list(reusable_tokens(turns))
    hits = sum(min(turn.cached_tokens, tokens) for turn, tokens in zip(turns, reusable, strict=True))
    return _share(hits, sum(reusable))


def reusable_tokens(turns: Iterable[TurnFigures]) -> Iterator[int]:
    """Yield for each turn the tokens that the turn before of its trajectory had computed under the same version."""
    before: dict[str, TurnFigures] = {}
    for turn in turns:
        last = before.get(turn.trajectory)
        before[turn.trajectory] = turn
        yield last.context_tokens + last.new_tokens if last is not None and last.version == turn.version else 0


def lent_gpu_seconds(fleet: Fleet) -> float:
    """Return the GPU seconds of turns on GPUs that do not belong to the rollouts."""
    lent = [each for each in fleet.executors.values() if worker_kind(each.name) != OWN]
    return sum(each.engine.busy_seconds * each.cost.tensor_parallel for each in lent)


class UserTotals:
    """Latencies that the users of one or several fleets have seen."""

    def __init__(self) -> None:
        self._ttft, self._gaps = LatencyHistogram(), LatencyHistogram()
        self._requests = self._kept = 0

    def add(self, fleet: Fleet) -> None:
        """Add what the users of a fleet have seen so far."""
        for serving in fleet.serving:
            self._ttft.merge(serving.figures.ttft)
            self._gaps.merge(serving.engine.token_gaps)
            self._requests += serving.figures.requests
            self._kept += serving.figures.kept

    def figures(self) -> UserFigures | None:
        """Return the figures; None if no request has ended."""
        if not self._requests:
            return None
        return UserFigures(
            requests=self._requests,
            kept=self._kept / self._requests,
            ttft_p50=self._ttft.percentile(0.5),
            ttft_p99=self._ttft.percentile(0.99),
            tpot_p50=self._gaps.percentile(0.5),
            tpot_p99=self._gaps.percentile(0.99),
        )


def user_figures(fleet: Fleet) -> UserFigures | None:
    """Return what the users of a fleet have seen so far; None if no request has ended."""
    totals = UserTotals()
    totals.add(fleet)
    return totals.figures()


def compare(name: str, scenarios: Mapping[str, Scenario], arms: Mapping[str, ArmFigures]) -> ScenarioResult:
    """Return the result of a scenario, given the figures of the arms that ran."""
    first = next(iter(scenarios.values()))
    ours = arms.get(ROSE)
    return ScenarioResult(
        name=name,
        about=first.about,
        seed=first.seed,
        arms=dict(arms),
        over={
            arm: _comparison(ours, theirs, scenarios[arm], arm)
            for arm, theirs in arms.items()
            if ours is not None and arm != ROSE
        },
        paper=first.paper,
    )


def checks(results: Iterable[ScenarioResult], scenarios: Mapping[str, Mapping[str, Scenario]]) -> list[Check]:
    """Return the checks that the results allow; `scenarios` holds the arms by the name of the scenario.

    - `fixed` and `elastic`, where a paper reports a ratio over the arm: the end-to-end throughput over arms without
      moved engines, and the rollout time over arms to which an allocator gives whole engines.
    - `promise`, wherever `rose` is strict: TTFT of the users.
    - `recovery`, for arms with failures: how much later than `rose` the run ends than its failures allow.
    """
    fixed: dict[str, float] = {}
    elastic: dict[str, float] = {}
    promise: dict[str, float] = {}
    recovery: dict[str, float] = {}
    for result in results:
        arms, ours = scenarios[result.name], result.arms.get(ROSE)
        for arm, over in result.over.items():
            if over.paper is not None:
                figures = elastic if over.paper_figure == "rollout" else fixed
                figures[f"{result.name}/{arm}"] = over.rollout if over.paper_figure == "rollout" else over.throughput
            if ours is not None and arms[arm].failures and not arms[ROSE].failures:
                late = result.arms[arm].simulated_seconds - ours.simulated_seconds
                recovery[f"{result.name}/{arm}"] = late - _allowed_seconds(arms[arm])
        if ours is not None and ours.ttft_of_alone is not None and _is_strict(arms[ROSE]):
            promise[result.name] = ours.ttft_of_alone
    found = [
        _worst("fixed", fixed, "ratio", LEAST_OVER_FIXED, "min", "end-to-end throughput of resource-fixed arms"),
        _worst("elastic", elastic, "ratio", LEAST_OVER_ELASTIC, "min", "rollout time of resource-elastic arms"),
        _worst("promise", promise, "ratio", MOST_OF_ALONE, "max", "p99 TTFT of serving alone"),
        _worst("recovery", recovery, "s", 0.0, "max", "the time that the failures of an arm may cost"),
    ]
    return [check for check in found if check is not None]


def encode_results(results: Sequence[ScenarioResult], found: Sequence[Check]) -> bytes:
    """Return the results as JSON: `checks`, and `scenarios` by name."""
    shown: dict[str, Any] = {"checks": found, "scenarios": {result.name: result for result in results}}
    return msgspec.json.format(msgspec.json.encode(shown), indent=2) + b"\n"


def encode_turns(scenario: str, arm: str, turns: Iterable[TurnFigures]) -> Iterable[bytes]:
    """Return a JSON line for each applied turn, in the order in which they were applied."""
    for turn in turns:
        fields = {name: getattr(turn, name) for name in TurnFigures.__slots__}
        yield msgspec.json.encode({"scenario": scenario, "arm": arm, **fields}) + b"\n"


def _comparison(ours: ArmFigures, theirs: ArmFigures, scenario: Scenario, arm: str) -> Comparison:
    return Comparison(
        throughput=_ratio(ours.trajectories_per_hour, theirs.trajectories_per_hour),
        rollout=_ratio(theirs.rollout_seconds, ours.rollout_seconds),
        paper=scenario.paper.get(arm),
        paper_figure="rollout" if scenario.elastic.how == "whole" else "throughput",
    )


def _is_strict(scenario: Scenario) -> bool:
    return scenario.elastic.how == "lend" and scenario.lending is not None and not scenario.lending.dial


def _allowed_seconds(scenario: Scenario) -> float:
    return sum(failure.for_seconds + failure.recovers_within_seconds for failure in scenario.failures)


def _worst(
    name: str, figures: dict[str, float], unit: str, bound: float, direction: Literal["min", "max"], against: str
) -> Check | None:
    if not figures:
        return None
    value = min(figures.values()) if direction == "min" else max(figures.values())
    return Check(name=name, value=value, unit=unit, bound=bound, direction=direction, against=against, details=figures)


def _outcomes(fleet: Fleet) -> list[tuple[str, int]]:
    return sorted((outcome.value, many) for outcome, many in fleet.trainer.figures.outcomes.items())


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _ratio(ours: float, theirs: float) -> float:
    """Return the ratio; 0 if there is none."""
    return ours / theirs if theirs else 0.0
