"""Prometheus metrics of an evaluator. Every label has a small, fixed set of values."""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rose.schemas.evaluations import EvaluationResult

SECONDS = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000)

COUNTED, MISMATCHED, FAILED = "counted", "mismatched", "failed"
"""Labels of samples: in the scores, of another version than the pinned one, and failed by the infrastructure."""

EVALUATOR = CollectorRegistry()
"""Metrics of an evaluator, exported once it has started."""

_gauge = partial(Gauge, registry=EVALUATOR)

ENDED = Counter("rose_evaluator_evaluations_total", "Evaluations ended.", ["complete"], registry=EVALUATOR)
SAMPLES = Counter("rose_evaluator_samples_total", "Samples of ended evaluations.", ["taken"], registry=EVALUATOR)
DURATION = Histogram(
    "rose_evaluator_evaluation_seconds",
    "Time from the start of an evaluation to its result.",
    buckets=SECONDS,
    registry=EVALUATOR,
)
PROMPTS_LEFT = _gauge("rose_evaluator_prompts_left", "Prompts of the present evaluation that lack samples.")
VERSION = _gauge("rose_evaluator_version", "Version of the latest complete evaluation.")
REWARD = _gauge("rose_evaluator_reward_mean", "Mean reward in the latest complete evaluation.")
SUCCESS = _gauge("rose_evaluator_success_ratio", "Share of solved samples in the latest complete evaluation, avg@k.")
PASS = _gauge("rose_evaluator_pass_ratio", "Estimate of pass@k in the latest complete evaluation, for its largest k.")
BEST_VERSION = _gauge("rose_evaluator_best_version", "Version with the best evaluation; -1 if there is none.")
BEST_SCORE = _gauge("rose_evaluator_best_score", "Score of the best evaluation.")
WITHOUT_IMPROVEMENT = _gauge("rose_evaluator_without_improvement", "Complete evaluations since the best one.")

for _complete in ("true", "false"):
    ENDED.labels(_complete)
for _taken in (COUNTED, MISMATCHED, FAILED):
    SAMPLES.labels(_taken)


def show(result: EvaluationResult) -> None:
    """Set the gauges from a result."""
    BEST_VERSION.set(result.best_version)
    WITHOUT_IMPROVEMENT.set(result.without_improvement)
    if result.best_score is not None:
        BEST_SCORE.set(result.best_score)
    if not result.complete:
        return
    VERSION.set(result.version)
    for gauge, value in ((REWARD, result.reward), (SUCCESS, result.success)):
        if value is not None:
            gauge.set(value)
    if result.pass_at:
        PASS.set(result.pass_at[-1].value)


def count(result: EvaluationResult) -> None:
    """Count a result that this process has written, and set the gauges."""
    ENDED.labels(str(result.complete).lower()).inc()
    for taken, number in ((COUNTED, result.counted), (MISMATCHED, result.mismatched), (FAILED, result.failed)):
        SAMPLES.labels(taken).inc(number)
    DURATION.observe(max(0.0, result.completed_at - result.started_at))
    show(result)
