"""The adapter for OpenEnv, against a server of OpenEnv itself: the example of the guide."""

import asyncio
import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from msgspec import Meta

from rose.topics.local_broker import free_ports
from rose.workers.environments.byte_model import write_byte_model
from rose.workers.environments.check import CheckPlan, check_environment
from rose.workers.environments.openenv_adapter import MALFORMED, OpenEnv, ServerError
from rose.workers.environments.protocol import EnvironmentArgumentError, SnapshotError, Step
from tests.support.adapter_environments import ROOT, python_of
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EXAMPLE = ROOT / "docs/examples/openenv"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    [port] = free_ports(1)
    command = [python_of("openenv"), str(EXAMPLE / "server.py"), str(port)]
    with subprocess.Popen(command) as server:
        try:
            until(lambda: answers(port) or server.poll() is not None, seconds=120)
            assert server.poll() is None, "the server has ended"
            yield f"ws://127.0.0.1:{port}/ws"
        finally:
            server.kill()


def answers(port: int) -> bool:
    async def connects() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return False
        writer.close()
        return True

    return asyncio.run(connects())


def guessing(address: str, **fields: Any) -> type[OpenEnv]:
    """Return the environment of the example, at this address and with other fields."""
    own = {"url": address, "action_field": "guess", "observation_field": "hint"}
    return type("Guessing", (OpenEnv,), own | {"argument_types": {"highest": Annotated[int, Meta(ge=1)]}} | fields)


def number_of(seed: int, highest: int = 100) -> int:
    return random.Random(seed).randint(1, highest)


async def play(environment: OpenEnv, seed: int, actions: list[str]) -> tuple[object, list[Step]]:
    try:
        first = await environment.reset(seed, {})
        return first, [await environment.step(action) for action in actions]
    finally:
        await environment.close()


def test_task_of_the_server_is_played_with_its_rewards(url: str) -> None:
    number = number_of(7)
    first, steps = asyncio.run(play(guessing(url)(), 7, [str(number - 1), "a word", str(number)]))
    assert first == "1 to 100"
    assert [(step.observation, step.reward, step.done) for step in steps] == [
        ("higher", 0.0, False),
        (MALFORMED, 0.0, False),
        ("right", 1.0, True),
    ]
    assert steps[-1].success is True


def test_action_and_observation_without_fields_are_json(url: str) -> None:
    plain = guessing(url, action_field="", observation_field="")()
    first, steps = asyncio.run(play(plain, 7, ['{"guess": 1000}', '{"guess": NaN}', "[" * 100_000]))
    assert isinstance(first, str) and json.loads(first)["hint"] == "1 to 100"
    assert json.loads(steps[0].observation)["hint"] == "lower"
    assert [step.observation for step in steps[1:]] == [MALFORMED, MALFORMED]


def test_task_ends_at_the_turn_limit_without_success(url: str) -> None:
    _, steps = asyncio.run(play(guessing(url, turn_limit=2)(), 7, ["0", "0"]))
    assert [(step.done, step.success) for step in steps] == [(False, False), (True, False)]


def test_snapshot_of_another_task_is_refused(url: str) -> None:
    async def restored() -> None:
        environment = guessing(url)()
        try:
            await environment.reset(7, {})
            await environment.step("0")
            state = json.loads(await environment.snapshot())
            state["digest"] = "0" * 32
            await environment.restore(json.dumps(state).encode())
        finally:
            await environment.close()

    with pytest.raises(SnapshotError, match="does not repeat a task"):
        asyncio.run(restored())


@pytest.mark.parametrize("arguments", [{"lowest": 1}, {"highest": "many"}, {"highest": 0}])
def test_arguments_that_the_environment_does_not_declare_are_refused(url: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(EnvironmentArgumentError, match="argument"):
        asyncio.run(guessing(url)().reset(7, arguments))


def test_missing_server_is_named_with_the_fix() -> None:
    [port] = free_ports(1)
    environment = guessing(f"ws://127.0.0.1:{port}/ws")()

    async def begin() -> None:
        try:
            await environment.reset(7, {})
        finally:
            await environment.close()

    with pytest.raises(ServerError, match=r"no OpenEnv server answers at .*start it, or set url"):
        asyncio.run(begin())


def test_example_passes_every_check_in_a_workers_processes(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GUESSING_URL", url)
    plan = CheckPlan(
        environment="guessing_client:Guessing",
        model_folder=write_byte_model(tmp_path),
        import_paths=(EXAMPLE,),
        seeds=(0, 1),
        arguments={"highest": 90},
        actions=("50", "20"),
        turns=4,
        timeout_seconds=60.0,
    )
    assert [finding for finding in check_environment(plan) if not finding.passed] == []
