"""Engines with plain weights, as on a GPU: versions written in place against the same versions loaded by vLLM."""

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rose.workers.executor.ipc.engine_client import StagedTensors, write_tensors
from rose.workers.executor.vllm import in_place_weights, ranks, weights
from rose.workers.executor.vllm.engine import Engine
from rose.workers.executor.vllm.engine_core import in_process_worker
from rose.workers.executor.vllm.in_place_weights import InPlaceWeights
from rose.workers.executor.vllm.ranks import RanksBackend
from rose.workers.executor.vllm.types import SwapRefused
from rose.workers.weights.folder_names import FolderTensors
from tests.support.engine_fixtures import (
    MAX_RUNNING,
    TOLERANCE,
    EngineFixture,
    contexts_of,
    folder_config,
    sampled_logprobs,
    tokens_of,
)
from tests.support.model_families import CONTEXT, run_turns, tiny_policy, train
from tests.support.policy_folders import logprobs_of, new_policy, save_policy, tensors_of
from tests.support.unpacked_engines import FAULT, failing_write, unpacked_layers

pytestmark = pytest.mark.slow

RANKS = 2


class PlainEngine(EngineFixture):
    """An engine with plain weights in this process."""

    @property
    def parameters(self) -> list[Tensor]:
        model = in_process_worker(self.engine._core).get_model()
        return [parameter.data for parameter in model.parameters()]

    @property
    def writer(self) -> InPlaceWeights:
        writer: Any = self.engine._weights
        assert isinstance(writer._writer, InPlaceWeights)
        return writer._writer


def started(folder: Path, model: Any, tied: bool, dtype: str) -> PlainEngine:
    with unpacked_layers():
        config = folder_config(save_policy(folder, model), policy_version=0, dtype=dtype)
        return PlainEngine(Engine(config), model, tied)


@pytest.fixture(
    scope="module",
    params=[(True, "float32"), (False, "bfloat16")],
    ids=["tied head, float32", "own head, bfloat16"],
)
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainEngine]:
    tied, dtype = request.param
    model = new_policy(0, tied=tied).to(getattr(torch, dtype))
    engine_fixture = started(tmp_path_factory.mktemp("policy"), model, tied, dtype)
    engine_fixture.engine.allocate_spare()
    with closing(engine_fixture.engine):
        yield engine_fixture


def sparse_change(model: Any, seed: int, share: float) -> dict[str, Tensor]:
    """Return the model's tensors with about this share of the elements changed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(torch.rand(tensor.shape, generator=generator) < share, tensor * 1.25 + 0.01, tensor)
        for name, tensor in tensors_of(model).items()
    }


def put_into(model: Any, version: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(version[name])


def logprobs_by_turn(engine_fixture: EngineFixture) -> dict[str, tuple[list[int], list[float]]]:
    rng = random.Random(5)
    for number in range(MAX_RUNNING):
        engine_fixture.add(str(number), contexts_of(rng, rng.randint(1, 150)), max_tokens=20, seed=number)
    return {name: (tokens_of(turn), sampled_logprobs(turn).tolist()) for name, turn in engine_fixture.drain().items()}


@pytest.mark.parametrize("share", [0.02, 1.0], ids=["few changes, staged", "all changes, mostly from the host"])
def test_version_in_place_computes_what_a_freshly_loaded_version_computes(
    plain: PlainEngine, share: float, tmp_path: Path
) -> None:
    version = sparse_change(plain.model, 1, share)
    for _ in plain.engine.stage(version.items()):
        pass
    found, size = plain.writer.staged_bytes, sum(parameter.nbytes for parameter in plain.parameters)
    assert found.staged <= size // in_place_weights.MEMORY_PART
    assert (found.left == 0) == (share < 1)
    assert found.written + found.left < 1.5 * share * size + 4000
    plain.engine.activate(plain.engine.version + 1)
    put_into(plain.model, version)
    computed = logprobs_by_turn(plain)
    dtype = str(plain.parameters[0].dtype).removeprefix("torch.")
    fresh = started(tmp_path, plain.model, plain.tied, dtype)
    with closing(fresh.engine):
        assert all(map(torch.equal, plain.parameters, fresh.parameters))
        assert logprobs_by_turn(fresh) == computed


def test_storage_of_parameters_is_the_same_after_50_swaps(plain: PlainEngine) -> None:
    addresses = [parameter.data_ptr() for parameter in plain.parameters]
    for number in range(50):
        version = sparse_change(plain.model, number, 0.3 if number % 10 == 0 else 0.01)
        plain.engine.swap(plain.engine.version + 1, version.items())
        put_into(plain.model, version)
    assert [parameter.data_ptr() for parameter in plain.parameters] == addresses
    if plain.parameters[0].dtype == torch.float32:
        assert plain.check(3) < TOLERANCE


@pytest.mark.parametrize("share", [0.02, 1.0], ids=["few changes", "all changes"])
def test_write_that_fails_half_way_leaves_the_old_version_bit_for_bit(plain: PlainEngine, share: float) -> None:
    before, version = [parameter.clone() for parameter in plain.parameters], plain.engine.version
    for _ in plain.engine.stage(sparse_change(plain.model, 7, share).items()):
        pass
    with failing_write(30), pytest.raises(SwapRefused, match="a write has failed"):
        plain.engine.activate(version + 1)
    assert plain.engine.version == version
    assert all(map(torch.equal, plain.parameters, before))
    later = sparse_change(plain.model, 8, 0.02)
    plain.engine.swap(version + 1, later.items())
    put_into(plain.model, later)
    assert not all(map(torch.equal, plain.parameters, before))


def test_failed_first_version_leaves_the_weights_of_the_folder(tmp_path: Path) -> None:
    first = started(tmp_path, new_policy(0, tied=False), False, "float32")
    with closing(first.engine):
        before = [parameter.clone() for parameter in first.parameters]
        for _ in first.engine.stage(tensors_of(new_policy(1, tied=False)).items()):
            pass
        with failing_write(15), pytest.raises(SwapRefused):
            first.engine.activate(1)
        assert all(map(torch.equal, first.parameters, before))
        assert first.check(1) < TOLERANCE


def test_ranks_write_their_shards_in_place_and_all_or_none_serve_a_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "WORKER_CLASS", "tests.support.unpacked_engines.UnpackedRank")
    fault = tmp_path / "fault"
    monkeypatch.setenv(FAULT, str(fault))
    model = new_policy(0, tied=True)
    folder = save_policy(tmp_path / "policy", model)
    buffers = [os.memfd_create("test") for _ in range(2)]  # one for the serving version
    try:
        with closing(Engine(folder_config(folder, policy_version=0), RanksBackend(RANKS))) as engine:
            both = EngineFixture(engine, model, True)
            engine.allocate_spare()
            for share, buffer in zip((0.02, 1.0), buffers, strict=True):
                version = sparse_change(model, 1, share)
                staged = StagedTensors(buffer, write_tensors(buffer, version))
                fault.touch()
                with pytest.raises(SwapRefused, match=r"^rank 1: it could not be applied: a write has failed"):
                    engine.swap(engine.version + 1, staged)
                fault.unlink()
                assert both.check(1) < TOLERANCE
                engine.swap(engine.version + 1, staged)
                put_into(model, version)
                assert both.check(2) < TOLERANCE
    finally:
        for buffer in buffers:
            os.close(buffer)


@pytest.mark.parametrize("kind", ["gemma", "gpt2", "gpt_neox", "phi3"])
def test_family_whose_loader_transposes_permutes_or_fuses_takes_a_version_in_place(kind: str, tmp_path: Path) -> None:
    assert difference_after_a_version(kind, tmp_path) < TOLERANCE


def test_model_of_layers_that_vllm_may_transform_takes_a_version_by_a_reload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "WRITABLE_METHODS", ())  # plain layers, which a reload does not change
    monkeypatch.setattr(weights, "InPlaceWeights", None)
    assert difference_after_a_version("qwen3", tmp_path) < TOLERANCE


def difference_after_a_version(kind: str, folder: Path) -> float:
    """Return the largest difference to the logprobs of transformers after a version that changes all weights."""
    model = tiny_policy(kind, folder)
    train(model)
    version = {name: tensor.detach().clone() for name, tensor in FolderTensors(model, folder)}
    with unpacked_layers():
        _, (tokens, logprobs) = run_turns(folder, version)
    return float((logprobs_of(model, CONTEXT, tokens) - torch.tensor(logprobs)).abs().max())
