"""The policy version that an executor serves, and the change to the next version.

Keeps true
- One change is in progress at a time. The old version serves until the engine reports that the new version serves, or
  that the engine rejects it.
- A separate thread copies a version into a weight buffer: turns go on meanwhile.
- After the loss of the engine no version serves. If another engine may come, the version that served is kept for it.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum

from rose.workers.executor.ipc.engine_client import EngineClient
from rose.workers.executor.ipc.messages import ActivateWeights, StageWeights, WeightsActivated, WeightsRejected
from rose.workers.weights.receive import StagedVersion, WeightReceiver


class SwapPhase(Enum):
    """How far the change to the next version is."""

    STAGING = "preparing"
    """The engine prepares the new version. The old version serves, new turns included."""
    STAGED = "prepared"
    """The engine can activate the new version between two steps."""
    ACTIVATING = "ordered"
    """The activation is sent: later commands find the new version serving, or rejected."""


class VersionSwap:
    """The version swap of one executor. The loop calls `advance`, and the `on_` methods for reports of the engine."""

    def __init__(
        self, client: EngineClient, receiver: WeightReceiver, name: str, *, drain_first: bool, keep_serving: bool
    ) -> None:
        """`drain_first`: whether running turns end before a new version is activated.

        `keep_serving`: whether the serving version is kept for another engine after the loss of the engine.
        """
        self.serving_version = -1
        """The version that serves in this engine; -1 for none."""
        self.swap_seconds = 0.0
        """How long turns waited for the latest swap."""
        self._client = client
        self._receiver = receiver
        self._drains = drain_first
        self._keeps = keep_serving
        self._kept: StagedVersion | None = None
        """The serving version, to serve it again in another engine."""
        self._next: StagedVersion | None = None
        self._phase = SwapPhase.STAGING
        """Phase of `_next`."""
        self._copy_thread = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-lays")
        self._copying: Future[StageWeights] | None = None
        """The command for `_next`, while `_next` is copied into a weight buffer."""

    @property
    def in_progress(self) -> bool:
        """Whether a change is in progress."""
        return self._next is not None

    @property
    def defers_turns(self) -> bool:
        """Whether new turns must wait for the next version."""
        if self._next is None or self._phase is SwapPhase.STAGING:
            return False
        return self._phase is SwapPhase.ACTIVATING or self._drains

    def advance(self, *, busy: bool) -> None:
        """Advance the change by one phase if that is possible now. `busy`: whether the engine has turns."""
        if self._next is None:
            self._next = self._receiver.staged() or (self._kept if self.serving_version < 0 else None)
            if self._next is not None:
                self._phase = SwapPhase.STAGING
                self._copying = self._copy_thread.submit(
                    self._client.stage_weights, self._next.version, self._next.tensors
                )
        elif self._copying is not None:
            if self._copying.done():
                copied, self._copying = self._copying, None
                self._client.send(copied.result())
        elif self._phase is SwapPhase.STAGED and not (self._drains and busy):
            self._phase = SwapPhase.ACTIVATING
            self._client.send(ActivateWeights(self._next.version))

    def on_staged(self) -> None:
        """Record that the engine can activate the next version."""
        self._phase = SwapPhase.STAGED

    def on_activated(self, report: WeightsActivated) -> None:
        """Record that the engine serves the next version."""
        self.serving_version, self.swap_seconds = report.version, report.seconds
        if self._keeps:
            self._kept = self._next
        self._next = None

    def on_rejected(self, report: WeightsRejected) -> None:
        """Refuse the next version. The old version continues to serve."""
        self._receiver.refuse(report.version, report.reason)
        if self._next is self._kept:
            self._kept = None
        self._next = None

    def on_engine_lost(self) -> None:
        """Record that the engine was lost with its weights, even if another engine is there by now."""
        self._kept = self._next or self._kept
        self.serving_version, self._next, self._copying = -1, None, None

    def close(self) -> None:
        """Wait for the copy that is under way."""
        self._copy_thread.shutdown()
