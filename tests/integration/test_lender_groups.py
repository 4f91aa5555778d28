"""Two real engines over one KV memory, where serving's layers form several groups: with a window and without."""

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from rose.schemas.prompts import Sampling
from rose.workers.executor.vllm.engine import Engine
from rose.workers.executor.vllm.engine_core import in_process_worker
from rose.workers.executor.vllm.types import EngineConfig, FinishedTurn
from rose.workers.lender.config import LendConfig, MemoryConfig
from rose.workers.lender.vllm.kv_sharing import KvSharing, ServingMemory
from tests.integration.test_lender_sharing import (
    ServingWithGuest,
    block_bytes_of,
    guest_of,
    kv_cache,
    prompt,
    zero_no_blocks,
)
from tests.support.engine_fixtures import sampled_logprobs, tokens_of
from tests.support.host_models import windowed_model
from tests.support.lender_server_fixtures import MODEL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOTAL, GUEST_BYTES = 8 << 20, 6 << 20
TURNS = 12


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingWithGuest]:
    folder = tmp_path_factory.mktemp("window")
    windowed_model(folder)
    sizes: dict[str, Any] = {"max_model_len": 512, "max_running": 64, "kv_cache_bytes": TOTAL, "step_tokens": 32_768}
    config = LendConfig(
        model_folder=str(MODEL),
        socket="",
        dtype="bfloat16",
        max_turns=TURNS,
        max_model_len=512,
        kv_cache_bytes=GUEST_BYTES,
        step_tokens=1024,
        memory=MemoryConfig(quiet_seconds=3600.0),
    )
    with closing(Engine(EngineConfig(model_folder=folder, **sizes))) as serving:
        assert len(serving.cache.groups) == 2
        zero_no_blocks(serving)
        memory = ServingMemory(serving._core)
        guest, pool = guest_of(memory, config)
        yield ServingWithGuest(serving, guest, memory, KvSharing(memory, guest, pool, config, shared=True))
        guest.close()


@pytest.fixture(scope="module")
def alone(pair: ServingWithGuest) -> dict[str, list[int]]:
    """Tokens of serving's answers before any block was lent."""
    return answers_of(pair, lambda: pair.serving.step().finished)


def answers_of(pair: ServingWithGuest, passes: Callable[[], list[FinishedTurn]]) -> dict[str, list[int]]:
    """Return what serving samples for greedy and seeded requests that arrive at once. `passes` runs serving's loop."""
    for number in range(7):
        for seed in (None, 3):
            sampling = Sampling(max_tokens=64, temperature=0.0 if seed is None else 1.0, seed=seed)
            pair.serving.add(f"{number} {seed}", prompt(number, 150), sampling, policy_version=-1)
    found = {}
    while len(pair.serving):
        for finished in passes():
            assert np.isfinite(sampled_logprobs(finished)).all()
            found[finished.name] = tokens_of(finished)
    return found


def fill(pair: ServingWithGuest) -> None:
    """Let the guest's turns fill most of its memory."""
    for number in range(TURNS):
        context = prompt(1000 + number, 64)
        pair.guest.add(f"turn {number}", context, Sampling(max_tokens=400, seed=1), policy_version=-1)
    pair.passes(250)
    assert len(pair.guest) == TURNS


def test_guest_block_lies_within_serving_block_of_every_group(
    pair: ServingWithGuest, alone: dict[str, list[int]]
) -> None:
    pair.look(grow=True)
    cache, lent = kv_cache(pair.serving), pair.memory.pool.withheld
    layers = in_process_worker(pair.guest._core).model_runner.kv_caches
    for number in (lent[0], lent[-1]):
        before = cache.clone()
        for layer in layers:
            layer[number] = 1.0
        changed = cache != before
        assert changed.any() and not changed[~block_bytes_of(pair.memory, number)].any()


def test_serving_computes_as_alone_in_blocks_that_a_guest_had(
    pair: ServingWithGuest, alone: dict[str, list[int]]
) -> None:
    """The turns are cut while serving runs. The guest leaves NaN in every block that it had."""
    assert pair.serving._core.reset_prefix_cache()
    fill(pair)
    budget, lent = pair.budget, torch.tensor(pair.memory.pool.withheld)
    for layer in in_process_worker(pair.guest._core).model_runner.kv_caches:
        layer[lent] = float("nan")
    assert answers_of(pair, pair.passes) == alone
    assert pair.budget < budget and pair.frozen and pair.finished_turns


def test_end_of_a_guest_leaves_all_blocks_to_serving(pair: ServingWithGuest) -> None:
    pair.sharing.close()
    assert pair.memory.pool.available == pair.memory.pool.free == pair.memory.pool.blocks
    assert pair.serving._scheduler.get_kv_cache_usage() == 0.0
