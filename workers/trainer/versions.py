"""The versions of the policy that a run makes, each saved as a checkpoint and then published, and where a run resumes.

After a start the newest checkpoint decides, and the log says what it lacks.

Keeps true
- The checkpoint of a version is on disk before its outcomes and its manifest are committed, in one transaction.
- A version is published while the next step trains, one version at a time, so a checkpoint is never two versions ahead
  of the log.
- A version number stands for one policy. The policy on the log and the policy in the checkpoint have the same digest.
- A policy with weights that are not finite is not saved or published.
- If the log lacks the checkpoint's transaction, the transaction is repeated.
- If the log is ahead, the run goes back: settled groups stay settled, the checkpoint's policy is published in a new
  epoch under a number above all others, and samples of the versions in between settle as SUPERSEDED. The same policy in
  another element type or with other slices is another version on the log and also begins a new epoch.
- If the log does not know the checkpoint (a new log after the old one was lost, or another run's log), the checkpoint's
  policy becomes its first version, with a new epoch and a number above those of the checkpoint.
"""

from concurrent.futures import Future
from threading import Event
from time import perf_counter

import structlog

from rose.schemas.samples import SampleOutcome
from rose.schemas.weights import WeightManifest
from rose.schemas.wire import decode, encode
from rose.topics.health import HEALTH
from rose.topics.settings import BusSettings
from rose.workers.trainer import metrics
from rose.workers.trainer.checkpoint import CheckpointRefused, Checkpoints, Identity, Progress, check_folder
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.learner import Learner, PolicyRefused
from rose.workers.trainer.metrics import StepLine, decode_line, encode_line
from rose.workers.trainer.selection import still_relevant
from rose.workers.trainer.stream import SampleStream, Settlement
from rose.workers.weights.config import WeightsConfig
from rose.workers.weights.publish import make_publisher
from rose.workers.weights.tensors import NotFinite, Snapshot

log = structlog.get_logger("trainer")

ENCODING_CHANGED = "weights travel in another way than before"
"""Reason in log events: the digest of the restored weights is not the digest of the checkpoint."""


class PolicyVersions:
    """The current version, its checkpoint, and the publisher."""

    def __init__(
        self,
        settings: BusSettings,
        config: TrainerConfig,
        weights: WeightsConfig,
        learner: Learner,
        stream: SampleStream,
        stop: Event,
    ) -> None:
        """`stop` is set when publishing fails."""
        self._learner, self._stop = learner, stop
        self._max_staleness = config.max_staleness
        self._identity = Identity(
            run=config.run_folder.resolve().name, namespace=settings.namespace, model_id=config.model_id
        )
        self.checkpoints = Checkpoints(config.checkpoints, self._identity)
        self.publisher = make_publisher(settings, config.model_id, weights, on_wait=stream.check_stopped)
        self.current = 0
        """Number of the current version."""
        self.abandoned: tuple[tuple[int, int], ...] = ()
        """First and last version of each abandoned range that a sample may still have."""
        self.progress: Progress | None = None
        """Progress of the current version, as saved in its checkpoint."""

    @property
    def folder_digest(self) -> bytes:
        """Digest of the model folder, as `FolderTensors` has it."""
        return self._learner.tensors.folder_digest

    def load(self, progress: Progress) -> None:
        """Make the version of one of the run's checkpoints the current one. Raises CheckpointRefused."""
        self._learner.restore(self.checkpoints, progress)
        self.progress, self.current, self.abandoned = progress, progress.version, progress.abandoned

    def begin_epoch(self, *, epoch: int = -1, version: int = -1) -> None:
        """Give the current policy a number above all others, in a new epoch.

        `epoch` and `version` are the newest ones that the log may not know.
        """
        self.current = self.publisher.begin_epoch(epoch=epoch, version=version)

    def wait_until_published(self) -> int:
        """Wait for the current version to be on the log, and return the number of the next version. Raises BusError."""
        self.publisher.wait_until_published(HEALTH.report_progress)
        return self.publisher.next_version

    def snapshot(self) -> tuple[Snapshot, bytes]:
        """A snapshot of the current version, and its digest. Raises PolicyRefused if a value is not finite."""
        try:
            return self._learner.snapshot(self.publisher)
        except NotFinite as error:
            raise PolicyRefused(f"version {self.current} is neither kept nor published: {error}") from error

    def save_and_publish(self, settlement: Settlement, *, line: StepLine | None = None, trained: float = 0.0) -> None:
        """Save the current version as a checkpoint, then begin to publish it with the settlement.

        `line`: the step's line; None if no step made the version. `trained`: perf_counter() seconds at the end of
        training.
        """
        snapshot, digest = self.snapshot()
        saving = perf_counter()
        if line is not None:
            line.publishing_seconds = saving - trained
        self.abandoned = still_relevant(self.abandoned, self.current, max_staleness=self._max_staleness)
        self.progress = Progress(
            identity=self._identity,
            version=self.current,
            epoch=self.publisher.epoch,
            weights_digest=digest,
            abandoned=self.abandoned,
            outcomes=tuple(encode(outcome) for outcome in settlement.outcomes),
            step_line=b"" if line is None else encode_line(line),
            schedule_steps=self._learner.schedule_steps,
            folder_digest=self.folder_digest,
        )
        self._learner.save(self.checkpoints, self.progress)
        if line is not None:
            line.checkpoint_seconds = perf_counter() - saving
        self.publish(snapshot, digest, settlement)

    def publish(self, snapshot: Snapshot, digest: bytes, settlement: Settlement) -> None:
        """Begin to publish the current version while training goes on. A failure ends the run.

        `digest`: that of the whole policy, of which `snapshot` has rank 0's part.
        """
        began = perf_counter()

        def published(done: Future[WeightManifest]) -> None:
            if done.exception() is not None:
                self._stop.set()
            else:
                metrics.PUBLISHING_SECONDS.observe(perf_counter() - began)
                metrics.POLICY_VERSION.set(done.result().version)

        self.wait_until_published()  # what other ranks put depends on what the log has
        anchor = self.publisher.needs_anchor(snapshot, self.current)
        merge = self._learner.put_parts(self.current, epoch=self.publisher.epoch, anchor=anchor)
        publishing = self.publisher.publish_snapshot(
            snapshot, self.current, settlement.commit, digest=digest, anchor=anchor, merge=merge
        )
        publishing.add_done_callback(published)


def resume(config: TrainerConfig, learner: Learner, versions: PolicyVersions, stream: SampleStream) -> StepLine | None:
    """Start a new run, or restore the newest checkpoint and have its transaction committed.

    Returns the line of the step that made the restored version; None if no step made it.

    Raises CheckpointRefused if the log and the checkpoints are of two runs, or the run began with another model folder.
    """
    newest = versions.publisher.newest
    progress = next((one for one in versions.checkpoints.newest_first() if _may_be_of(one, newest)), None)
    if progress is not None:
        check_folder(progress, versions.folder_digest, config.model_folder)
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
    (snapshot, digest), publisher = versions.snapshot(), versions.publisher
    level = newest is not None and (newest.epoch, newest.version) == (progress.epoch, progress.version)
    ahead = progress.version >= publisher.next_version and progress.epoch == publisher.epoch
    unsettled = progress.outcomes if ahead else ()  # otherwise they were committed with the version
    settlement = stream.settlement([decode(SampleOutcome, wire) for wire in unsettled])
    travels_alike = digest == progress.weights_digest
    if (level or ahead) and travels_alike:
        log.info("run_resumed", version=versions.current)
        # As an anchor, so that executors that join later need not read far back.
        versions.publish(snapshot, digest, settlement)
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
