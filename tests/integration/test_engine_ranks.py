"""An engine on two ranks: vLLM starts a process for each rank, and the engine's process drives the ranks."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch

from rose.workers.executor.ipc.engine_client import StagedTensors, write_tensors
from rose.workers.executor.vllm.engine import Engine
from rose.workers.executor.vllm.ranks import RanksBackend
from rose.workers.executor.vllm.types import EngineStartError, SwapRefused
from tests.support.engine_fixtures import TOLERANCE, EngineFixture, contexts_of, folder_config, tokens_of
from tests.support.policy_folders import new_policy, save_policy, tensors_of

pytestmark = pytest.mark.slow

RANKS = 2

WAIT_FOR_THE_END = """
import sys
from pathlib import Path
from threading import Event

from rose.schemas.errors import RoseError
from rose.workers.executor.config import ExecutorConfig
from rose.workers.executor.engine_process import EngineProcess

if __name__ == "__main__":
    config = ExecutorConfig(model_folder=Path(sys.argv[1]), vllm={"tensor_parallel_size": 2})
    with EngineProcess(config) as engine:
        engine.client.wait_until_ready(Event())
        print(engine.pid, flush=True)
        try:
            while True:
                list(engine.client.reports())
                engine.client.wait(60.0)
        except RoseError as error:
            print(error, flush=True)
"""


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
    folder = save_policy(tmp_path, new_policy(0, tied=True))
    command = [sys.executable, "-c", WAIT_FOR_THE_END, str(folder)]
    shared = set(Path("/dev/shm").glob("vllm*"))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        engine = psutil.Process(int(parent.stdout.readline()))
        processes = engine.children(recursive=True)
        ranks = [process for process in processes if "Worker" in process.name()]
        assert len(ranks) == RANKS
        if ended == "a rank":
            ranks[1].send_signal(signal.SIGKILL)
        else:
            ranks[1].send_signal(signal.SIGSTOP)
            engine.send_signal(signal.SIGKILL)
        assert "the engine's process has ended" in parent.stdout.read()
        assert parent.wait(timeout=60) == 0
    _, left = psutil.wait_procs([engine, *processes], timeout=60)
    assert not left
    assert set(Path("/dev/shm").glob("vllm*")) <= shared
