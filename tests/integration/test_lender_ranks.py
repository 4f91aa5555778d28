"""A guest in a real tensor-parallel vLLM server: a shard on each rank, and one loop that drives them.

All tests share one server of two ranks and run in file order.
"""

import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rose.schemas.arrays import unpack_logprobs
from rose.workers.executor.ipc.engine_client import write_tensors
from rose.workers.executor.ipc.messages import (
    ActivateWeights,
    EngineLost,
    EngineStatus,
    Resume,
    StageWeights,
    WeightsActivated,
    WeightsRejected,
    WeightsStaged,
)
from rose.workers.executor.vllm.engine import Engine
from rose.workers.lender.vllm.guest_build import build_engine
from rose.workers.weights.layout import VOCABULARY_PADDING, ShardRank, shard_of
from tests.support.guest_runs import PROMPTS, TURNS, run_guest, run_standalone, same, traffic, wake_and_park
from tests.support.lender_server_fixtures import MODEL, ON_RANKS, RANKS, Answer, ScriptedSidecar, Server, lending_server

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(1800)]

CLOSE = 1e-4
"""Tolerance of two float32 logprobs with sums in different orders."""

Made = list[tuple[bytes, bytes]]
"""Tokens and logprobs of TURNS."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with lending_server(tmp_path_factory.mktemp("ranks"), *ON_RANKS, dtype="float32") as running:
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
def one_rank(server: Server) -> Iterator[Engine]:
    """The guest's policy in an engine on one rank."""
    engine = build_engine(server.config)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def version() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return {
        name: tensor + 0.05 * torch.randn_like(tensor)
        for name, tensor in load_file(MODEL / "model.safetensors").items()
    }


def assert_close(made: Made, expected: Made) -> None:
    """Assert equal tokens, and logprobs within the tolerance."""
    assert [tokens for tokens, _ in made] == [tokens for tokens, _ in expected]
    off = max(
        float(np.abs(unpack_logprobs(mine) - unpack_logprobs(theirs)).max())
        for (_, mine), (_, theirs) in zip(made, expected, strict=True)
    )
    print(f"logprobs are off by {off:.1e}", file=sys.__stderr__)
    assert off < CLOSE


def fault(server: Server, kind: str) -> Path:
    file = server.log.parent / "fault"
    file.write_text(kind)
    return file


def test_serving_output_is_unchanged_while_a_guest_is_built_and_runs_on_its_ranks(
    server: Server, alone: list[Answer], sidecar: ScriptedSidecar, one_rank: Engine
) -> None:
    with traffic(server) as answers:
        made = run_guest(sidecar)
        built = len(answers)
        run_guest(sidecar)
    assert len(answers) > built > 0 and same(answers, alone)
    assert_close(made, run_standalone(one_rank))


def test_each_rank_holds_its_shard_of_the_guest(server: Server, sidecar: ScriptedSidecar, one_rank: Engine) -> None:
    counts = re.findall(r"guest_parameters_loaded rank_parameters=([\d,]+)", server.log.read_text())
    held = [int(count) for count in counts[-1].split(",")]
    config = json.loads((MODEL / "config.json").read_text())
    layers = config["num_hidden_layers"]
    for number, count in enumerate(held):
        rank = ShardRank(
            tensor_parallel_rank=number,
            tensor_parallel_size=RANKS,
            layers=range(layers),
            all_layers=layers,
            key_value_heads=config["num_key_value_heads"],
        )
        share = sum(box.elements for box in shard_of(rank, one_rank.shapes).values())
        padding = 2 * VOCABULARY_PADDING * config["hidden_size"]
        assert share <= count < share + padding < sum(map(math.prod, one_rank.shapes.values()))
    tick = sidecar.wait_for_reports(EngineStatus)[-1]
    assert tick.kv_bytes_per_token == one_rank.load().kv_bytes_per_token, "of all ranks together"


def test_version_is_activated_on_no_rank_before_all_have_staged_it(
    server: Server, alone: list[Answer], sidecar: ScriptedSidecar, one_rank: Engine, version: dict[str, torch.Tensor]
) -> None:
    layout = write_tensors(sidecar.end.channel.weight_buffers[1], version)
    old = run_standalone(one_rank)
    with traffic(server) as answers:
        failing = fault(server, "prepare")
        sidecar.forget()
        sidecar.send(StageWeights(1, 1, layout))
        assert "rank 1: it could not be prepared" in sidecar.wait_for_reports(WeightsRejected)[0].reason
        assert_close(run_guest(sidecar), old)
        failing.unlink()

        sidecar.forget()
        sidecar.send(StageWeights(2, 1, layout))
        sidecar.wait_for_reports(WeightsStaged)
        assert_close(run_guest(sidecar), old)
        sidecar.forget()
        sidecar.send(ActivateWeights(2))
        assert sidecar.wait_for_reports(WeightsActivated)[0].version == 2
        made = run_guest(sidecar, version=2)
    one_rank.swap(2, version.items())
    new = run_standalone(one_rank)
    assert_close(made, new)
    assert new != old
    assert same(answers, alone)


def test_turn_over_a_swap_continues_under_the_new_version_on_every_rank(
    sidecar: ScriptedSidecar, one_rank: Engine, version: dict[str, torch.Tensor]
) -> None:
    layout = write_tensors(sidecar.end.channel.weight_buffers[0], load_file(MODEL / "model.safetensors"))
    sidecar.forget()
    context, sampling = PROMPTS[5], TURNS[1][1]
    long = type(sampling)(max_tokens=200, temperature=0.0)
    sidecar.take("overtaken", context, long, 2)
    sidecar.send(StageWeights(3, 0, layout))
    sidecar.wait_for_reports(WeightsStaged)
    sidecar.send(ActivateWeights(3))
    done = sidecar.done(1)["overtaken"]
    assert [span.version for span in done.turn.sampled.spans] == [2, 3] and done.turn.sampled.spans[-1].end == 200
    assert np.isfinite(unpack_logprobs(done.turn.sampled.logprobs)).all()


def test_rank_failure_within_a_step_is_reported_and_the_guest_dropped_on_all(
    server: Server, alone: list[Answer], sidecar: ScriptedSidecar, one_rank: Engine
) -> None:
    sidecar.awake()  # the thread of the guest build is not a leaked thread
    threads = [worker.num_threads() for worker in server.workers]
    one_rank.swap(4, load_file(MODEL / "model.safetensors").items())
    with traffic(server) as answers:
        for _ in range(2):
            sidecar.awake()
            version = sidecar.wait_for_reports(EngineStatus)[-1].version
            sidecar.forget()
            failing = fault(server, "step")
            sidecar.take("fails", *TURNS[1], version)
            reason = sidecar.wait_for_reports(EngineLost)[0].reason
            assert "rank 1: RuntimeError: RuntimeError: a fault amid a step" in reason
            assert "rank 0: RuntimeError" in reason, "it does not wait for a rank that has left"
            failing.unlink()
            sidecar.forget()
            assert_close(run_guest(sidecar), run_standalone(one_rank))
    assert same(answers, alone)
    assert [worker.num_threads() for worker in server.workers] == threads


def held_bytes(process: int) -> int:
    """Return the private memory of a process. Library pages vary with the free memory of the machine."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return 1024 * sum(int(fields[name].split()[0]) for name in ("RssAnon", "VmSwap"))


def test_ten_wakes_and_parks_leak_no_thread_and_no_memory_in_a_rank(server: Server, sidecar: ScriptedSidecar) -> None:
    """The allocator's arenas have reached their size after a few wakes."""
    workers = server.workers
    for _ in range(8):
        wake_and_park(sidecar)
    threads, memory = [each.num_threads() for each in workers], [held_bytes(each.pid) for each in workers]
    for _ in range(10):
        wake_and_park(sidecar)
    grown = max(held_bytes(each.pid) - before for each, before in zip(workers, memory, strict=True))
    print(f"ten wakes and parks: {grown / 1024:.0f} KiB more in a rank", file=sys.__stderr__)
    assert [each.num_threads() for each in workers] == threads
    assert grown < 4 << 20, "less than one guest"
    sidecar.send(Resume())
    sidecar.awake()


def test_guest_of_ranks_has_a_view_of_serving_cache(server: Server) -> None:
    built = [line for line in server.log.read_text().splitlines() if "guest_built" in line]
    assert built and all("kv_cache=shared block_tokens=32" in line for line in built)


def test_guest_is_invisible_to_serving_in_its_workers(server: Server, sidecar: ScriptedSidecar) -> None:
    """The notes cover the first to the last serving step, with builds, steps, swaps and faults of the guest between."""
    for number in range(RANKS):
        lines = Path(f"{server.notes}.{number}").read_text().splitlines()
        _, first, *notes = map(json.loads, lines)  # in its first step torch sets an address in the environment
        assert first["changed"].keys() <= {"environment"}
        assert any(note["building"] for note in notes), "no step of serving fell into the building of the guest"
        assert [note["changed"] for note in notes if note["changed"]] == []


def test_guest_does_not_rebind_the_memory_of_a_rank(server: Server, sidecar: ScriptedSidecar) -> None:
    """Linux waits there for a thread on each CPU: a guest build took up to two minutes beside spinning ranks."""
    bound = server.log.read_text().count("NUMA binding")
    if not bound:
        pytest.skip("serving binds no memory on this machine, so a guest that did would not be seen")
    assert bound == RANKS


def test_server_log_has_no_error_of_the_server(server: Server, sidecar: ScriptedSidecar) -> None:
    errors = [line for line in server.log.read_text().splitlines() if "ERROR" in line or "Traceback" in line]
    assert all("guest_dropped" in line for line in errors), errors
