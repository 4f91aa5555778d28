"""Sandboxes under environment workers that are killed: each trajectory has the sample of an undisturbed run."""

import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from rose.schemas.samples import Sample
from rose.schemas.turns import TurnRequest, TurnResult
from tests.support.brokers import AnyBroker
from tests.support.environment_worker_fixtures import PARTITIONS, finish, once, prompt_of
from tests.support.roles import kill
from tests.support.sandbox_fixtures import needs_sandboxes, own_leases, sandboxes_left
from tests.support.scripted_executors import ScriptedExecutors, scripted_result, worker_process

pytestmark = [needs_sandboxes, pytest.mark.slow]

__all__ = ["own_leases"]

COMMANDS = (
    "echo one > a; seq 60000 > large",
    "cat a; wc -c large",
    "echo two >> a; sleep 300 & echo started",
    "cat a",
    "pkill sleep; sleep 0.1; seq 70000 > large; echo three >> a",
    "cat a | wc -l; cksum large",
)
ARGUMENTS = {"setup": ["seq $SEED 20000 > base"], "check": "test $(wc -l < a) = 3"}
GROUPS, SIZE = 3, 2


def commanded(request: TurnRequest, context: bytes) -> list[TurnResult]:
    """The result of a turn: its command, and at last the submission."""
    command = f"bash {COMMANDS[request.turn]}" if request.turn < len(COMMANDS) else "submit "
    return [scripted_result(request, f"```{command}```", attempt=0)]


def played(
    broker: AnyBroker, namespace: str, config: dict[str, Any], *, kills: int = 0, victims: Sequence[str] = ()
) -> dict[str, Sample]:
    """The samples of all prompts. A worker is killed so many times, then a process of each of these names below it."""
    settings = broker.settings(namespace)
    quick = dataclasses.replace(settings, properties={**settings.properties, "session.timeout.ms": "6000"})
    executors = ScriptedExecutors(quick, PARTITIONS, results=commanded)
    draw = random.Random(kills)
    try:
        for number in range(GROUPS):
            executors.submit(prompt_of(number, environment="sandbox", group_size=SIZE, arguments=ARGUMENTS))
        for _ in range(kills):
            until = executors.requested + draw.randint(1, 12)
            with worker_process(executors.settings, 0, config) as worker:
                executors.pump_until(lambda: executors.requested >= until, what=f"{until} requests")  # noqa: B023
                kill(worker)
        with worker_process(executors.settings, 0, config) as worker:
            for name in victims:
                until = executors.requested + 3
                executors.pump_until(lambda: executors.requested >= until, what=f"{until} requests")  # noqa: B023
                named = [each for each in psutil.Process(worker.pid).children(recursive=True) if each.name() == name]
                named[0].kill()
            finish(executors, GROUPS * SIZE)
        return once(executors)
    finally:
        executors.close()


@pytest.fixture(params=["thread", "process"])
def config(request: pytest.FixtureRequest, own_leases: None, model: str, tmp_path: Path) -> Iterator[dict[str, Any]]:
    store = tmp_path / "store"
    yield {
        "model_folder": model,
        "isolation": request.param,
        "sandbox_store": str(store),
        "sandbox_store_seconds": 20.0,
    }
    assert sandboxes_left(store, keep_seconds=20.0) == []


def test_kills_of_a_worker_change_no_trajectory_and_leave_nothing(
    broker: AnyBroker, namespace: str, config: dict[str, Any]
) -> None:
    undisturbed = played(broker, f"{namespace}calm.", config)
    assert {sample.failure for sample in undisturbed.values()} == {""}
    assert played(broker, f"{namespace}kills.", config, kills=3) == undisturbed


@pytest.mark.parametrize("config", ["process"], indirect=True)
def test_kills_below_a_worker_change_no_trajectory_and_leave_nothing(
    broker: AnyBroker, namespace: str, config: dict[str, Any]
) -> None:
    undisturbed = played(broker, f"{namespace}calm.", config)
    assert played(broker, f"{namespace}kills.", config, victims=("env sandbox", "env-guard")) == undisturbed
