"""`rose settle`: the named trajectories end once, as an infrastructure failure, with or without a worker."""

from pathlib import Path

import pytest

from rose.pipeline.audit import audit_log
from rose.schemas.progress import GroupState
from rose.schemas.samples import Sample
from rose.topics.settings import BusSettings
from tests.support.brokers import any_broker, flags, kafka_first
from tests.support.environment_worker_fixtures import SIZE, finish, groups, once, prompt_of
from tests.support.roles import kill, rose
from tests.support.scripted_executors import ScriptedExecutors, worker_process

NEVER = '''
from rose.workers.environments.calculator import Calculator

class Never(Calculator):
    """One that must not begin."""

    async def reset(self, seed, arguments):
        raise OSError("it began")
'''

pytestmark = pytest.mark.slow


def settle(settings: BusSettings, name: str, reason: str = "it ends its worker") -> None:
    done = rose("settle", name, "--reason", reason, *flags(settings))
    assert done.returncode == 0, done.stderr


@kafka_first
@pytest.mark.parametrize("has_started", [True, False], ids=["its worker lives", "no worker is there"])
def test_manually_settled_trajectory_ends_before_its_next_result(
    executors: ScriptedExecutors, undisturbed: dict[str, Sample], model: str, has_started: bool
) -> None:
    name, settings = "g0:1", executors.settings
    executors.answers = lambda request: request.trajectory_id != name
    for number in range(2):
        executors.submit(prompt_of(number))

    def all_settled() -> bool:
        return all(group.state is GroupState.SETTLED for group in groups(settings).values())

    with worker_process(settings, 0, {"model_folder": model}) as worker:
        finish(executors, 2 * SIZE - 1)
        if has_started:
            settle(settings, "g0")  # the others of the group have ended
            finish(executors, 2 * SIZE)
        else:
            kill(worker)
        executors.answer([executors.requests[name, 0]])
        executors.pump()
        if has_started:
            executors.pump_until(all_settled, what="settled groups")
    if not has_started:
        settle(settings, name)
        with worker_process(settings, 0, {"model_folder": model}):
            finish(executors, 2 * SIZE)
            executors.pump_until(all_settled, what="settled groups")
    samples = once(executors)
    ended = samples.pop(name)
    assert (ended.reward, ended.failure, ended.turns) == (None, "settled by hand: it ends its worker", ())
    assert samples == {each: undisturbed[each] for each in samples}
    found = audit_log(settings)
    assert found.clean and found.settled == found.requested == 2 * SIZE
    refused = rose("settle", name, *flags(settings))
    assert refused.returncode == 2 and "every trajectory of group g0 has its outcome already" in refused.stderr


@any_broker
def test_group_settled_before_its_opening_starts_no_trajectory(
    executors: ScriptedExecutors, model: str, tmp_path: Path
) -> None:
    (tmp_path / "never.py").write_text(NEVER)
    executors.submit(prompt_of(0, environment="never:Never"))
    settle(executors.settings, "g0")
    config = {"model_folder": model, "import_paths": [str(tmp_path)], "environments": ["never:Never"]}
    with worker_process(executors.settings, 0, config):
        finish(executors, SIZE)
    assert {sample.failure for sample in once(executors).values()} == {"settled by hand: it ends its worker"}


@any_broker
def test_name_shared_by_trajectory_and_group_settles_the_trajectory(executors: ScriptedExecutors, model: str) -> None:
    executors.answers = lambda _request: False
    executors.submit(prompt_of(0, group_id="g"))
    executors.submit(prompt_of(1, group_id="g:1"))
    with worker_process(executors.settings, 0, {"model_folder": model}):
        executors.pump_until(lambda: len(executors.requests) == 2 * SIZE, what="turns of both groups")
        settle(executors.settings, "g:1")
        finish(executors, 1)
        settle(executors.settings, "g:1:0")
        finish(executors, 2)
    assert set(once(executors)) == {"g:1", "g:1:0"}


@any_broker
@pytest.mark.parametrize(
    ("name", "reason", "words"),
    [
        ("g1", "", "no trajectory g1"),
        ("g0:4", "", "no trajectory g0:4"),
        ("g0:01", "", "no trajectory g0:01"),
        ("g0", "x" * 5_000, "that cannot be asked for"),
    ],
)
def test_impossible_settlement_is_refused_in_one_sentence(
    executors: ScriptedExecutors, name: str, reason: str, words: str
) -> None:
    executors.submit(prompt_of(0))
    done = rose("settle", name, "--reason", reason, *flags(executors.settings))
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
