"""The evaluator on a real broker: each sample of an evaluation settles once, whenever the evaluator is killed."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from threading import Event

import pytest

from rose.schemas.evaluations import EvaluationResult, PassAt
from rose.schemas.prompts import Prompt, trajectory_id
from rose.schemas.samples import Outcome, Sample, SampleOutcome
from rose.schemas.weights import WeightManifest
from rose.topics.admin import connect, create_topics
from rose.topics.catalog import (
    EVALUATION_RESULTS,
    EVALUATIONS,
    EVALUATOR_PREFIX,
    MANIFESTS,
    OUTCOMES,
    SAMPLES,
    Partitions,
)
from rose.topics.errors import BusError
from rose.topics.log_reader import read_whole_topics
from rose.topics.records import Envelope
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from rose.workers.evaluator.config import EvaluationConfig
from rose.workers.evaluator.evaluation import EvaluationSet
from rose.workers.evaluator.loop import Session
from rose.workers.weights.trust import Trust, run_id
from tests.support.brokers import EMBEDDED, AnyBroker, any_broker, kafka_first
from tests.support.sample_fixtures import sample
from tests.support.waiting import WAIT_SECONDS

TASKS = EvaluationSet(
    "held-out",
    tuple(Prompt(group_id=f"task-{number}", group_size=1, environment="calculator") for number in range(3)),
    2,
)
CONFIG = EvaluationConfig(every_versions=5, samples=2, window_prompts=2)


class World:
    """A trainer that publishes, and workers that play each prompt of the log once."""

    def __init__(self, settings: BusSettings) -> None:
        create_topics(settings, Partitions(home=2, slots=1, samples=2, chunks=1))
        self.settings = settings
        self.run = run_id(settings.namespace, "run")
        self.played: set[str] = set()
        self.writer = Writer(settings, "world")
        self.evaluators: list[Session] = []

    def publish(self, version: int, *, epoch: int = 0) -> None:
        manifest = WeightManifest(
            model_id="policy",
            run=self.run,
            epoch=epoch,
            version=version,
            step=version,
            tensors=(),
            slices=(),
            digest=bytes(16),
            published_at=1.0,
        )
        self.writer.write(MANIFESTS, manifest, key=f"policy/run/{version}", partition=0)
        self.writer.flush()

    def play(self, *, solved: bool = True, version: int | None = None, failure: str = "") -> int:
        """Write the samples of all prompts that are new. `version`: other than the pinned one."""
        prompts: dict[str, Prompt] = {}
        for envelope in read_whole_topics(self.settings, [EVALUATIONS]):
            if isinstance(envelope.record, Prompt):
                prompts[envelope.key] = envelope.record
            else:
                prompts.pop(envelope.key, None)
        new = [prompt for name, prompt in prompts.items() if name not in self.played]
        for prompt in new:
            assert prompt.pinned_version is not None
            for index in range(prompt.group_size):
                found = sample(
                    prompt.group_id,
                    index,
                    size=prompt.group_size,
                    reward=None if failure else float(solved),
                    version=prompt.pinned_version if version is None else version,
                    failure=failure,
                )
                self.writer.write(SAMPLES, found, key=prompt.group_id)
            self.played.add(prompt.group_id)
        self.writer.flush()
        return len(new)

    def evaluator(self, config: EvaluationConfig = CONFIG, tasks: EvaluationSet = TASKS) -> Session:
        session = Session(self.settings, config, Trust("policy", self.run), tasks, Event())
        self.evaluators.append(session)
        session.recover()
        return session

    def results(self) -> list[EvaluationResult]:
        records = [envelope.record for envelope in read_whole_topics(self.settings, [EVALUATION_RESULTS])]
        return [record for record in records if isinstance(record, EvaluationResult)]

    def outcomes(self) -> list[SampleOutcome]:
        records = [envelope.record for envelope in read_whole_topics(self.settings, [OUTCOMES])]
        return [record for record in records if isinstance(record, SampleOutcome)]

    def evaluate(self, session: Session, **how: object) -> EvaluationResult:
        """Advance until the next result, and play what is asked for."""
        before = len(self.results())
        for _ in range(200):
            session.advance()
            self.play(**how)  # type: ignore[arg-type]
            if len(found := self.results()) > before:
                return found[-1]
        raise AssertionError("no result")


@pytest.fixture
def world(broker: AnyBroker, namespace: str) -> Iterator[World]:
    made = World(broker.settings(namespace))
    yield made
    for session in made.evaluators:
        with suppress(BusError):
            session.close()


@kafka_first
def test_each_sample_settles_once_and_each_due_version_has_one_result_under_kills(world: World) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    session = world.evaluator()
    for version in (0, 5):
        world.publish(version)
        while not any(result.version == version for result in world.results()):
            session.advance()
            if draw.random() < 0.4:
                session = world.evaluator()  # the one before is not closed: it is fenced, as after a kill
            if draw.random() < 0.5:
                world.play()
    results = world.results()
    assert [(result.version, result.complete, result.counted) for result in results] == [(0, True, 6), (5, True, 6)]
    settled = Counter(outcome.trajectory_id for outcome in world.outcomes())
    assert set(settled.values()) == {1}
    assert len(settled) == 12
    assert {(outcome.outcome, outcome.reason) for outcome in world.outcomes()} == {(Outcome.EVALUATED, "")}
    assert all(envelope.record is None for envelope in newest(world)), "the prompts are withdrawn"


def newest(world: World) -> list[Envelope]:
    found = {envelope.key: envelope for envelope in read_whole_topics(world.settings, [EVALUATIONS])}
    return list(found.values())


@any_broker
def test_older_evaluator_is_fenced_before_it_settles(world: World) -> None:
    old = world.evaluator()
    world.publish(0)
    for _ in range(50):
        old.advance()
        if world.play():
            break
    world.evaluator()
    with pytest.raises(BusError) as fenced:
        for _ in range(50):
            old.advance()
            world.play()
    assert fenced.value.is_fenced
    assert world.outcomes() == []


@any_broker
def test_samples_of_other_versions_and_failures_are_asked_for_again_and_do_not_count(world: World) -> None:
    session = world.evaluator()
    world.publish(0)
    for how in ({"version": 3}, {"failure": "the sandbox is gone"}):
        while not world.play(**how):
            session.advance()
    result = world.evaluate(session)
    assert (result.complete, result.counted) == (True, 6)
    assert result.mismatched + result.failed == len(world.outcomes()) - 6 > 0
    reasons = {outcome.reason for outcome in world.outcomes()}
    assert reasons == {"", "it does not count: it is of version 3, and pinned to version 0", "the sandbox is gone"}


@any_broker
def test_newer_version_ends_an_evaluation_without_scores_and_late_samples_settle(world: World) -> None:
    session = world.evaluator()
    world.publish(0)
    for _ in range(20):
        session.advance()
    world.publish(1)
    world.play()
    while not world.results():
        session.advance()
    [result] = world.results()
    assert (result.complete, result.success, result.best_version, result.stops_run) == (False, None, -1, False)
    assert result.reason == "version 1 was published before it ended"
    for _ in range(20):
        session.advance()
    settled = world.outcomes()
    assert len(settled) == 4
    assert all(outcome.outcome is Outcome.EVALUATED and outcome.reason for outcome in settled)


@any_broker
def test_scores_name_the_best_version_and_stop_the_run_after_a_row_without_improvement(world: World) -> None:
    session = world.evaluator(EvaluationConfig(every_versions=1, samples=2, stop_after=2))
    judged = []
    for version, solved in enumerate((False, True, True, False)):
        world.publish(version)
        result = world.evaluate(session, solved=solved)
        judged.append((result.version, result.score, result.best_version, result.stops_run))
    assert judged == [(0, 0.0, 0, False), (1, 1.0, 1, False), (2, 1.0, 1, False), (3, 0.0, 1, True)]
    assert world.results()[1].pass_at == (PassAt(1, 1.0), PassAt(2, 1.0))


@any_broker
def test_prompts_that_fail_in_every_round_leave_an_evaluation_incomplete_with_the_reason(world: World) -> None:
    session = world.evaluator()
    world.publish(0)
    result = world.evaluate(session, failure="unknown arguments")
    assert not result.complete
    assert result.reason == "3 prompts lack samples after 3 rounds; a sample of one of them: unknown arguments"
    assert {outcome.outcome for outcome in world.outcomes()} == {Outcome.INFRA_FAILED}


@kafka_first
def test_position_that_the_broker_forgot_settles_nothing_twice(world: World, broker_kind: str) -> None:
    if broker_kind == EMBEDDED:
        pytest.skip("forgets no group")
    session = world.evaluator()
    world.publish(0)
    world.evaluate(session)
    before = world.outcomes()
    session.close()
    world.evaluators.clear()
    group = world.settings.name(f"{EVALUATOR_PREFIX}policy-held-out")
    admin = connect(world.settings)
    for deleted in admin.delete_consumer_groups([group]).values():
        deleted.result(WAIT_SECONDS)
    again = world.evaluator()
    for _ in range(20):
        again.advance()
    assert world.outcomes() == before


@any_broker
def test_training_samples_are_left_to_the_trainer(world: World) -> None:
    session = world.evaluator()
    found: Sample = sample("g", 0, size=1)
    world.writer.write(SAMPLES, found, key="g")
    world.writer.flush()
    world.publish(0)
    world.evaluate(session)
    assert trajectory_id("g", 0) not in {outcome.trajectory_id for outcome in world.outcomes()}
