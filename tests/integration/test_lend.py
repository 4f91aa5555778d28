"""`rose lend`: a real vLLM server that answers over HTTP, and runs turns from the bus while it has nothing to serve."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.torch import load_file

from schemas.arrays import unpack_logprobs, unpack_tokens
from schemas.slack import ExecutorState, WorkerClass
from schemas.turns import TurnOutcome, TurnResult
from tests.brokers import AnyBroker, flags
from tests.integration.executor_kit import SLOT, WAIT_SECONDS, Router
from tests.integration.lender_kit import MODEL, SERVING, Server, healthy, server_flags
from tests.waiting import until
from topics.admin import create_topics
from topics.broker import free_ports
from topics.catalog import Partitions
from topics.settings import BusSettings
from workers.lender.config import LendConfig
from workers.weights.config import DEFAULT_RUN

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(600)]

CONTEXT = [5, 6, 7, 8, 9, 10, 11, 12] * 4


@pytest.fixture
def settings(broker: AnyBroker, namespace: str) -> BusSettings:
    settings = broker.settings(namespace)
    create_topics(settings, Partitions(home=2, slots=2, samples=1, chunks=2))
    return settings


@pytest.fixture
def server(settings: BusSettings, tmp_path: Path) -> Iterator[Server]:
    [port], log = free_ports(1), tmp_path / "server.log"
    wanted = {
        "run.name": DEFAULT_RUN,
        "model.folder": MODEL,
        "executor.max_model_len": 256,
        "environment.max_context_tokens": 256,
        "executor.kv_cache_bytes": 8 << 20,
        "executor.max_turns": 8,
        "executor.step_tokens": 64,
    }
    said = [word for key, value in wanted.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "pipeline.command.main", "lend", "--model", str(MODEL), f"--slot={SLOT}"]
    command += [*flags(settings), *said, "--", *server_flags(port), "--kv-cache-memory-bytes", str(8 << 20)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=os.environ | SERVING, stdout=output, stderr=output)
    try:
        until(lambda: healthy(port) or process.poll() is not None, 2 * WAIT_SECONDS)
        assert process.poll() is None, log.read_text()[-4000:]
        children = psutil.Process(process.pid).children(recursive=True)
        yield Server(process, port, LendConfig(model_folder=str(MODEL), socket=""), log, tmp_path / "notes")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT_SECONDS)
        assert not psutil.wait_procs(children, WAIT_SECONDS)[1]
        print(log.read_text()[-8000:])


def test_a_server_runs_turns_of_the_bus_and_serves(settings: BusSettings, server: Server) -> None:
    router = Router(settings, server.process)
    answer = server.complete(CONTEXT).text
    policy = load_file(MODEL / "model.safetensors")
    router.publish_tensors(policy, 0)
    router.until(lambda: router.serves(0))
    assert (router.beats[-1].worker_class, router.beats[-1].state) == (WorkerClass.SERVING, ExecutorState.READY)

    router.dispatch("alone", CONTEXT)
    prove(router.result("alone"))
    for number in range(8):
        router.dispatch(f"beside-{number}", CONTEXT, max_tokens=100, stop=())
    assert server.complete(CONTEXT).text == answer
    for number in range(8):
        prove(router.result(f"beside-{number}"))

    is_cut_and_recovers(router, server)

    router.executor = None
    server.process.send_signal(signal.SIGTERM)
    router.until(lambda: router.beats[-1].state is ExecutorState.STOPPING)


def test_a_process_beside_that_is_killed_takes_nothing_along(settings: BusSettings, server: Server) -> None:
    router = Router(settings, server.process)
    router.until(lambda: bool(router.beats))
    answer = server.complete(CONTEXT).text
    (beside,) = [each for each in psutil.Process(server.process.pid).children() if "beside" in each.name()]
    beside.kill()
    assert server.complete(CONTEXT).text == answer


def is_cut_and_recovers(router: Router, server: Server) -> None:
    """A burst of serving's wants all KV memory that there is."""
    offered = router.beats[-1].token_budget
    assert offered > 0 and not router.beats[-1].frozen
    for number in range(8):
        router.dispatch(f"cut-{number}", CONTEXT, max_tokens=220, stop=())
    router.until(lambda: router.beats[-1].rollout.running > 4)
    clients = [threading.Thread(target=server.complete, args=([3 + number] * 400, 64)) for number in range(16)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    results = [router.result(f"cut-{number}") for number in range(8)]
    assert {result.reason for result in results if result.outcome is TurnOutcome.PREEMPTED} == {"cut"}
    assert any(result.tokens for result in results)
    router.until(lambda: any(beat.frozen and beat.cuts > 0 and beat.token_budget < offered for beat in router.beats))
    router.until(lambda: not router.beats[-1].frozen and router.beats[-1].token_budget > offered // 2)
    router.dispatch("again", CONTEXT)
    prove(router.result("again"))


def prove(result: TurnResult) -> None:
    assert result.outcome is TurnOutcome.COMPLETED
    assert [(span.start, span.version) for span in result.spans] == [(0, 0)]
    assert set(result.device_seconds) == {"serving"} and result.device_seconds["serving"] > 0
    assert len(unpack_tokens(result.tokens)) and np.isfinite(unpack_logprobs(result.logprobs)).all()
