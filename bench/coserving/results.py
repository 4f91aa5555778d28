"""Results of a run: each arm's figures over its windows, relative to serving alone.

Keeps true
- Figures include only windows that count; an arm without counting windows has no figures.
- A ratio is the ratio of medians, with `alone` as the divisor. Its resolution is the distance of `again` from `alone`.

Pure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.check import Check
from bench.coserving.arms import AGAIN, ALONE, Arm, Promise
from bench.coserving.figures import Ratio, Summary, harvest, latency, outside_seconds, ratio, summary
from bench.coserving.windows import Budgets, Window, figures
from bench.percentiles import percentile
from rose.workers.loadgen.requests import StreamedCompletion

COMPARED = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms", "gap_p99_ms", "prefix_hit_rate")
"""Figures whose ratio to `alone` is reported."""

HARVEST = "harvest"

ENOUGH_REQUESTS = 2000
"""Least number of requests of each arm in all its windows: fewer requests do not determine a p99."""

BATCH_GATEWAY = {
    "llm-d: alone": {"ttft_p99_ms": 44, "gap_p99_ms": 12},
    "llm-d: no gateway": {"ttft_p99_ms": 492, "gap_p99_ms": 63},
    "llm-d: priorities": {"ttft_p99_ms": 337, "gap_p99_ms": 39},
    "llm-d: cap": {"ttft_p99_ms": 95, "gap_p99_ms": 29},
}
"""Published figures of llm-d's batch gateway (llm-d-batch-gateway#491): gpt-oss-120b, alternating 90 s at 15 requests a
second and 90 s at 1. Machine and model differ, so only ratios can be compared."""

WORST_REQUESTS = 5
"""Number of printed requests of each arm's worst window."""


@dataclass(frozen=True, slots=True)
class Standing:
    """One arm's figures."""

    arm: str
    windows: int
    """Number of windows that count."""
    thrown: int
    """Number of discarded windows."""
    requests: int
    """Requests in all counting windows together."""
    summaries: Mapping[str, Summary]
    ratios: Mapping[str, Ratio]
    pooled_ttft_p99_ms: float
    """Percentile over all requests of all windows together."""
    harvest: float
    """NaN without guests, or if the guests were not measured alone."""

    def value(self, figure: str) -> float:
        """Return a figure's median, or `harvest`. NaN if the figure was not measured.

        The suffix `_ratio` returns the figure's ratio to `alone`, and `_worst` the highest value of a window.
        """
        if figure == HARVEST:
            return self.harvest
        if figure.endswith("_worst"):
            return self.summaries[figure.removesuffix("_worst")].high
        compared = figure.removesuffix("_ratio")
        if compared == figure:
            return self.summaries[figure].median
        return self.ratios[compared].value if compared in self.ratios else math.nan


def standings(arms: Sequence[Arm], windows: Sequence[Window], budgets: Budgets) -> dict[str, Standing]:
    """Return the standings by arm; arms without a counting window are left out."""
    counted = {arm.name: [each for each in windows if each.arm == arm.name and not each.thrown] for arm in arms}
    medians = {name: _summaries(found, budgets) for name, found in counted.items() if found}
    return {
        arm.name: Standing(
            arm=arm.name,
            windows=len(counted[arm.name]),
            thrown=sum(bool(each.thrown) for each in windows if each.arm == arm.name),
            requests=sum(len(window.answers) for window in counted[arm.name]),
            summaries=medians[arm.name],
            ratios=_ratios(arm, medians),
            pooled_ttft_p99_ms=_pooled(counted[arm.name]),
            harvest=_harvest(arm, medians),
        )
        for arm in arms
        if arm.name in medians
    }


def published_ratios() -> dict[str, dict[str, float]]:
    """Return llm-d's published figures relative to its figures of serving alone, by arm."""
    alone, *others = BATCH_GATEWAY
    return {
        name: {figure: BATCH_GATEWAY[name][figure] / value for figure, value in BATCH_GATEWAY[alone].items()}
        for name in others
    }


def _summaries(windows: Sequence[Window], budgets: Budgets) -> dict[str, Summary]:
    found = [figures(window, budgets) for window in windows]
    return {name: summary([each[name] for each in found]) for name in found[0]}


def _ratios(arm: Arm, medians: Mapping[str, Mapping[str, Summary]]) -> dict[str, Ratio]:
    if not arm.users or arm.name == ALONE or ALONE not in medians:
        return {}
    alone, own = medians[ALONE], medians[arm.name]
    again = medians.get(AGAIN)
    return {
        name: ratio(own[name].median, alone[name].median, again[name].median if again else math.nan)
        for name in COMPARED
    }


def _pooled(windows: Sequence[Window]) -> float:
    answers = [answer for window in windows for answer in window.answers if not answer.error]
    return 1000 * percentile([latency(each.due, each.moments, each.counts).ttft for each in answers], 99)


def _harvest(arm: Arm, medians: Mapping[str, Mapping[str, Summary]]) -> float:
    if arm.guests_alone not in medians or ALONE not in medians:
        return math.nan
    rate = "guest_tokens_per_second"
    return harvest(
        medians[arm.name][rate].median, medians[arm.guests_alone][rate].median, medians[ALONE]["busy"].median
    )


def checks(arms: Sequence[Arm], found: Mapping[str, Standing]) -> list[Check]:
    """Return checks of the number of requests and of the bounds of all measured arms.

    A figure that is missing from an arm of the run misses its bound: its value is NaN.
    """
    names = {arm.name for arm in arms}
    kept = [
        _check(promise, found[arm.name], found)
        for arm in arms
        if arm.name in found
        for promise in arm.promises
        if _needs(promise, arm) <= names and not _nothing_to_lose(promise, found)
    ]
    return [_enough(arms, found), *kept]


def _needs(promise: Promise, arm: Arm) -> set[str]:
    """Return the other arms that this bound needs."""
    needs = {promise.over, promise.below, promise.above}
    if promise.figure.endswith("_ratio"):
        needs |= {ALONE}
    if promise.figure == HARVEST:
        needs |= {ALONE, arm.guests_alone}
    return needs - {""}


def _nothing_to_lose(promise: Promise, found: Mapping[str, Standing]) -> bool:
    """Return whether the bound is about prefix cache hits and serving alone had none."""
    return promise.figure == "prefix_hit_rate_ratio" and ALONE in found and not found[ALONE].value("prefix_hit_rate")


def _enough(arms: Sequence[Arm], found: Mapping[str, Standing]) -> Check:
    requests = {arm.name: found[arm.name].requests if arm.name in found else 0 for arm in arms if arm.users}
    fewest = min(requests, key=requests.__getitem__, default=None)
    return Check(
        name="requests",
        value=requests[fewest] if fewest is not None else 0,
        unit="requests",
        bound=ENOUGH_REQUESTS,
        direction="min",
        against="of the arm with the fewest, in windows that count",
        details={"arm": fewest},
    )


def _check(promise: Promise, standing: Standing, found: Mapping[str, Standing]) -> Check:
    details: dict[str, float | str] = {"arm": standing.arm, "windows": standing.windows}
    known = standing.ratios.get(promise.figure.removesuffix("_ratio"))
    if known is not None and promise.figure.endswith("_ratio"):
        details |= {"resolution": round(known.resolution, 4), "margin": "resolved" if known.resolved else "unresolved"}
    value = standing.value(promise.figure)
    if promise.over:
        value = ratio(value, _value(found, promise.over, promise.over_figure or promise.figure), math.nan).value
    if promise.above:
        value -= _value(found, promise.above, promise.figure)
    if promise.below:
        value = _value(found, promise.below, promise.figure) - value
    value = round(value, 4)
    return Check(promise.check, value, "", promise.bound, promise.direction, promise.against, details)


def _value(found: Mapping[str, Standing], arm: str, figure: str) -> float:
    return found[arm].value(figure) if arm in found else math.nan


def worst(windows: Sequence[Window]) -> list[dict[str, float | str]]:
    """Return the slowest first tokens of the window in which an arm's p99 was the highest."""
    rows: list[dict[str, float | str]] = []
    for arm in dict.fromkeys(window.arm for window in windows if window.answers):
        own = [window for window in windows if window.arm == arm and not window.thrown]
        if own:
            slowest = max(own, key=lambda window: _pooled([window]))
            rows += _slowest_requests(slowest)
    return rows


def _slowest_requests(window: Window) -> list[dict[str, float | str]]:
    answered = [answer for answer in window.answers if not answer.error]
    chosen = sorted(answered, key=lambda each: each.due - each.moments[0])[:WORST_REQUESTS]
    return [_wait(window, each, answered) for each in sorted(chosen, key=lambda each: each.due)]


def _wait(window: Window, answer: StreamedCompletion, answered: Sequence[StreamedCompletion]) -> dict[str, float | str]:
    """Return the parts of one first token's latency, in milliseconds."""
    first = answer.moments[0]
    rolled = zip(window.rolled.moments, window.rolled.counts, strict=True)
    return {
        "arm": window.arm,
        "round": window.round,
        "second": answer.due - window.start,
        "ttft": 1000 * (first - answer.due),
        "client": 1000 * (answer.sent - answer.due),
        "outside": 1000 * outside_seconds(answer),
        "queue": 1000 * answer.queue_seconds,
        "prefill": 1000 * answer.prefill_seconds,
        "prompt": answer.prompt_tokens,
        "cached": answer.cached_tokens,
        "before_it": sum(each.due < answer.due and each.moments[-1] > answer.due for each in answered),
        "guest_tokens": sum(count for moment, count in rolled if answer.due <= moment < first),
    }
