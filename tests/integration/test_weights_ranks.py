"""Two ranks of an FSDP2 trainer: each publishes its rows, and one commits the version of both."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from rose.topics.admin import create_topics
from rose.topics.catalog import Partitions
from rose.workers.weights.chunk_stores import AnchorStore
from rose.workers.weights.config import WeightsConfig
from rose.workers.weights.manifests import read_manifests
from rose.workers.weights.receive import WeightReceiver
from rose.workers.weights.trust import make_trust
from tests.integration.test_weights import WAIT_SECONDS
from tests.support.brokers import AnyBroker

MODEL = "policy"
START_SECONDS = 180.0
"""Time for two processes with torch to start and publish on a busy machine."""

ROWS = 7
"""An odd number: one rank owns four rows, the other three."""

RANK = """
import json, os, sys, time
import msgspec, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from rose.schemas.weights import WeightManifest
from tests.integration.test_weights_ranks import MODEL, model
from rose.topics.settings import BusSettings
from rose.workers.weights.chunk_stores import AnchorStore
from rose.workers.weights.publish import WeightPublisher, merge_manifests

dist.init_process_group("gloo")
module = fully_shard(model(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
store = AnchorStore(sys.argv[2])
publisher = WeightPublisher(BusSettings(**json.loads(sys.argv[1])), MODEL, dtype=torch.bfloat16, store=store)
for version in range(2):
    snapshot = publisher.snapshot(module.named_parameters())
    part = publisher.put(snapshot, version, step=version, published_at=time.time(), anchor=version == 0)
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, msgspec.msgpack.encode(part))
    if dist.get_rank() == 0:
        publisher.commit(merge_manifests([msgspec.msgpack.decode(each, type=WeightManifest) for each in parts]))
    dist.barrier()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.001)
publisher.close()
os._exit(0)  # gloo's threads may still hold tensors, and torch aborts where one is freed as the interpreter ends
"""


def model() -> torch.nn.Module:
    """Return the model, which is the same in every process."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(33, ROWS), torch.nn.LayerNorm(ROWS))


@pytest.mark.long
def test_two_ranks_publish_one_version(broker: AnyBroker, namespace: str, tmp_path: Path) -> None:
    """The first version is an anchor in a store with one file per rank, the second is deltas on the log."""
    settings = broker.settings(namespace)
    create_topics(settings, Partitions(home=1, slots=1, samples=1, chunks=2))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, json.dumps(asdict(settings)), str(tmp_path)],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
        )
        for rank in range(2)
    ]
    try:
        assert [rank.wait(START_SECONDS) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    with torch.no_grad():
        expected = {name: (tensor * 1.001).bfloat16() for name, tensor in model().named_parameters()}
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    trust = make_trust(settings, MODEL, WeightsConfig())
    receiver = WeightReceiver(settings, trust, shapes=shapes, store=AnchorStore(str(tmp_path)))
    receiver.start()
    try:
        staged = receiver.staged(WAIT_SECONDS)
    finally:
        receiver.stop()
    assert staged is not None
    assert (staged.version, staged.manifest.base_version, staged.manifest.files) == (1, 0, ())
    anchor = next(filter(None, map(trust.verified, read_manifests(settings))))
    assert sorted(anchor.files) == sorted(file.name for file in tmp_path.iterdir())
    assert len(anchor.files) == 2
    assert len(staged.manifest.slices) > len(expected)
    for name, tensor in expected.items():
        assert torch.equal(staged.tensors[name], tensor), name
