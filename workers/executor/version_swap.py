"""Which policy version an executor serves, and the change to the next one.

Keeps true
- One change is under way at a time. The old version serves until the engine says that the new one does, or that it does
  not take it.
- A version is copied to where the engine reads it on a thread of its own: turns go on meanwhile.
- Of an engine that is gone nothing serves; what it served is kept, where there may be another.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum

from rose.workers.executor.ipc.engine_client import EngineClient
from rose.workers.executor.ipc.messages import ActivateWeights, StageWeights, WeightsRejected
from rose.workers.weights.receive import StagedVersion, WeightReceiver


class SwapPhase(Enum):
    """How far the change to the next version is."""

    STAGING = "preparing"
    """The old one serves, and goes on serving whoever comes."""
    STAGED = "prepared"
    """The engine can change to it between two steps."""
    ACTIVATING = "ordered"
    """From the next order that the engine takes it serves the new version, or has refused it."""


class VersionSwap:
    """Of one executor. Its loop has it go on, and tells it what the engine says."""

    def __init__(
        self, client: EngineClient, receiver: WeightReceiver, name: str, *, drain_first: bool, keep_serving: bool
    ) -> None:
        """`drain_first`: turns end under the version that they began under; `keep_serving`: there may be another
        engine.
        """
        self.serving_version = -1
        """The newest that was applied; -1: none was, in this engine."""
        self._client = client
        self._receiver = receiver
        self._drains = drain_first
        self._keeps = keep_serving
        self._kept: StagedVersion | None = None
        """What serves, to serve it again in another engine."""
        self._next: StagedVersion | None = None
        self._phase = SwapPhase.STAGING
        """Of `_next`."""
        self._copy_thread = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-lays")
        self._copying: Future[StageWeights] | None = None
        """Of `_next`, while it is copied to where the engine reads it."""

    @property
    def in_progress(self) -> bool:
        """Whether a change is under way."""
        return self._next is not None

    @property
    def defers_turns(self) -> bool:
        """Whether turns that come are for the next version."""
        if self._next is None or self._phase is SwapPhase.STAGING:
            return False
        return self._phase is SwapPhase.ACTIVATING or self._drains

    def advance(self, *, busy: bool) -> None:
        """As far as the change can go now. `busy`: the engine has turns."""
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
        """The engine can serve what is coming."""
        self._phase = SwapPhase.STAGED

    def on_activated(self, version: int) -> None:
        """The engine serves it."""
        self.serving_version = version
        if self._keeps:
            self._kept = self._next
        self._next = None

    def on_rejected(self, report: WeightsRejected) -> None:
        """The old version serves on."""
        self._receiver.refuse(report.version, report.reason)
        if self._next is self._kept:
            self._kept = None
        self._next = None

    def on_engine_lost(self) -> None:
        """The engine is gone, with what it had been given; or it was, and there is another by now."""
        self._kept = self._next or self._kept
        self.serving_version, self._next, self._copying = -1, None, None

    def close(self) -> None:
        self._copy_thread.shutdown()
