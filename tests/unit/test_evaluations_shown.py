"""Evaluations where people look: the report, trackers, the status, and what an environment is told."""

import asyncio
import dataclasses

import msgspec
import pytest

from rose.pipeline.monitor.diagnosis import diagnose
from rose.pipeline.monitor.facts import Facts
from rose.pipeline.monitor.run_state import RunState
from rose.pipeline.report.evaluation_chart import evaluation_curves
from rose.pipeline.report.history import fold_history
from rose.pipeline.report.write import evaluations_sentence
from rose.pipeline.tracking.evaluations import evaluation_point
from rose.schemas.evaluations import EvaluationResult, Metric, PassAt
from rose.schemas.progress import Group, GroupState
from rose.schemas.samples import Outcome, SampleOutcome
from rose.workers.environments.calculator import Calculator
from rose.workers.environments.protocol import takes_evaluation
from tests.support.sample_fixtures import sample

GROUP = "evaluation:held-out:0123abcd:4:0:0"
RESULT = EvaluationResult(
    model_id="policy",
    run=":run",
    evaluation="held-out",
    set_digest="0123abcd",
    version=4,
    epoch=0,
    prompts=2,
    samples=2,
    counted=4,
    mismatched=0,
    failed=0,
    complete=True,
    reward=0.25,
    success=0.25,
    pass_at=(PassAt(1, 0.25), PassAt(2, 0.5)),
    metric=Metric.SUCCESS,
    score=0.25,
    best_version=4,
    best_score=0.25,
    started_at=10.0,
    completed_at=30.0,
)
INCOMPLETE = msgspec.structs.replace(
    RESULT, version=8, complete=False, reward=None, success=None, pass_at=(), score=None, completed_at=50.0
)


def test_report_draws_complete_evaluations_and_names_the_best_version() -> None:
    history = fold_history([INCOMPLETE, RESULT, sample(GROUP, 0, size=1), sample("g", 0, size=1)])
    assert [result.version for result in history.evaluations] == [4, 8]
    assert [each.group_id for each in history.trajectories] == ["g"], "no curve of training has evaluations in it"
    figure = evaluation_curves(history.evaluations)
    assert figure is not None
    assert [(line.name, list(line.x), list(line.y)) for line in figure.data] == [
        ("avg@2", [4], [0.25]),
        ("pass@2", [4], [0.5]),
        ("best by success", [4], [0.25]),
    ]
    assert evaluations_sentence(history.evaluations) == (
        "1 of 2 evaluations are complete. held-out: version 4 is the best (avg@2 0.25)."
    )
    assert evaluation_curves([INCOMPLETE]) is None


def test_evaluation_without_success_is_drawn_by_its_reward() -> None:
    result = msgspec.structs.replace(RESULT, success=None, pass_at=(), score=None, metric=Metric.REWARD)
    figure = evaluation_curves([result])
    assert figure is not None
    assert [(line.name, list(line.y)) for line in figure.data] == [("mean reward", [0.25])]


def test_tracker_gets_the_scores_with_the_version_as_the_step_and_nothing_of_an_incomplete_evaluation() -> None:
    point = evaluation_point(RESULT)
    assert point is not None
    assert (point.step, point.at, point.values["held-out/avg@2"], point.values["held-out/pass@2"]) == (4, 30, 0.25, 0.5)
    assert evaluation_point(INCOMPLETE) is None


def test_status_tells_groups_of_evaluations_from_those_that_wait_for_the_trainer() -> None:
    view = RunState(began=0.0)
    for name in (GROUP, "g"):
        view.on_record(Group(group_id=name, group_size=2, state=GroupState.OPEN, offset=0, changed_at=0.0), 0.0)
    assert (view.open_groups, view.waiting_for_trainer, view.evaluating) == (1, 2, 2)
    assert sum(view.open_groups_by_home().values()) == 1
    outcome = SampleOutcome(
        trajectory_id=f"{GROUP}:0",
        group_id=GROUP,
        outcome=Outcome.EVALUATED,
        step=400,
        policy_version=400,
        recorded_at=1.0,
    )
    view.on_record(outcome, 1.0)
    assert (view.evaluating, view.step, view.settled) == (1, 0, 1)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"evaluating": 3}, "an evaluation is under way: 3 trajectories of it have no outcome"),
        (
            {"evaluation_due": True, "waiting_for_trainer": 4},
            "it may hold a version back until `rose evaluator` has evaluated the newest one",
        ),
    ],
)
def test_status_says_that_an_evaluation_runs_or_may_be_missing(changes: dict[str, object], sentence: str) -> None:
    facts = dataclasses.replace(Facts(executors=(), homes=1, open_groups=1), **changes)  # type: ignore[arg-type]
    assert any(sentence in finding.sentence for finding in diagnose(facts))


class Strict(Calculator):
    """An environment that is told of evaluations."""

    told = ""

    async def reset(self, seed: int, arguments: object, *, evaluation: str = "") -> str:
        self.told = evaluation
        return await super().reset(seed, {})


def test_only_an_environment_whose_reset_takes_the_keyword_is_told_of_evaluations() -> None:
    strict = Strict()
    assert (takes_evaluation(strict), takes_evaluation(Calculator())) == (True, False)
    asyncio.run(strict.reset(1, {}, evaluation="held-out"))
    assert strict.told == "held-out"
