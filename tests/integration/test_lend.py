"""`rose lend`: a real vLLM server that answers over HTTP, and runs turns of the bus while it has nothing to serve."""

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.torch import load_file

from rose.schemas.arrays import unpack_logprobs, unpack_tokens
from rose.schemas.grants import CapacityGrant
from rose.schemas.heartbeats import ExecutorState, WorkerClass
from rose.schemas.turns import TurnOutcome, TurnResult
from rose.topics.admin import create_topics
from rose.topics.catalog import GRANTS, Partitions
from rose.topics.local_broker import Broker, free_ports
from rose.topics.settings import BusSettings
from rose.workers.lender.config import LendConfig
from rose.workers.lender.recording import ROW_SECONDS, read_recording
from rose.workers.lender.vllm_server import CORE_LOST_STATUS
from rose.workers.weights.config import DEFAULT_RUN
from tests.support.brokers import AnyBroker, best_broker, flags
from tests.support.executor_fixtures import SLOT, WAIT_SECONDS, Router
from tests.support.lender_server_fixtures import (
    FAULT,
    HANG,
    MODEL,
    NOTES,
    ON_RANKS,
    RANKS,
    ROOT,
    SERVING,
    Server,
    healthy,
    server_flags,
)
from tests.support.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(1200)]

START_SECONDS = 4 * WAIT_SECONDS
"""Time that a server may take to start on a busy machine."""

CONTEXT = [5, 6, 7, 8, 9, 10, 11, 12] * 4
LONG = 450
"""Tokens of a turn that takes longer than the delivery of a grant."""

HANG_SECONDS = 4.0


@pytest.fixture
def settings(broker: AnyBroker, namespace: str) -> BusSettings:
    return with_topics(broker.settings(namespace))


def with_topics(settings: BusSettings) -> BusSettings:
    create_topics(settings, Partitions(home=2, slots=2, samples=1, chunks=2))
    return settings


def started(folder: Path, *arguments: str, vllm: tuple[str, ...] = (), **more: object) -> Server:
    """Start a server by `rose lend`, with these arguments and vLLM flags. `more` are configuration values, with __ for
    a dot.

    The server is still loading.
    """
    [port], log = free_ports(1), folder / "server.log"
    values = {
        "run.name": DEFAULT_RUN,
        "model.folder": MODEL,
        "executor.slot": SLOT,
        "executor.max_model_len": 512,
        "environment.max_context_tokens": 512,
        "executor.kv_cache_bytes": 8 << 20,
        "executor.max_turns": 8,
        "executor.step_tokens": 64,
        "lender.stop_file": folder / "stop",
        "lender.hang_seconds": HANG_SECONDS,
    } | {name.replace("__", "."): value for name, value in more.items()}
    settings_flags = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "rose.pipeline.cli.main", "lend", "--model", str(MODEL), f"--name=executor-{SLOT}"]
    command += [*arguments, *settings_flags, "--", *server_flags(port), "--kv-cache-memory-bytes", str(8 << 20), *vllm]
    environment = os.environ | SERVING | {HANG: str(folder / "hang"), FAULT: str(folder / "fault")}
    environment[NOTES] = str(folder / "notes")
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
    return Server(process, port, LendConfig(model_folder=str(MODEL), socket=""), log, folder / "notes")


@contextmanager
def lending(folder: Path, *arguments: str, vllm: tuple[str, ...] = (), **more: object) -> Iterator[Server]:
    """Start a server and wait until it is ready; stop it at the end."""
    server = started(folder, *arguments, vllm=vllm, **more)
    process, log = server.process, server.log
    children: list[psutil.Process] = []
    try:
        until(lambda: healthy(server.port) or process.poll() is not None, START_SECONDS)
        assert process.poll() is None, log.read_text()[-4000:]
        children = psutil.Process(process.pid).children(recursive=True)
        yield server
    finally:
        if not children:  # a server that is not ready receives nothing
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT_SECONDS)
        print(log.read_text()[-8000:])
        assert not psutil.wait_procs(children, WAIT_SECONDS)[1]


@best_broker
def test_server_runs_turns_and_serves_over_a_sidecar_kill_until_its_guest_hangs(
    settings: BusSettings, tmp_path: Path
) -> None:
    hanging = ("--scheduler-cls", "tests.support.hanging_guest.Hanging")
    with lending(tmp_path, *flags(settings), vllm=hanging) as server:
        router = Router(settings, server.process)
        answer = server.complete(CONTEXT).text
        router.publish_tensors(load_file(MODEL / "model.safetensors"), 0)
        router.until(lambda: router.serves(0))
        assert (router.heartbeats[-1].worker_class, router.heartbeats[-1].state) == (
            WorkerClass.SERVING,
            ExecutorState.READY,
        )
        router.dispatch("alone", CONTEXT)
        prove(router.result("alone"))
        for number in range(8):
            router.dispatch(f"beside-{number}", CONTEXT, max_tokens=100, stop=())
        assert server.complete(CONTEXT).text == answer
        for number in range(8):
            prove(router.result(f"beside-{number}"))

        goes_on_after_a_park(router)
        incarnation = router.heartbeats[-1].incarnation
        child(server, "sidecar").kill()
        assert server.complete(CONTEXT).text == answer
        router.until(lambda: router.heartbeats[-1].incarnation > incarnation and router.serves(0))
        assert server.log.read_text().count("guest_built") == 2
        router.dispatch("after", CONTEXT)
        prove(router.result("after"))

        is_cut_and_recovers(router, server)
        router.executor = None
        (tmp_path / "hang").touch()
        core = server.core
        router.dispatch("hangs", CONTEXT)
        began = time.monotonic()
        psutil.wait_procs([core], timeout=WAIT_SECONDS)
        assert not core.is_running() and time.monotonic() - began > HANG_SECONDS / 2
        assert server.process.wait(WAIT_SECONDS) == CORE_LOST_STATUS
        assert "a_step_that_hangs" in server.log.read_text()
        assert "has had the thread" in (tmp_path / "stop").read_text()
        router.until(lambda: router.heartbeats[-1].state is ExecutorState.STOPPING)


@best_broker
def test_hung_rank_is_ended_with_the_engine_core(settings: BusSettings, tmp_path: Path) -> None:
    with lending(tmp_path, *flags(settings), vllm=ON_RANKS) as server:
        router = Router(settings, server.process)
        router.publish_tensors(load_file(MODEL / "model.safetensors"), 0)
        router.until(lambda: router.serves(0))
        router.dispatch("alone", CONTEXT)
        prove(router.result("alone"))
        router.executor = None
        (tmp_path / "fault").write_text("hang")
        ranks, core = server.workers, server.core
        assert len(ranks) == RANKS
        router.dispatch("hangs", CONTEXT)
        psutil.wait_procs([core, *ranks], timeout=WAIT_SECONDS)
        assert not any(each.is_running() for each in (core, *ranks))
        server.process.wait(WAIT_SECONDS)
        assert "_all_reduce_or_fault" in server.log.read_text(), "the stacks of the rank"
        assert "has had the thread" in (tmp_path / "stop").read_text()


def goes_on_after_a_park(router: Router) -> None:
    """Assert that the turns of a parked lender end as uninterrupted turns on another guest."""
    names = [f"turn-{number}" for number in range(8)]
    for number, name in enumerate(names):
        router.dispatch(f"whole-{name}", CONTEXT, max_tokens=LONG, stop=(), seed=number)
    for name in names:
        router.result(f"whole-{name}")
    for seed, name in enumerate(names):
        router.dispatch(name, CONTEXT, max_tokens=LONG, stop=(), seed=seed)
        if seed == 3:
            router.dispatch("soon", CONTEXT, max_tokens=5, stop=())
    router.result("soon")  # earlier turns have as many tokens and are far from their end
    offered = router.heartbeats[-1].token_budget
    grant(router, lend=False)
    parts = {name: router.result(name) for name in names}
    router.until(lambda: router.heartbeats[-1].paused_reason == "a grant parked it: test")
    preempted_parts = {name: part for name, part in parts.items() if part.outcome is TurnOutcome.PREEMPTED}
    assert any(part.tokens for part in preempted_parts.values())
    grant(router, lend=True)
    router.until(lambda: router.serves(0) and router.heartbeats[-1].state is ExecutorState.READY)
    router.until(lambda: router.heartbeats[-1].token_budget >= offered)
    for seed, name in enumerate(names):
        if name in preempted_parts:
            part = preempted_parts[name].part if preempted_parts[name].tokens else None  # as a router sends it
            router.dispatch(name, CONTEXT, max_tokens=LONG, stop=(), seed=seed, attempt=1, partial=part)
    for name in preempted_parts:
        assert router.result(name, 1).tokens == router.result(f"whole-{name}").tokens
        assert router.result(name, 1).context_tokens == len(CONTEXT) + len(unpack_tokens(preempted_parts[name].tokens))


def grant(router: Router, *, lend: bool) -> None:
    worker = f"executor-{SLOT}"
    record = CapacityGrant(worker=worker, lend=lend, kv_bytes=0, token_budget=0, granted_at=0.0, reason="test")
    router.writer.write(GRANTS, record, key=worker)
    router.writer.flush()


@best_broker
def test_stop_file_stops_lending_during_a_broker_outage(own_broker: Broker, tmp_path: Path) -> None:
    settings = with_topics(own_broker.settings())
    (tmp_path / "stop").touch()
    with lending(tmp_path, *flags(settings)) as server:
        router = Router(settings, server.process)
        router.publish_tensors(load_file(MODEL / "model.safetensors"), 0)
        router.until(lambda: bool(router.heartbeats) and "file" in router.heartbeats[-1].paused_reason)
        assert not server.has_logged("guest_built"), "what was there before it began counts too"
        (tmp_path / "stop").unlink()
        router.until(lambda: router.serves(0))
        router.dispatch("long", CONTEXT, max_tokens=LONG, stop=())
        own_broker.stop()
        (tmp_path / "stop").touch()
        began = time.monotonic()
        until(lambda: server.has_logged("guest_suspended"))
        print(f"parked {time.monotonic() - began:.2f} s after the file was there", file=sys.__stderr__)
        assert time.monotonic() - began < 5.0, "a second, on a machine with nothing else to do"
        assert server.complete(CONTEXT).text


def test_observed_server_lends_nothing_and_reports_its_potential(tmp_path: Path) -> None:
    [port] = free_ports(1)
    file = tmp_path / "day.csv"
    with lending(tmp_path, "--observe", "--record", str(file), metrics__executor=port - SLOT) as server:
        until(lambda: metric(port, "rose_lender_observed_seconds_total") > 0)
        idle = metric(port, "rose_lender_idle_seconds_total")
        assert metric(port, "rose_lender_serving_kv_bytes", '{what="most"}') == 0.0
        ended = metric(port, "rose_lender_idle_stretch_seconds_count")
        for _ in range(3):
            server.complete(CONTEXT, 100)
        until(lambda: metric(port, "rose_lender_idle_stretch_seconds_count") >= ended + 3)
        until(lambda: metric(port, "rose_lender_idle_seconds_total") > idle)
        seconds = metric(port, "rose_lender_observed_seconds_total")
        assert metric(port, "rose_lender_idle_seconds_total") < seconds
        until(lambda: server.has_logged("idle_capacity_observed"))
        assert not server.has_logged("guest_built")
        until(lambda: len(file.read_text().splitlines()) > 2)
    rows = read_recording(file)
    print(*rows, sep="\n")
    assert all(ROW_SECONDS <= row.seconds < 1.5 * ROW_SECONDS for row in rows)
    assert any(row.idle_seconds < row.seconds and row.kv_bytes_most > 0 for row in rows), "the three requests"
    assert rows[0].unix_seconds < rows[1].unix_seconds <= time.time()


def metric(port: int, name: str, labels: str = "") -> float:
    """Return a metric of the sidecar; 0 while the sidecar does not export it."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_SECONDS) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return 0.0
    found = [line.rpartition(" ")[2] for line in lines if line.startswith(f"{name}{labels} ")]
    return float(found[0]) if found else 0.0


def child(server: Server, name: str) -> psutil.Process:
    """Return a child of the server process, or of the watchdog."""
    there = psutil.Process(server.process.pid).children(recursive=True)
    (found,) = [each for each in there if each.name().startswith(name)]
    return found


def is_cut_and_recovers(router: Router, server: Server) -> None:
    """Send a serving burst that needs all KV memory; wait for the cut and the recovery."""
    offered = router.heartbeats[-1].token_budget
    assert offered > 0 and not router.heartbeats[-1].frozen
    for number in range(8):
        router.dispatch(f"cut-{number}", CONTEXT, max_tokens=220, stop=())
    router.until(lambda: router.heartbeats[-1].rollout.running > 4)
    clients = [threading.Thread(target=server.complete, args=([3 + number] * 400, 64)) for number in range(16)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    results = [router.result(f"cut-{number}") for number in range(8)]
    assert {result.reason for result in results if result.outcome is TurnOutcome.PREEMPTED} == {"cut"}
    assert any(result.tokens for result in results)
    router.until(
        lambda: any(beat.frozen and beat.cuts > 0 and beat.token_budget < offered for beat in router.heartbeats)
    )
    router.until(lambda: not router.heartbeats[-1].frozen and router.heartbeats[-1].token_budget > offered // 2)
    router.dispatch("again", CONTEXT)
    prove(router.result("again"))


def prove(result: TurnResult) -> None:
    assert result.outcome is TurnOutcome.COMPLETED
    assert [(span.start, span.version) for span in result.spans] == [(0, 0)]
    assert set(result.device_seconds) == {"serving"} and result.device_seconds["serving"] > 0
    assert len(unpack_tokens(result.tokens)) and np.isfinite(unpack_logprobs(result.logprobs)).all()
