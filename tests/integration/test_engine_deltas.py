"""An engine that applies deltas computes with the trainer's weights, proven by logprobs of transformers."""

import random
from pathlib import Path

import pytest
import torch

from rose.workers.executor.vllm.engine import Engine
from rose.workers.weights.assembly import Assembly
from rose.workers.weights.checks import check_manifest
from tests.support.engine_fixtures import TOLERANCE, EngineFixture, folder_config
from tests.support.policy_folders import VOCABULARY, new_policy, save_policy, tensors_of
from tests.support.weights_fixtures import MemoryChunkSink, Tensors

UPDATES = 20


def wire_of(model: torch.nn.Module) -> Tensors:
    """Return the trainer's weights in their wire type."""
    return {name: tensor.detach().bfloat16() for name, tensor in tensors_of(model).items()}


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_logprobs_after_twenty_chained_sparse_updates_are_those_of_transformers(tmp_path: Path, tied: bool) -> None:
    """float32 master weights under AdamW with real gradients, bfloat16 on the wire, float32 in the engine."""
    master = new_policy(1, tied=tied)
    optimizer = torch.optim.AdamW(master.parameters(), lr=1e-5, weight_decay=0.0)
    folder = save_policy(tmp_path / "policy", master)
    engine_fixture = EngineFixture(Engine(folder_config(folder, policy_version=0)), master, tied)
    try:
        sink, tokens = MemoryChunkSink(), random.Random(7)
        sent = wire_of(master)
        shapes = {name: tuple(tensor.shape) for name, tensor in sent.items()}
        anchor = sink.store(sent, 1, chunk_bytes=100_000)
        assembly = Assembly(None, None)
        assembly.add(anchor, sink.fetch)
        engine_fixture.engine.swap(1, assembly.done.tensors.items())
        for version in range(2, 2 + UPDATES):
            batch = torch.tensor([[tokens.randrange(VOCABULARY) for _ in range(32)] for _ in range(4)])
            master(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            wire = wire_of(master)
            delta = sink.store(wire, version, base=sent, base_version=version - 1, chunk_bytes=100_000)
            assert delta.payload_bytes < anchor.payload_bytes / 4
            check_manifest(delta, shapes)
            assembly = Assembly(assembly.done, None)
            assembly.add(delta, sink.fetch)
            engine_fixture.engine.swap(version, assembly.done.tensors.items())
            sent = wire
        engine_fixture.model = new_policy(1, tied=tied)
        engine_fixture.model.load_state_dict({name: tensor.float() for name, tensor in sent.items()}, strict=False)
        worst = engine_fixture.check(seed=3)
        print(f"largest difference of a logprob after {UPDATES} deltas: {worst:.2e}")
        assert worst < TOLERANCE
        engine_fixture.model = new_policy(1, tied=tied)
        assert engine_fixture.check(seed=3) > TOLERANCE, "twenty updates must show"
    finally:
        engine_fixture.engine.close()
