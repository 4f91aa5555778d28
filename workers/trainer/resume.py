"""Where a trainer begins after a start: the newest checkpoint decides, and the log says what it lacks.

Keeps true
- If the log lacks the checkpoint's transaction, the transaction is repeated.
- If the log is ahead, the run goes back: settled groups stay settled, the checkpoint's policy is published in a new
  epoch under a number above all others, and samples of the versions in between settle as SUPERSEDED. The same policy in
  another element type or with other slices is another version on the log and also begins a new epoch.
- If the log does not know the checkpoint (a new log after the old one was lost, or another run's log), the checkpoint's
  policy becomes its first version, with a new epoch and a number above those of the checkpoint.
"""

import structlog
import torch

from rose.schemas.samples import SampleOutcome
from rose.schemas.weights import WeightManifest
from rose.schemas.wire import decode
from rose.workers.trainer.checkpoint import CheckpointRefused, Checkpoints, Progress
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.learner import Learner
from rose.workers.trainer.step_log import StepLine, decode_line
from rose.workers.trainer.stream import SampleStream
from rose.workers.trainer.versions import PolicyVersions

log = structlog.get_logger("trainer")

ENCODING_CHANGED = "weights travel in another way than before"
"""Reason in log events: the digest of the restored weights is not the digest of the checkpoint."""


def resume(config: TrainerConfig, learner: Learner, versions: PolicyVersions, stream: SampleStream) -> StepLine | None:
    """Start a new run, or restore the newest checkpoint and have its transaction committed.

    Returns the line of the step that made the restored version; None if no step made it.

    Raises CheckpointRefused if the log and the checkpoints are of two runs.
    """
    newest = versions.publisher.newest
    progress = next((one for one in versions.checkpoints.newest_first() if _may_be_of(one, newest)), None)
    if progress is None:
        _start_fresh(config, learner, versions, stream)
    elif newest is None and progress.version and stream.fresh:
        _import_checkpoint(versions.checkpoints, progress, learner, versions, stream)
    else:
        _go_on(progress, newest, versions, stream)
        return decode_line(progress.step_line) if progress.step_line else None
    return None


def _may_be_of(progress: Progress, newest: WeightManifest | None) -> bool:
    """Return whether the checkpoint agrees with the newest manifest.

    A fenced trainer may have saved a checkpoint that it never published.
    """
    if newest is None or newest.version != progress.version or newest.digest == progress.weights_digest:
        return True
    log.warning("checkpoint_skipped", version=progress.version, reason="its policy is not the one on the log")
    return False


def _start_fresh(config: TrainerConfig, learner: Learner, versions: PolicyVersions, stream: SampleStream) -> None:
    """Start a run that has no checkpoint.

    It begins with the checkpoint of `begin_from` if that is set, otherwise with the model folder.
    """
    taken = versions.publisher.next_version - 1
    if taken >= 0:
        raise CheckpointRefused(
            f"the log holds version {taken} of model {config.model_id}, and {config.checkpoints} no "
            "checkpoint of it: name that run's folder, or take another --namespace"
        )
    if config.begin_from is not None:
        others = Checkpoints(config.begin_from, None)
        progress = next(others.newest_first(), None)
        if progress is None:
            raise CheckpointRefused(f"trainer.begin_from names {others.folder}, where no whole checkpoint is")
        _import_checkpoint(others, progress, learner, versions, stream)
        return
    torch.manual_seed(config.seed)
    versions.save_and_publish(stream.settlement(()))


def _import_checkpoint(
    checkpoints: Checkpoints, progress: Progress, learner: Learner, versions: PolicyVersions, stream: SampleStream
) -> None:
    """Begin a new epoch on a log that does not know the checkpoint.

    The outcomes of the checkpoint's step are not written.
    """
    learner.restore(checkpoints, progress)
    versions.begin_epoch(epoch=progress.epoch, version=progress.version)
    log.warning(
        "epoch_started",
        checkpoint=str(checkpoints.folder),
        checkpoint_version=progress.version,
        version=versions.current,
        reason="the log knows nothing of the checkpoint",
    )
    versions.save_and_publish(stream.settlement(()))


def _go_on(progress: Progress, newest: WeightManifest | None, versions: PolicyVersions, stream: SampleStream) -> None:
    """Restore a checkpoint that the log may know, and publish its version again or in a new epoch."""
    versions.load(progress)
    snapshot, publisher = versions.snapshot(), versions.publisher
    level = newest is not None and (newest.epoch, newest.version) == (progress.epoch, progress.version)
    ahead = progress.version >= publisher.next_version and progress.epoch == publisher.epoch
    unsettled = progress.outcomes if ahead else ()  # otherwise they were committed with the version
    settlement = stream.settlement([decode(SampleOutcome, wire) for wire in unsettled])
    travels_alike = snapshot.digest() == progress.weights_digest
    if (level or ahead) and travels_alike:
        log.info("run_resumed", version=versions.current)
        # As an anchor, so that executors that join later need not read far back.
        versions.publish(snapshot, settlement)
    elif ahead and not level:
        log.info("run_resumed", version=versions.current, reason=ENCODING_CHANGED)
        versions.save_and_publish(settlement)  # saved again with the digest that the log will have
    else:
        if newest is not None:
            versions.begin_epoch()
        else:  # no version is trusted any more, as after a change of keys: only the checkpoint knows epoch and number
            versions.begin_epoch(epoch=progress.epoch, version=progress.version)
        if versions.current > progress.version + 1:
            versions.abandoned += ((progress.version + 1, versions.current - 1),)
        why = ENCODING_CHANGED if level else "the log is further than the checkpoint"
        log.warning("epoch_started", checkpoint_version=progress.version, version=versions.current, reason=why)
        versions.save_and_publish(settlement)
