"""Scores of evaluations: avg@k, pass@k, the best version and the early stop."""

from itertools import combinations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.schemas.evaluations import EvaluationResult, Metric, PassAt
from rose.workers.evaluator.config import EvaluationConfig
from rose.workers.evaluator.scores import Judged, Series, pass_at, scores_of

DIGEST = "0123abcd"


def result(version: int, score: float | None, *, digest: str = DIGEST) -> EvaluationResult:
    return EvaluationResult(
        model_id="policy",
        run=":run",
        evaluation="held-out",
        set_digest=digest,
        version=version,
        epoch=0,
        prompts=1,
        samples=1,
        counted=int(score is not None),
        mismatched=0,
        failed=0,
        complete=score is not None,
        metric=Metric.SUCCESS,
        score=score,
        started_at=1.0,
        completed_at=2.0,
    )


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_equals_the_share_of_subsets_with_a_solved_sample(case: tuple[int, int, int]) -> None:
    samples, solved, k = case
    drawn = list(combinations([True] * solved + [False] * (samples - solved), k))
    assert pass_at(samples, solved, k) == pytest.approx(sum(map(any, drawn)) / len(drawn))


def test_scores_are_means_over_prompts() -> None:
    prompts = [[Judged(float(index < right), index < right) for index in range(4)] for right in (1, 3)]
    scores = scores_of(prompts, (1, 2, 4))
    assert (scores.reward, scores.success) == (0.5, 0.5)
    assert scores.pass_at == (PassAt(1, 0.5), PassAt(2, 0.75), PassAt(4, 1.0))


def test_scores_of_an_environment_without_success_have_the_reward_alone() -> None:
    scores = scores_of([[Judged(1.0, True), Judged(3.0, None)]], (1, 2))
    assert (scores.reward, scores.success, scores.pass_at) == (2.0, None, ())
    assert [scores.value_of(metric) for metric in Metric] == [None, None, 2.0]


@given(st.lists(st.none() | st.integers(0, 5).map(float), max_size=30), st.integers(0, 4))
def test_series_finds_the_first_of_the_best_scores_and_stops_after_a_row_without_improvement(
    scores: list[float | None], stop_after: int
) -> None:
    series, restarted, since = Series(DIGEST, Metric.SUCCESS), list[EvaluationResult](), 0
    best: tuple[int, float | None] = (-1, None)
    for version, score in enumerate(scores):
        judged = series.judged(result(version, score), stop_after=stop_after, min_improvement=0.0)
        if score is not None:
            improved = best[1] is None or score > best[1]
            best, since = ((version, score), 0) if improved else (best, since + 1)
        assert (judged.best_version, judged.best_score) == best
        assert judged.without_improvement == since
        assert judged.stops_run == (score is not None and 0 < stop_after <= since)
        series.add(judged)
        restarted.append(judged)
    again = Series(DIGEST, Metric.SUCCESS)
    for judged in restarted:
        again.add(judged)
    assert again == series


def test_series_does_not_compare_results_of_other_prompts() -> None:
    series = Series(DIGEST, Metric.SUCCESS)
    series.add(msgspec.structs.replace(result(0, 1.0, digest="ffffffff"), best_version=0, best_score=1.0))
    judged = series.judged(result(0, 0.1), stop_after=1, min_improvement=0.0)
    assert (judged.best_version, judged.best_score, judged.stops_run) == (0, 0.1, False)


def test_series_does_not_compare_results_by_another_metric() -> None:
    series = Series(DIGEST, Metric.REWARD)
    series.add(msgspec.structs.replace(result(0, 1.0), best_version=0, best_score=1.0))
    by_reward = msgspec.structs.replace(result(4, 0.1), metric=Metric.REWARD)
    judged = series.judged(by_reward, stop_after=1, min_improvement=0.0)
    assert (judged.best_version, judged.best_score, judged.stops_run) == (4, 0.1, False)
    assert series.versions == {0}, "a version is evaluated once, whatever the metric"


def test_a_smaller_increase_than_min_improvement_is_no_improvement() -> None:
    series = Series(DIGEST, Metric.SUCCESS)
    series.add(series.judged(result(0, 0.5), stop_after=1, min_improvement=0.1))
    judged = series.judged(result(1, 0.55), stop_after=1, min_improvement=0.1)
    assert (judged.best_version, judged.stops_run) == (0, True)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("every_versions", -1),
        ("name", "a:b"),
        ("name", ""),
        ("samples", 0),
        ("pass_at", (5,)),
        ("pass_at", (1, 1)),
        ("metric", "loss"),
        ("hold_seconds", 0),
        ("min_improvement", -0.1),
        ("window_prompts", 0),
        ("tasks", 0),
        ("stop_after", -1),
    ],
)
def test_configuration_out_of_range_is_refused(setting: str, value: object) -> None:
    with pytest.raises(ValueError, match=setting):
        EvaluationConfig(**{setting: value})  # type: ignore[arg-type]


def test_default_ks_are_powers_of_two_up_to_the_samples() -> None:
    assert [EvaluationConfig(samples=samples).ks for samples in (1, 4, 6)] == [(1,), (1, 2, 4), (1, 2, 4)]


def test_no_version_is_due_without_evaluations() -> None:
    assert not EvaluationConfig().is_due(0)
    assert [version for version in range(-3, 7) if EvaluationConfig(every_versions=3).is_due(version)] == [0, 3, 6]
