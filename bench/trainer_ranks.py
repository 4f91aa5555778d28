"""Measures the memory of a trainer's rank, and what the rank publishes, on one process and on several ranks.

    python -m bench.trainer_ranks

Each rank trains one step on the same samples, publishes the policy over a scratch broker, and saves a checkpoint. The
model is random, on the CPU; ranks talk over gloo.

state       Bytes of live tensors of a rank after the step: its rows of weights, gradients and optimizer state.
publishing  Bytes by which a rank's resident memory rises while it copies, publishes and saves the policy.
published   Bytes that all ranks together publish: nothing is published twice.
`--json FILE` stores the result.
"""

import ctypes
import gc
import multiprocessing
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from bench.broker import scratch_broker
from bench.check import Check, options, say, tell
from rose.topics.admin import create_topics
from rose.topics.catalog import Partitions
from rose.topics.local_broker import free_ports
from rose.topics.settings import BusSettings
from rose.workers.trainer.algorithms import TrainingSample
from rose.workers.trainer.checkpoint import Checkpoints, Identity, Progress
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.follower import exchange_parts
from rose.workers.trainer.ranks import Ranks
from rose.workers.trainer.replica import Replica
from rose.workers.weights.publish import WeightPublisher, merge_manifests
from tests.support.trainer_fixtures import make_policy

STATE, PUBLISHING, PUBLISHED = 0.6, 0.7, 1.02
VOCABULARY, TOKENS, GROUPS, MEMBERS = 512, 64, 4, 4
JOIN_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of one rank, in bytes."""

    state: int
    publishing: int
    published: int


def groups() -> list[list[TrainingSample]]:
    """Return random groups, each with two rewards."""
    draw = torch.Generator().manual_seed(1)
    return [
        [
            TrainingSample(
                tokens=torch.randint(3, VOCABULARY, (TOKENS,), generator=draw).tolist(),
                loss_mask=[0] + [1] * (TOKENS - 1),
                behaviour_logprobs=[-6.2] * TOKENS,
                temperatures=[1.0] * TOKENS,
                reward=float(member % 2),
            )
            for member in range(MEMBERS)
        ]
        for _ in range(GROUPS)
    ]


def live_bytes() -> int:
    """Return the bytes of all tensors that are alive, each storage once."""
    gc.collect()
    storages: dict[int, int] = {}
    for found in gc.get_objects():
        if isinstance(found, torch.Tensor) and not hasattr(found, "to_local"):
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def resident(field: str) -> int:
    """Return a field of this process's status in bytes: VmRSS, or VmHWM since `reset_peak`."""
    line = next(
        line for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines() if line.startswith(field)
    )
    return 1024 * int(line.split()[1])


def reset_peak() -> None:
    """Give freed memory back to the system, and have VmHWM begin again."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def run_rank(
    settings: BusSettings, folder: Path, rank: int, size: int, port: int, results: "multiprocessing.Queue[Any]"
) -> None:
    """Measure one rank."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    ranks = Ranks()
    if size > 1:
        ranks.join(launched=True, timeout=timedelta(seconds=JOIN_SECONDS))
    config = TrainerConfig(model_folder=folder, run_folder=folder.parent / f"run-{size}", microbatch_tokens=4 * TOKENS)
    replica = Replica(config, ranks)
    replica.fit(groups(), 0, compared=(), since=0)
    state = live_bytes()
    publisher = WeightPublisher(settings, "policy", run=f"ranks-{size}")
    reset_peak()
    before = resident("VmRSS")
    snapshot, digest = replica.snapshot(publisher)
    part = publisher.put(snapshot, 0, step=0, published_at=time.time(), anchor=True, epoch=0)
    parts = exchange_parts(ranks, part) if size > 1 else [part]
    identity = Identity(run="ranks", namespace=settings.namespace, model_id="policy")
    progress = Progress(
        identity=identity, version=0, epoch=0, weights_digest=digest, abandoned=(), outcomes=(), step_line=b""
    )
    replica.save(Checkpoints(config.checkpoints, identity), progress)
    publishing = resident("VmHWM") - before
    assert merge_manifests(parts).digest == digest
    results.put((rank, Measured(state=state, publishing=publishing, published=part.payload_bytes)))
    publisher.close()
    ranks.leave()


def measure(settings: BusSettings, folder: Path, size: int) -> list[Measured]:
    """Return the measurements of the ranks of a trainer of this size."""
    context = multiprocessing.get_context("spawn")
    results, port = context.Queue(), free_ports(1)[0]
    processes = [
        context.Process(target=run_rank, args=(settings, folder, rank, size, port, results)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=JOIN_SECONDS) for _ in processes)
    for process in processes:
        process.join()
    return [found[rank] for rank in range(size)]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--width", type=int, default=768, help="width of the model's layers")
    arguments = parser.parse_args()
    found: dict[int, list[Measured]] = {}
    with tempfile.TemporaryDirectory(prefix="rose-bench-") as scratch, scratch_broker() as broker:
        settings = broker.settings()
        create_topics(settings, Partitions(home=1, slots=1, samples=1, chunks=4))
        width = arguments.width
        folder = make_policy(
            Path(scratch) / "policy",
            vocabulary=VOCABULARY,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=width // 4,
        )
        for size in (1, 2, 4):
            found[size] = measure(settings, folder, size)
            say(f"{size} ranks: " + "; ".join(str(asdict(one)) for one in found[size]))
    (alone,) = found[1]
    two = found[2]
    details = {f"{size} ranks, MiB": [round(one.state / 2**20) for one in ranks] for size, ranks in found.items()}
    state = max(one.state for one in two) / alone.state
    publishing = max(one.publishing for one in two) / alone.publishing
    published = sum(one.published for one in two) / alone.published
    peaks = {f"{size} ranks, MiB": [round(one.publishing / 2**20) for one in ranks] for size, ranks in found.items()}
    tell(
        [
            Check("state", state, "of one process", STATE, "max", "one process, on 2 ranks", details),
            Check("publishing", publishing, "of one process", PUBLISHING, "max", "one process, on 2 ranks", peaks),
            Check("published", published, "of one process", PUBLISHED, "max", "one process, on 2 ranks"),
        ],
        broker=broker.name,
        file=arguments.json,
    )


if __name__ == "__main__":
    main()
