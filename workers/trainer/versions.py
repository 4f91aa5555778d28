"""The versions of the policy that a run makes: each is saved as a checkpoint, then published.

Keeps true
- The checkpoint of a version is on disk before its outcomes and its manifest are committed, in one transaction.
- A version is published while the next step trains, one version at a time, so a checkpoint is never two versions ahead
  of the log.
- A version number stands for one policy. The policy on the log and the policy in the checkpoint have the same digest.
- A policy with weights that are not finite is not saved or published.
"""

from concurrent.futures import Future
from threading import Event
from time import perf_counter

from rose.schemas.weights import WeightManifest
from rose.schemas.wire import encode
from rose.topics.health import HEALTH
from rose.topics.settings import BusSettings
from rose.workers.trainer import metrics
from rose.workers.trainer.checkpoint import Checkpoints, Identity, Progress
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.learner import Learner, PolicyRefused
from rose.workers.trainer.selection import still_relevant
from rose.workers.trainer.step_log import StepLine, encode_line
from rose.workers.trainer.stream import SampleStream, Settlement
from rose.workers.weights.config import WeightsConfig
from rose.workers.weights.folder_names import FolderTensors
from rose.workers.weights.publish import make_publisher
from rose.workers.weights.tensors import NotFinite, Snapshot


class PolicyVersions:
    """The current version, its checkpoint, and the publisher."""

    def __init__(
        self,
        settings: BusSettings,
        config: TrainerConfig,
        weights: WeightsConfig,
        learner: Learner,
        tensors: FolderTensors,
        stream: SampleStream,
        stop: Event,
    ) -> None:
        """`tensors`: the learner's policy under the names of its folder. `stop` is set when publishing fails."""
        self._learner, self._tensors, self._stop = learner, tensors, stop
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

    def load(self, progress: Progress) -> None:
        """Make the version of one of the run's checkpoints the current one. Raises CheckpointRefused."""
        self._learner.restore(self.checkpoints, progress)
        self.progress, self.current, self.abandoned = progress, progress.version, progress.abandoned

    def undo(self) -> None:
        """Restore the current version from its checkpoint."""
        assert self.progress is not None
        self._learner.restore(self.checkpoints, self.progress)

    def begin_epoch(self, *, epoch: int = -1, version: int = -1) -> None:
        """Give the current policy a number above all others, in a new epoch.

        `epoch` and `version` are the newest ones that the log may not know.
        """
        self.current = self.publisher.begin_epoch(epoch=epoch, version=version)

    def wait_until_published(self) -> int:
        """Wait for the current version to be on the log, and return the number of the next version. Raises BusError."""
        self.publisher.wait_until_published(HEALTH.report_progress)
        return self.publisher.next_version

    def snapshot(self) -> Snapshot:
        """A snapshot of the current version. Raises PolicyRefused if a value is not finite."""
        try:
            return self.publisher.snapshot(self._tensors)
        except NotFinite as error:
            raise PolicyRefused(f"version {self.current} is neither kept nor published: {error}") from error

    def save_and_publish(self, settlement: Settlement, *, line: StepLine | None = None, trained: float = 0.0) -> None:
        """Save the current version as a checkpoint, then begin to publish it with the settlement.

        `line`: the step's line; None if no step made the version. `trained`: perf_counter() seconds at the end of
        training.
        """
        snapshot = self.snapshot()
        saving = perf_counter()
        if line is not None:
            line.publishing_seconds = saving - trained
        self.abandoned = still_relevant(self.abandoned, self.current, max_staleness=self._max_staleness)
        self.progress = Progress(
            identity=self._identity,
            version=self.current,
            epoch=self.publisher.epoch,
            weights_digest=snapshot.digest(),
            abandoned=self.abandoned,
            outcomes=tuple(encode(outcome) for outcome in settlement.outcomes),
            step_line=b"" if line is None else encode_line(line),
            schedule_steps=self._learner.schedule_steps,
        )
        self.checkpoints.save(self.progress, self._learner.model, self._learner.optimizer)
        if line is not None:
            line.checkpoint_seconds = perf_counter() - saving
        self.publish(snapshot, settlement)

    def publish(self, snapshot: Snapshot, settlement: Settlement) -> None:
        """Begin to publish the current version while training goes on. A failure ends the run."""
        began = perf_counter()

        def published(done: Future[WeightManifest]) -> None:
            if done.exception() is not None:
                self._stop.set()
            else:
                metrics.PUBLISHING_SECONDS.observe(perf_counter() - began)
                metrics.POLICY_VERSION.set(done.result().version)

        publishing = self.publisher.publish_snapshot(snapshot, self.current, settlement.commit)
        publishing.add_done_callback(published)
