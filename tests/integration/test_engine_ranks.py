"""An engine on two ranks: vLLM starts a process for each rank, and the engine's process drives the ranks."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from rose.workers.executor.ipc.engine_client import StagedTensors, write_tensors
from rose.workers.executor.vllm.engine import Engine
from rose.workers.executor.vllm.ranks import RanksBackend
from rose.workers.executor.vllm.types import EngineStartError, SwapRefused
from tests.support.engine_fixtures import TOLERANCE, EngineFixture, contexts_of, folder_config, tokens_of
from tests.support.model_families import tiny_policy
from tests.support.policy_folders import new_policy, save_policy, tensors_of
from tests.support.waiting import until

pytestmark = pytest.mark.slow

RANKS = 2

OF_RANKS = "vllm", "psm"
"""Beginnings of the names of shared memory that vLLM makes for ranks."""

PROGRAM = """
import sys
import tempfile
from pathlib import Path
from threading import Event

from rose.schemas.arrays import pack_tokens
from rose.schemas.errors import RoseError
from rose.schemas.prompts import Sampling
from rose.workers.executor.config import ExecutorConfig
from rose.workers.executor.engine_process import EngineProcess
from rose.workers.executor.ipc.messages import SubmitTurn
from rose.workers.executor.vllm import ranks
from tests.support.failing_rank import FAULT

if __name__ == "__main__":
    what = sys.argv[2]
    if what == "fault":
        ranks.WORKER_CLASS = "tests.support.failing_rank.FailingRank"
    config = ExecutorConfig(model_folder=Path(sys.argv[1]), vllm={"tensor_parallel_size": 2})
    with EngineProcess(config) as engine:
        print(engine.pid, flush=True)
        if what == "stop":
            sys.stdin.read()
            sys.exit()
        try:
            engine.client.wait_until_ready(Event())
            print("ready", flush=True)
            if what == "fault":
                (folder,) = Path(tempfile.gettempdir()).glob("rose-engine-*")
                (folder / FAULT).touch()
                engine.client.send(SubmitTurn("turn", pack_tokens([1, 2, 3]), Sampling(max_tokens=5), -1))
            while True:
                list(engine.client.reports())
                engine.client.wait(60.0)
        except RoseError as error:
            print(type(error).__name__, error, flush=True)
"""


@contextmanager
def running_program(folder: Path, what: str) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """Start an engine process with two ranks. At the end nothing of the program is left."""
    temporary = Path(tempfile.mkdtemp())  # a short path: vLLM has sockets there
    environment = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", PROGRAM, str(folder), what]
    shared = set(Path("/dev/shm").iterdir())
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as program:
        assert program.stdout is not None
        engine = psutil.Process(int(program.stdout.readline()))
        yield program, engine
        assert program.wait(timeout=60) == 0
    until(lambda: not [file for file in set(Path("/dev/shm").iterdir()) - shared if file.name.startswith(OF_RANKS)])
    temporary.rmdir()  # nothing is left in the folder


def ranks_of(engine: psutil.Process) -> list[psutil.Process]:
    """Return the processes of the ranks, which have loaded their modules."""
    return [process for process in engine.children() if "Worker" in process.name()]


@pytest.fixture(scope="module", params=[True, False], ids=["tied head", "own head"])
def two_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineFixture]:
    model = new_policy(0, tied=request.param)
    folder = save_policy(tmp_path_factory.mktemp("policy"), model)
    with closing(Engine(folder_config(folder, policy_version=0), RanksBackend(RANKS))) as engine:
        yield EngineFixture(engine, model, request.param)


@pytest.fixture
def weight_buffer() -> Iterator[int]:
    buffer = os.memfd_create("test")
    yield buffer
    os.close(buffer)


def test_ranks_compute_the_logprobs_of_transformers_before_and_after_swaps(
    two_ranks: EngineFixture, weight_buffer: int
) -> None:
    engine = two_ranks.engine
    assert engine.devices == RANKS
    assert two_ranks.check(seed=1) < TOLERANCE
    for seed in (1, 2):
        two_ranks.model = new_policy(seed, tied=two_ranks.tied)
        tensors = tensors_of(two_ranks.model)
        engine.swap(engine.version + 1, StagedTensors(weight_buffer, write_tensors(weight_buffer, tensors)))
        assert two_ranks.check(seed=2) < TOLERANCE


def test_seeded_turn_samples_the_tokens_of_an_engine_on_one_rank(two_ranks: EngineFixture, tmp_path: Path) -> None:
    context = contexts_of(random.Random(1), 40)
    folder = save_policy(tmp_path, two_ranks.model)
    with closing(Engine(folder_config(folder, policy_version=0))) as alone:
        one = EngineFixture(alone, two_ranks.model, two_ranks.tied)
        expected = tokens_of(one.run(context, max_tokens=30, seed=7))
    assert tokens_of(two_ranks.run(context, max_tokens=30, seed=7)) == expected


def test_version_that_is_not_whole_or_not_finite_leaves_the_old_version(
    two_ranks: EngineFixture, weight_buffer: int
) -> None:
    engine, version = two_ranks.engine, two_ranks.engine.version
    tensors = tensors_of(new_policy(9, tied=two_ranks.tied))
    whole = dict(tensors)
    tensors.pop("model.norm.weight")
    with pytest.raises(SwapRefused, match=r"model\.norm\.weight"):
        engine.swap(version + 1, StagedTensors(weight_buffer, write_tensors(weight_buffer, tensors)))
    whole["model.norm.weight"] = torch.full_like(whole["model.norm.weight"], torch.nan)
    with pytest.raises(SwapRefused, match="not finite"):
        engine.swap(version + 1, StagedTensors(weight_buffer, write_tensors(weight_buffer, whole)))
    assert engine.version == version
    assert two_ranks.check(seed=3) < TOLERANCE


def test_number_of_ranks_that_does_not_divide_the_heads_is_refused_in_one_sentence(tmp_path: Path) -> None:
    folder = save_policy(tmp_path, new_policy(0, tied=True))
    with pytest.raises(EngineStartError, match=r"4.*3|attention heads"):
        Engine(folder_config(folder), RanksBackend(3))


@pytest.mark.parametrize("ended", ["a rank", "the engine's process, with a rank that is stopped"])
def test_no_process_outlives_the_end_of_another(tmp_path: Path, ended: str) -> None:
    folder = save_policy(tmp_path / "policy", new_policy(0, tied=True))
    with running_program(folder, "wait") as (program, engine):
        assert program.stdout is not None and program.stdout.readline() == "ready\n"
        processes, ranks = engine.children(recursive=True), ranks_of(engine)
        assert len(ranks) == RANKS
        if ended == "a rank":
            ranks[1].send_signal(signal.SIGKILL)
            said = "EngineBroken the engine's process has ended: rank 1: its process has ended with status -9\n"
        else:
            ranks[1].send_signal(signal.SIGSTOP)
            engine.send_signal(signal.SIGKILL)
            said = "EngineBroken the engine's process has ended"
        assert program.stdout.read().startswith(said)
        _, left = psutil.wait_procs([engine, *processes], timeout=60)
        assert not left


def test_no_rank_outlives_an_engine_process_that_is_stopped_as_it_starts(tmp_path: Path) -> None:
    folder = save_policy(tmp_path / "policy", new_policy(0, tied=True))
    with running_program(folder, "stop") as (program, engine):
        until(lambda: len(engine.children()) > RANKS)  # and Python's resource tracker
        processes = engine.children()
        assert program.stdin is not None
        program.stdin.close()
        _, left = psutil.wait_procs([engine, *processes], timeout=60)
        assert not left


def test_error_of_rank_1_in_a_step_ends_the_engine_with_the_reason(tmp_path: Path) -> None:
    """vLLM reads the answer of rank 0 only: without an end, rank 1 would sample other tokens from then on."""
    folder = save_policy(tmp_path / "policy", new_policy(0, tied=True))
    with running_program(folder, "fault") as (program, _):
        assert program.stdout is not None and program.stdout.readline() == "ready\n"
        assert program.stdout.read() == (
            "EngineBroken the engine's process has ended: rank 1: MemoryError: no room for the logits\n"
        )


def test_folder_that_ranks_cannot_load_is_refused_with_the_reason(tmp_path: Path) -> None:
    folder = save_policy(tmp_path / "policy", new_policy(0, tied=True))
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.layers.0.mlp.extra_proj.weight": torch.ones(4, 4)}, folder / "model.safetensors")
    with running_program(folder, "wait") as (program, _):
        assert program.stdout is not None
        said = program.stdout.read()
        assert said.startswith("EngineStartError") and "extra_proj" in said and said.count("\n") == 1


def test_tensor_that_ranks_read_in_part_is_refused(tmp_path: Path) -> None:
    folder = save_policy(tmp_path, new_policy(0, tied=True))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    engine = Engine(folder_config(folder), RanksBackend(RANKS))
    with closing(engine), pytest.raises(EngineStartError, match=r"vLLM reads only a part of model\.layers\.0\.mlp"):
        engine.allocate_spare()


def test_model_that_no_plan_divides_is_refused(tmp_path: Path) -> None:
    tiny_policy("persimmon", tmp_path)
    with pytest.raises(EngineStartError, match="no plan that divides persimmon over ranks"):
        Engine(folder_config(tmp_path), RanksBackend(RANKS))


def test_share_of_the_memory_of_a_cpu_is_refused_for_ranks(tmp_path: Path) -> None:
    folder = save_policy(tmp_path, new_policy(0, tied=True))
    config = folder_config(folder, kv_cache_bytes=None, vllm_arguments={"gpu_memory_utilization": 0.1})
    with pytest.raises(EngineStartError, match="each rank would take gpu_memory_utilization"):
        Engine(config, RanksBackend(RANKS))
