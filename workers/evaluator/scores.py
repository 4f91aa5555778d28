"""The scores of an evaluation, and which of several evaluations is the best.

Keeps true
- avg@k and pass@k are means over prompts: a prompt counts as much as any other.
- Where an environment does not say of every sample whether the task is solved, there is no success and no pass@k.
- The best version has the first of the best scores: a later one replaces it only by more than `min_improvement`.
- Scores are compared with scores of the same metric only.
- An evaluation that is not complete, or has no score, changes neither the best version nor the count of evaluations
  without improvement.

Pure: no clock, no I/O.

Example (2 prompts of 4 samples, 1 and 3 of them solved)
    avg@4 = (1/4 + 3/4) / 2 = 0.5    pass@2 = ((1 - 3/6) + (1 - 0/6)) / 2 = 0.75
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import comb
from typing import NamedTuple

import msgspec

from rose.schemas.evaluations import EvaluationResult, Metric, PassAt


class Judged(NamedTuple):
    """The figures of one sample that counts."""

    reward: float
    success: bool | None


@dataclass(frozen=True, slots=True)
class Scores:
    """Means over the prompts of an evaluation."""

    reward: float | None = None
    success: float | None = None
    pass_at: tuple[PassAt, ...] = ()

    def value_of(self, metric: Metric) -> float | None:
        """Return the figure by which evaluations are compared; None if there is none."""
        if metric is Metric.REWARD:
            return self.reward
        if metric is Metric.SUCCESS:
            return self.success
        return self.pass_at[-1].value if self.pass_at else None


def pass_at(samples: int, solved: int, k: int) -> float:
    """Return the estimate of pass@k from `samples` samples, of which `solved` solved the task.

    The probability that k of the samples, drawn without replacement, are not all wrong: 1 - C(n - c, k) / C(n, k). The
    estimate is unbiased (Chen et al. 2021, arXiv 2107.03374). `k` is from 1 to `samples`.
    """
    return 1.0 - comb(samples - solved, k) / comb(samples, k)


def scores_of(prompts: Sequence[Sequence[Judged]], ks: Iterable[int]) -> Scores:
    """Return the scores of an evaluation. `prompts`: the samples of each prompt, at least one; `ks`: for pass@k."""
    reward = _mean([_mean([sample.reward for sample in samples]) for samples in prompts])
    if any(sample.success is None for samples in prompts for sample in samples):
        return Scores(reward)
    solved = [(len(samples), sum(bool(sample.success) for sample in samples)) for samples in prompts]
    success = _mean([right / count for count, right in solved])
    estimates = tuple(PassAt(k, _mean([pass_at(count, right, k) for count, right in solved])) for k in ks)
    return Scores(reward, success, estimates)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@dataclass(slots=True)
class Series:
    """The results of one set so far, and the best of them."""

    set_digest: str
    """Only results with this digest are of the series."""
    metric: Metric
    """Results by another metric, which the run had before, say nothing of the best version."""
    versions: set[int] = field(default_factory=set)
    """Versions with a result, complete or not."""
    best_version: int = -1
    best_score: float | None = None
    without_improvement: int = 0

    def add(self, result: EvaluationResult) -> None:
        """Add a result from the log; results come in the order in which they were written."""
        if result.set_digest != self.set_digest:
            return
        self.versions.add(result.version)
        if result.metric is self.metric:
            self.best_version, self.best_score = result.best_version, result.best_score
            self.without_improvement = result.without_improvement

    def judged(self, result: EvaluationResult, *, stop_after: int, min_improvement: float) -> EvaluationResult:
        """Return a new result with the best version so far, and whether the run stops; it is not added."""
        best, score, without = self.best_version, self.best_score, self.without_improvement
        if result.score is not None:
            improved = score is None or result.score > score + min_improvement
            best, score, without = (result.version, result.score, 0) if improved else (best, score, without + 1)
        return msgspec.structs.replace(
            result,
            best_version=best,
            best_score=score,
            without_improvement=without,
            stops_run=0 < stop_after <= without and result.score is not None,
        )
