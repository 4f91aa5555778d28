"""A guest in a real vLLM server: its results, and no visible effect on serving.

All tests share one server of each kind of scheduling. Its model computes in the engine-core process, as on a GPU. The
tests run in file order.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

import psutil
import pytest
import torch
from safetensors.torch import load_file

from rose.schemas.arrays import unpack_tokens
from rose.schemas.prompts import Sampling
from rose.workers.executor.ipc.engine_client import write_tensors
from rose.workers.executor.ipc.messages import (
    ABORTED,
    AbortTurn,
    ActivateWeights,
    EngineLost,
    EngineStatus,
    Resume,
    StageWeights,
    Suspend,
    TurnFinished,
    TurnRejected,
    WeightsActivated,
    WeightsStaged,
)
from rose.workers.executor.vllm.engine import Engine
from rose.workers.lender.vllm.guest_build import build_engine
from tests.support.guest_runs import (
    PROMPTS,
    TURNS,
    run_guest,
    run_standalone,
    same,
    state_changes,
    traffic,
    wake_and_park,
)
from tests.support.lender_server_fixtures import (
    MODEL,
    VOCABULARY,
    Answer,
    ScriptedSidecar,
    Server,
    lending_server,
)
from tests.support.waiting import WAIT_SECONDS, until

PROBES = {"sync": "LendingProbe", "async": "AsyncLendingProbe"}
"""Scheduler of the server by its scheduling."""

MEASURED_SECONDS = 3.0
"""Time for which an idle guest is measured."""

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=PROBES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    witness = ("--scheduler-cls", f"tests.support.lending_probe.{PROBES[request.param]}")
    with lending_server(tmp_path_factory.mktemp("lend"), *witness, scheduling=request.param) as running:
        yield running


@pytest.fixture(scope="module")
def alone(server: Server) -> list[Answer]:
    """Answers of serving before any sidecar connects; the first of each prompt warms up."""
    for prompt in PROMPTS:
        server.complete(prompt)
    return [server.complete(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def sidecar(server: Server, alone: list[Answer]) -> ScriptedSidecar:
    return ScriptedSidecar(server.config)


@pytest.fixture(scope="module")
def standalone(server: Server) -> Iterator[Engine]:
    """An engine like the guest's, without a host."""
    engine = build_engine(server.config)
    yield engine
    engine.close()


def test_serving_output_is_unchanged_while_a_guest_is_built_and_runs(
    server: Server, alone: list[Answer], sidecar: ScriptedSidecar
) -> None:
    with traffic(server) as answers:
        run_guest(sidecar)
        built = len(answers)
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            sidecar.forget()
            for number, (context, sampling) in enumerate(TURNS):
                sidecar.take(f"more {number}", context, replace_tokens(sampling, 100), -1)
            sidecar.done(len(TURNS))
    assert len(answers) > built > 0
    assert same(answers, alone)


def replace_tokens(sampling: Sampling, tokens: int) -> Sampling:
    return Sampling(max_tokens=tokens, temperature=sampling.temperature, seed=sampling.seed)


def test_batches_of_serving_overlap_only_with_async_scheduling(server: Server, request: pytest.FixtureRequest) -> None:
    overlap = any(note["in flight"] for note in server.step_notes())
    assert overlap is (request.node.callspec.params["server"] == "async")


def test_process_globals_are_unchanged_in_every_serving_step(server: Server, alone: list[Answer]) -> None:
    start, *steps = server.step_notes()
    assert state_changes(steps) == []
    states = [note["state"] for note in steps if "state" in note]
    assert any(note["building"] for note in steps), "no step of serving fell into the building of the guest"
    assert any(not note["building"] for note in steps[-20:])
    assert any(note["within"] for note in steps), "no step of serving fell between two layers of the guest's"
    changed = {name for name in start["state"] if start["state"][name] != states[0][name]}
    assert changed <= {"environment", "root hash", "garbage"}, "the plugin changed the process when it was attached"
    before, after = start["state"]["environment"], states[0]["environment"]
    names = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert names <= {"VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME"}, "vLLM names it, after the scheduler is made"


def test_guest_computes_the_same_as_a_dedicated_engine(
    server: Server, sidecar: ScriptedSidecar, standalone: Engine
) -> None:
    with traffic(server):
        made = run_guest(sidecar)
    assert made == run_standalone(standalone)


def test_turn_impossible_for_the_engine_is_refused(sidecar: ScriptedSidecar) -> None:
    sidecar.forget()
    sidecar.take("unknown token", [VOCABULARY + 1], Sampling(max_tokens=2))
    assert "vocabulary" in sidecar.wait_for_reports(TurnRejected)[0].reason


def test_version_is_staged_in_pieces_and_activated_between_two_steps(
    server: Server, alone: list[Answer], sidecar: ScriptedSidecar, standalone: Engine
) -> None:
    torch.manual_seed(5)
    version = {
        name: tensor + 0.05 * torch.randn_like(tensor)
        for name, tensor in load_file(MODEL / "model.safetensors").items()
    }
    layout = write_tensors(sidecar.end.channel.weight_buffers[1], version)
    before = run_guest(sidecar)
    sidecar.forget()
    with traffic(server) as answers:
        sidecar.send(StageWeights(1, 1, layout))
        sidecar.wait_for_reports(WeightsStaged)
        assert run_guest(sidecar) == before, "the old version serves on"
        sidecar.forget()
        sidecar.send(ActivateWeights(1))
        assert sidecar.wait_for_reports(WeightsActivated)[0].version == 1
        made = run_guest(sidecar, version=1)
    standalone.swap(1, version.items())
    assert made == run_standalone(standalone) != before
    assert same(answers, alone)


def test_idle_guest_sends_heartbeats_and_takes_no_time(server: Server, sidecar: ScriptedSidecar) -> None:
    assert sidecar.silent_for() < 1.0
    core, began = server.core, time.monotonic()
    before = core.cpu_times()
    time.sleep(MEASURED_SECONDS)
    after = core.cpu_times()
    used = (after.user + after.system - before.user - before.system) / (time.monotonic() - began)
    assert used < 0.2
    sidecar.forget()
    assert sidecar.silent_for() < 1.0


def test_restarted_sidecar_reconnects_to_its_guest(server: Server, sidecar: ScriptedSidecar) -> None:
    for number in range(20):
        sidecar.take(f"left {number}", PROMPTS[0], Sampling(max_tokens=200), 1)
    sidecar.end.close()
    other = ScriptedSidecar(server.config)
    sidecar.end, sidecar.commands, sidecar.reports, sidecar.received = (
        other.end,
        other.commands,
        other.reports,
        other.received,
    )
    assert sidecar.wait_for_reports(EngineStatus)[0].version == 1
    until(lambda: sidecar.wait_for_reports(EngineStatus)[-1].running == 0 or sidecar.forget() is not None)  # type: ignore[func-returns-value]
    first = run_guest(sidecar, version=1)
    assert first == run_guest(sidecar, version=1)
    assert server.log.read_text().count("guest_built") == 1


def test_failed_guest_is_dropped_reported_and_rebuilt(
    server: Server, alone: list[Answer], sidecar: ScriptedSidecar
) -> None:
    threads = server.core.num_threads()
    with traffic(server) as answers:
        for _ in range(3):
            sidecar.forget()
            sidecar.commands.write(b"\xc1 is no word")
            sidecar.end.channel.wake_engine()
            assert "DecodeError" in sidecar.wait_for_reports(EngineLost)[0].reason
            sidecar.forget()
            run_guest(sidecar)
    assert same(answers, alone)
    assert server.core.num_threads() <= threads + 1
    assert server.log.read_text().count("guest_dropped") == 3


def test_ten_wakes_and_parks_leak_no_thread_and_no_memory(server: Server, sidecar: ScriptedSidecar) -> None:
    core = server.core
    for _ in range(2):
        wake_and_park(sidecar)
    threads, memory = core.num_threads(), core.memory_info().rss
    for _ in range(10):
        wake_and_park(sidecar)
    grown = core.memory_info().rss - memory
    print(f"ten wakes and parks: {grown / 1024:.0f} KiB more", file=sys.__stderr__)
    assert core.num_threads() <= threads
    assert grown < 8 << 20, "less than one guest"


def test_turn_interrupted_by_a_park_returns_its_sampled_tokens(sidecar: ScriptedSidecar, standalone: Engine) -> None:
    """A rebuilt guest has the version of the folder."""
    standalone.swap(2, load_file(MODEL / "model.safetensors").items())
    sampling = Sampling(max_tokens=230, temperature=0.0)
    sidecar.send(Resume())
    sidecar.awake()
    sidecar.forget()
    sidecar.take("parked", PROMPTS[0], sampling)
    until(lambda: any(tick.steps > 5 for tick in sidecar.wait_for_reports(EngineStatus)))
    sidecar.send(Suspend())
    given = sidecar.done(1)["parked"]
    assert "told" in sidecar.parked()
    sampled = unpack_tokens(given.turn.sampled.tokens)
    assert given.turn.finish_reason == ABORTED and 0 < len(sampled) < 230
    assert run_alone(standalone, PROMPTS[0], sampling)[: len(sampled)] == sampled


def run_alone(engine: Engine, context: list[int], sampling: Sampling) -> list[int]:
    engine.add("alone", context, sampling, policy_version=engine.version)
    finished = []
    while len(engine):
        finished += engine.step().finished
    return unpack_tokens(finished[0].sampled.tokens)


def test_never_idle_server_reports_that_and_returns_aborted_turns(
    server: Server, alone: list[Answer], sidecar: ScriptedSidecar
) -> None:
    sidecar.send(Resume())
    sidecar.awake()
    with ExitStack() as clients:
        answers = [clients.enter_context(traffic(server, 0.0)) for _ in range(4)]
        until(lambda: all(answers))
        sidecar.forget()
        for number in range(8):
            sidecar.take(f"held {number}", PROMPTS[0], Sampling(max_tokens=240))
        began = time.monotonic()
        sidecar.send(AbortTurn("held 3"))
        assert "held 3" in {done.turn.name for done in sidecar.wait_for_reports(TurnFinished)}
        sidecar.send(Suspend())
        assert {f"held {number}" for number in range(8)} == set(sidecar.done(8))
        assert sidecar.parked()
        assert time.monotonic() - began < 5.0, "a second, on a machine with nothing else to do"
        print(
            f"held {max(tick.blocked_seconds for tick in sidecar.wait_for_reports(EngineStatus)):.2f} s",
            file=sys.__stderr__,
        )
    assert all(same(each, alone) for each in answers)
    sidecar.send(Resume())
    sidecar.awake()


def test_server_log_has_no_error_of_the_server(server: Server, sidecar: ScriptedSidecar) -> None:
    errors = [line for line in server.log.read_text().splitlines() if "ERROR" in line or "Traceback" in line]
    assert all("guest_dropped" in line for line in errors), errors


def test_guest_with_turns_does_not_delay_a_server_exit(server: Server, sidecar: ScriptedSidecar) -> None:
    """The last test. vLLM's own exit and its log lines vary with and without a guest."""
    for number in range(8):
        sidecar.take(f"last {number}", PROMPTS[0], Sampling(max_tokens=200))
    core = server.core
    server.process.terminate()
    server.process.wait(WAIT_SECONDS)
    psutil.wait_procs([core], timeout=WAIT_SECONDS)
    assert not core.is_running()
    until(lambda: sidecar.ended)
