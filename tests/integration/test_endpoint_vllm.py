"""`rose lend --endpoint`: turns on a real vLLM server of the policy, over HTTP."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rose.schemas.arrays import unpack_logprobs, unpack_tokens
from rose.schemas.heartbeats import ExecutorState, WorkerClass
from rose.schemas.turns import TurnOutcome, TurnResult
from rose.topics.admin import create_topics
from rose.topics.catalog import Partitions
from rose.topics.local_broker import free_ports
from rose.topics.settings import BusSettings
from rose.workers.weights.config import DEFAULT_RUN
from tests.support.brokers import AnyBroker, best_broker, flags
from tests.support.executor_fixtures import SLOT, WAIT_SECONDS, Router
from tests.support.lender_server_fixtures import SERVING, healthy, server_flags
from tests.support.policy_folders import logprobs_of, new_policy, save_policy
from tests.support.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(900)]

CONTEXT = [3, 4, 5, 6] * 20


class Server:
    """A vLLM server of a model folder that can be killed and restarted at the same port."""

    def __init__(self, folder: Path, model: Path) -> None:
        [self.port], self._folder, self._model = free_ports(1), folder, model
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self._model)]
        command += [*server_flags(self.port), "--logprobs-mode", "processed_logprobs", "--skip-tokenizer-init"]
        command += ["--enable-prompt-tokens-details"]
        environment = os.environ | SERVING | {"VLLM_SERVER_DEV_MODE": "1"}
        with (self._folder / "server.log").open("ab") as output:
            self._process = process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        until(lambda: healthy(self.port) or process.poll() is not None, 4 * WAIT_SECONDS)
        assert process.poll() is None, (self._folder / "server.log").read_text()[-4000:]

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.wait()


@pytest.fixture
def settings(broker: AnyBroker, namespace: str) -> BusSettings:
    settings = broker.settings(namespace)
    create_topics(settings, Partitions(home=2, slots=2, samples=1, chunks=2))
    return settings


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path, save_policy(tmp_path / "policy", new_policy(0, tied=False)))
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture
def lender(settings: BusSettings, server: Server, tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    values = {
        "run.name": DEFAULT_RUN,
        "model.folder": tmp_path / "policy",
        "executor.max_model_len": 256,
        "environment.max_context_tokens": 256,
        "executor.kv_cache_bytes": 16 << 20,
        "executor.max_turns": 8,
        "executor.slot": SLOT,
        "endpoint.folder": tmp_path / "versions",
        "endpoint.ttft_seconds": 20,  # on a shared machine; this test does not test latency
        "endpoint.tpot_seconds": 5,
    }
    settings_flags = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    command = [
        sys.executable,
        "-m",
        "rose.pipeline.cli.main",
        "lend",
        "--endpoint",
        server.url,
        f"--name=executor-{SLOT}",
    ]
    log = tmp_path / "lender.log"
    with log.open("wb") as output:
        lender = subprocess.Popen([*command, *flags(settings), *settings_flags], stdout=output, stderr=output)
    yield lender
    lender.terminate()
    assert lender.wait(WAIT_SECONDS) == 0
    print(log.read_text())


def prove(result: TurnResult, model: Any, version: int, earlier_tokens: tuple[int, ...] = ()) -> None:
    tokens = unpack_tokens(result.tokens)
    assert result.outcome is TurnOutcome.COMPLETED
    assert [(span.start, span.end, span.version) for span in result.spans] == [(0, len(tokens), version)]
    expected = logprobs_of(model, CONTEXT, tokens).numpy()
    assert np.abs(unpack_logprobs(result.logprobs) - expected).max() < 1e-3


def alone(model: Any, folder: Path) -> list[int]:
    """Return the greedy output of a dedicated rollout engine."""
    from rose.workers.executor.vllm.engine import Engine
    from tests.support.engine_fixtures import EngineFixture, folder_config, tokens_of

    engine = Engine(folder_config(save_policy(folder, model)))
    try:
        turn = EngineFixture(engine, model, tied=False).run(
            CONTEXT, temperature=0.0, max_tokens=40, stop_token_ids=(0,)
        )
        return tokens_of(turn)
    finally:
        engine.close()


@best_broker
def test_vllm_server_answers_turns_under_proven_versions(
    settings: BusSettings, server: Server, lender: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    models = [new_policy(seed, tied=False) for seed in range(3)]
    router = Router(settings, lender)
    router.publish(models[1], 1)
    router.until(lambda: router.serves(1))
    beat = router.heartbeats[-1]
    assert (beat.worker_class, beat.state, beat.hardware.device) == (
        WorkerClass.SERVING,
        ExecutorState.READY,
        "request-level",
    )
    router.dispatch("greedy", CONTEXT, temperature=0.0, max_tokens=40)
    greedy = router.result("greedy")
    prove(greedy, models[1], 1)
    router.dispatch("again", CONTEXT)
    prove(router.result("again"), models[1], 1)
    assert router.result("again").cached_tokens >= 64

    router.publish(models[2], 2)
    router.until(lambda: router.serves(2))
    router.dispatch("second", CONTEXT)
    prove(router.result("second"), models[2], 2)
    assert router.result("second").cached_tokens == 0

    router.until(lambda: router.heartbeats[-1].rollout.running == 0)
    router.dispatch("cut-off", CONTEXT, max_tokens=170, stop=())
    router.until(lambda: router.heartbeats[-1].rollout.running == 1)
    server.kill()
    cut = router.result("cut-off")
    if cut.outcome is TurnOutcome.PREEMPTED:  # otherwise the turn had ended before
        assert "away" in cut.reason
    router.until(lambda: router.heartbeats[-1].state is ExecutorState.STOPPING)
    gone = router.heartbeats[-1].incarnation
    server.start()
    router.until(lambda: router.heartbeats[-1].incarnation != gone and router.serves(2))
    router.dispatch("after", CONTEXT)
    prove(router.result("after"), models[2], 2)
    assert unpack_tokens(greedy.tokens) == alone(models[1], tmp_path / "alone")
