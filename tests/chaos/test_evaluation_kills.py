"""Evaluations beside training, while the evaluator and other roles are killed: nothing is lost, doubled or trained."""

import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose.pipeline.audit import audit_log
from rose.schemas.evaluations import EvaluationResult
from rose.schemas.prompts import Prompt, group_id_of, is_evaluation
from rose.schemas.samples import Outcome, Sample, SampleOutcome
from rose.topics.catalog import EVALUATION_RESULTS, EVALUATIONS, OUTCOMES, SAMPLES
from rose.topics.errors import TopicMissing
from rose.topics.log_reader import read_whole_topics
from rose.workers.trainer.config import TrainerConfig
from tests.support.brokers import EMBEDDED, IF_KAFKA, KAFKA, start
from tests.support.killed_run import WAIT_SECONDS, KilledRun

GROUPS, GROUP_SIZE, GROUPS_PER_STEP = 12, 8, 3
EVERY, TASKS, SAMPLES_EACH = 2, 12, 3
VERSIONS = (0, 2, 4)
"""The versions that are due, of the four that twelve groups make."""

CONFIG = f"""
[trainer]
groups_per_step = {GROUPS_PER_STEP}
total_groups = {GROUPS}

[environment]
window_groups = 8

[evaluation]
every_versions = {EVERY}
tasks = {TASKS}
samples = {SAMPLES_EACH}
window_prompts = 5

[topics]
home_partitions = 2
inbox_slots = 2
sample_partitions = 2
chunk_partitions = 2
"""


@pytest.fixture(params=[KAFKA, pytest.param(EMBEDDED, marks=IF_KAFKA)])
def run(request: pytest.FixtureRequest, tmp_path: Path, namespace: str) -> Iterator[KilledRun]:
    with start(request.param, tmp_path / "broker") as broker:
        running = KilledRun(tmp_path, broker.settings(namespace), config=CONFIG, groups=GROUPS, group_size=GROUP_SIZE)
        try:
            yield running
        finally:
            running.close()


def until_evaluating(run: KilledRun, version: int) -> None:
    """Wait until samples of a version are asked for, or its evaluation has ended."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        assert run.process.poll() is None, run.output()
        try:
            for envelope in read_whole_topics(run.settings, [EVALUATIONS, EVALUATION_RESULTS]):
                prompt, result = envelope.record, envelope.record
                if isinstance(prompt, Prompt) and prompt.pinned_version == version:
                    return
                if isinstance(result, EvaluationResult) and result.version == version:
                    return
        except TopicMissing:
            time.sleep(0.2)
    raise AssertionError(f"version {version} is not evaluated:\n{run.output()}")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_evaluations_are_whole_and_never_trained_under_kills_of_any_role(run: KilledRun) -> None:
    seed = int(os.environ.get("ROSE_CHAOS_SEED", random.SystemRandom().randrange(2**32)))
    print(f"ROSE_CHAOS_SEED={seed}")
    dice = random.Random(seed)
    others = dice.sample(["executor-0", "executor-1", "environment-0", "trainer", "router"], len(VERSIONS))
    for version, other in zip(VERSIONS, others, strict=True):
        until_evaluating(run, version)
        for role in dice.sample(["evaluator", other], 2):
            print(f"while version {version} is evaluated: kill -9 {role}")
            run.kill(role)
    assert run.process.wait(2 * WAIT_SECONDS) == 0, run.output()

    audit = audit_log(run.settings)
    assert audit.clean, audit
    assert audit.requested == audit.settled
    assert audit.infra_failed == 0, "a killed process is no failure of a trajectory"
    assert audit.requested - audit.evaluated == GROUPS * GROUP_SIZE
    records = [envelope.record for envelope in read_whole_topics(run.settings, [OUTCOMES, SAMPLES, EVALUATION_RESULTS])]
    results = [record for record in records if isinstance(record, EvaluationResult)]
    assert sorted(result.version for result in results) == list(VERSIONS)
    counted: dict[int, Counter[str]] = defaultdict(Counter)
    for record in records:
        if isinstance(record, SampleOutcome) and is_evaluation(record.group_id):
            assert record.outcome is Outcome.EVALUATED
            if not record.reason:
                counted[record.policy_version][group_id_of(record.trajectory_id).split(":")[4]] += 1
    for result in results:
        assert result.complete, result
        assert result.counted == TASKS * SAMPLES_EACH
        assert counted[result.version] == dict.fromkeys(map(str, range(TASKS)), SAMPLES_EACH)
    wrong = [
        record.trajectory_id
        for record in records
        if isinstance(record, Sample)
        and is_evaluation(record.group_id)
        and any(span.version != int(record.group_id.split(":")[3]) for span in record.spans)
    ]
    assert len(wrong) == sum(result.mismatched for result in results)
    assert TrainerConfig(model_folder=run.folder, run_folder=run.folder).best.is_dir()
