"""A rank of the trainer other than rank 0: does what rank 0 commands, and publishes its own part of each version.

Keeps true
- A command is typed MessagePack and names one method of `Replica`, with its arguments.
- A follower reads no samples and writes no outcomes or manifests. The chunks that it puts count only with the manifest
  that rank 0 commits.
- A follower ends when rank 0 says so, and with an error when rank 0 is gone. If it cannot put its part of a version, it
  ends at once, because rank 0 waits for the part.
"""

import os
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import structlog

from rose.schemas.errors import RoseError
from rose.schemas.samples import Sample
from rose.schemas.weights import WeightManifest
from rose.schemas.wire import decode
from rose.topics.settings import BusSettings
from rose.workers.trainer.algorithms import TrainingSample
from rose.workers.trainer.checkpoint import Checkpoints, Progress
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.ranks import RankLost, Ranks
from rose.workers.trainer.replica import Replica
from rose.workers.weights.config import WeightsConfig
from rose.workers.weights.publish import WeightPublisher, make_publisher
from rose.workers.weights.tensors import Snapshot

log = structlog.get_logger("trainer")


class AddEarly(msgspec.Struct, tag=True, kw_only=True):
    """Compute the gradient of the next group of a step that is not whole yet."""

    group: list[bytes]
    """The trained samples of the group, as records (`Sample`)."""


class Fit(msgspec.Struct, tag=True, kw_only=True):
    """Train one step."""

    early: int
    """Number of the step's first groups, which were added early."""
    groups: list[list[bytes]]
    """The trained samples of each other group, as records (`Sample`)."""
    compared: list[bytes]
    """The samples by which engines are checked, as records."""
    version: int
    """The policy's version before the step."""
    since: int
    """The first version with the weights of `version`."""


class CheckFinite(msgspec.Struct, tag=True, kw_only=True):
    """Say whether the policy computes finite logprobs of groups of the last step."""

    places: list[int]
    """Places of the groups in the last Fit."""


class Restore(msgspec.Struct, tag=True, kw_only=True):
    """Restore a checkpoint."""

    folder: str
    progress: Progress


class Save(msgspec.Struct, tag=True, kw_only=True):
    """Write this rank's part of a checkpoint."""

    folder: str
    progress: Progress


class TakeSnapshot(msgspec.Struct, tag=True):
    """Copy this rank's part of the policy, to be put."""


class Put(msgspec.Struct, tag=True, kw_only=True):
    """Put the chunks of the last snapshot, and send this rank's part of the manifest."""

    version: int
    epoch: int
    anchor: bool


class Leave(msgspec.Struct, tag=True):
    """End: rank 0 ends without an error."""


Command = AddEarly | Fit | CheckFinite | Restore | Save | TakeSnapshot | Put | Leave

_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


def pack(command: Command) -> bytes:
    """Encode a command."""
    return msgspec.msgpack.encode(command)


def unpack(data: bytes) -> Command:
    """Decode a command."""
    return _decoder.decode(data)


def exchange_parts(ranks: Ranks, part: WeightManifest) -> list[WeightManifest]:
    """Send this rank's part of a manifest to all ranks; returns the parts of all. On the thread that publishes."""
    parts = ranks.gather(msgspec.msgpack.encode(part), group=ranks.publishing)
    return [msgspec.msgpack.decode(one, type=WeightManifest) for one in parts]


def follow(settings: BusSettings, config: TrainerConfig, weights: WeightsConfig, ranks: Ranks) -> None:
    """Run this rank until rank 0 ends it. Raises RankLost, and UsageError as rank 0 does."""
    replica = Replica(config, ranks)
    publisher = make_publisher(settings, config.model_id, weights)
    thread, putting = ThreadPoolExecutor(1, thread_name_prefix="rose-publishes"), Future[None]()
    putting.set_result(None)
    snapshot: Snapshot | None = None
    try:
        while not isinstance(command := unpack(ranks.receive()), Leave):
            if isinstance(command, TakeSnapshot):
                snapshot, _ = replica.snapshot(publisher)
            elif isinstance(command, Put):
                assert snapshot is not None, "take a snapshot first"
                putting = thread.submit(_put, publisher, snapshot, command, ranks)
                putting.add_done_callback(_end_if_failed)
            else:
                _call(replica, command)
    except Exception:
        if not putting.done():  # its thread waits for rank 0, and the interpreter would wait for the thread
            log.error("rank_failed", rank=ranks.rank, reason=traceback.format_exc())
            os._exit(1)
        raise
    thread.shutdown()


def _call(replica: Replica, command: AddEarly | Fit | CheckFinite | Restore | Save) -> None:
    match command:
        case AddEarly():
            replica.add_early(list(map(_training_sample, command.group)))
        case Fit():
            groups = replica.early_groups[: command.early]
            groups += [list(map(_training_sample, group)) for group in command.groups]
            compared = list(map(_training_sample, command.compared))
            replica.fit(groups, command.version, compared=compared, since=command.since)
        case CheckFinite():
            replica.is_finite(command.places)
        case Restore():
            replica.restore(Checkpoints(Path(command.folder), command.progress.identity), command.progress)
        case Save():
            replica.save(Checkpoints(Path(command.folder), command.progress.identity), command.progress)


def _training_sample(wire: bytes) -> TrainingSample:
    return TrainingSample.of(decode(Sample, wire))


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
        if isinstance(error, RankLost):
            log.error("rank_failed", reason=reason)
        else:
            log.error("part_not_published", reason=reason)
        os._exit(1)
