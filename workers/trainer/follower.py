"""A rank of the trainer other than rank 0: does what rank 0 commands, and publishes its own part of each version.

Keeps true
- A follower reads no samples and writes no outcomes or manifests. The chunks that it puts count only with the manifest
  that rank 0 commits.
- A follower ends when rank 0 says so, and with an error when rank 0 is gone. If it cannot put its part of a version, it
  ends at once, because rank 0 waits for the part.
"""

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import structlog

from rose.schemas.errors import RoseError
from rose.schemas.samples import Sample
from rose.schemas.wire import decode
from rose.topics.settings import BusSettings
from rose.workers.trainer.algorithms import TrainingSample
from rose.workers.trainer.checkpoint import Checkpoints
from rose.workers.trainer.commands import (
    CheckFinite,
    Fit,
    Leave,
    Put,
    Restore,
    Save,
    TakeSnapshot,
    exchange_parts,
    unpack,
)
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.ranks import Ranks
from rose.workers.trainer.replica import Replica
from rose.workers.weights.config import WeightsConfig
from rose.workers.weights.publish import WeightPublisher, make_publisher
from rose.workers.weights.tensors import Snapshot

log = structlog.get_logger("trainer")


def follow(settings: BusSettings, config: TrainerConfig, weights: WeightsConfig, ranks: Ranks) -> None:
    """Run this rank until rank 0 ends it. Raises RankLost, and UsageError as rank 0 does."""
    replica = Replica(config, ranks)
    publisher = make_publisher(settings, config.model_id, weights)
    snapshot: Snapshot | None = None
    with ThreadPoolExecutor(1, thread_name_prefix="rose-publishes") as thread:
        while True:
            match unpack(ranks.receive()):
                case Fit(groups=groups, version=version):
                    replica.fit(
                        [[TrainingSample.of(decode(Sample, one)) for one in group] for group in groups], version
                    )
                case CheckFinite(places=places):
                    replica.is_finite(places)
                case Restore(folder=folder, progress=progress):
                    replica.restore(Checkpoints(Path(folder), progress.identity), progress)
                case Save(folder=folder, progress=progress):
                    replica.save(Checkpoints(Path(folder), progress.identity), progress)
                case TakeSnapshot():
                    snapshot, _ = replica.snapshot(publisher)
                case Put() as put:
                    assert snapshot is not None, "take a snapshot first"
                    thread.submit(_put, publisher, snapshot, put, ranks).add_done_callback(_end_if_failed)
                case Leave():
                    return


def _put(publisher: WeightPublisher, snapshot: Snapshot, put: Put, ranks: Ranks) -> None:
    part = publisher.put(
        snapshot, put.version, step=put.version, published_at=time.time(), anchor=put.anchor, epoch=put.epoch
    )
    exchange_parts(ranks, part)


def _end_if_failed(putting: "Future[None]") -> None:
    """End the process: its main thread waits for a command that rank 0 does not send before the version is out."""
    error = putting.exception()
    if error is not None:
        reason = str(error) if isinstance(error, RoseError) else repr(error)
        log.error("part_not_published", reason=reason)
        os._exit(1)
