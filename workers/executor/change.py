"""Which policy version an executor serves, and the change to the next one.

Keeps true
- One change is under way at a time. The old version serves until the engine says that the new one does, or that it does
  not take it.
- A version is copied to where the engine reads it on a thread of its own: turns go on meanwhile.
- Of an engine that is gone nothing serves; what it served is kept, where there may be another.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum

from workers.executor.link import EngineLink
from workers.executor.words import NotTaken, Prepare, Serve
from workers.weights.receive import StagedVersion, WeightReceiver


class Change(Enum):
    """How far the change to the next version is."""

    PREPARING = "preparing"
    """The old one serves, and goes on serving whoever comes."""
    PREPARED = "prepared"
    """The engine can change to it between two steps."""
    ORDERED = "ordered"
    """From the next order that the engine takes it serves the new version, or has refused it."""


class Versions:
    """Of one executor. Its loop has it go on, and tells it what the engine says."""

    def __init__(self, link: EngineLink, receiver: WeightReceiver, name: str, *, drains: bool, keeps: bool) -> None:
        """`drains`: turns end under the version that they began under; `keeps`: there may be another engine."""
        self.serving = -1
        """The newest that was applied; -1: none was, in this engine."""
        self._link = link
        self._receiver = receiver
        self._drains = drains
        self._keeps = keeps
        self._kept: StagedVersion | None = None
        """What serves, to serve it again in another engine."""
        self._next: StagedVersion | None = None
        self._change = Change.PREPARING
        """Of `_next`."""
        self._helper = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-lays")
        self._laid: Future[Prepare] | None = None
        """Of `_next`, while it is copied to where the engine reads it."""

    @property
    def coming(self) -> bool:
        """Whether a change is under way."""
        return self._next is not None

    @property
    def changing(self) -> bool:
        """Whether turns that come are for the next version."""
        if self._next is None or self._change is Change.PREPARING:
            return False
        return self._change is Change.ORDERED or self._drains

    def go_on(self, *, busy: bool) -> None:
        """As far as the change can go now. `busy`: the engine has turns."""
        if self._next is None:
            self._next = self._receiver.staged() or (self._kept if self.serving < 0 else None)
            if self._next is not None:
                self._change = Change.PREPARING
                self._laid = self._helper.submit(self._link.lay, self._next.version, self._next.tensors)
        elif self._laid is not None:
            if self._laid.done():
                laid, self._laid = self._laid, None
                self._link.order(laid.result())
        elif self._change is Change.PREPARED and not (self._drains and busy):
            self._change = Change.ORDERED
            self._link.order(Serve(self._next.version))

    def prepared(self) -> None:
        """The engine can serve what is coming."""
        self._change = Change.PREPARED

    def served(self, version: int) -> None:
        """The engine serves it."""
        self.serving = version
        if self._keeps:
            self._kept = self._next
        self._next = None

    def not_taken(self, report: NotTaken) -> None:
        """The old version serves on."""
        self._receiver.refuse(report.version, report.reason)
        if self._next is self._kept:
            self._kept = None
        self._next = None

    def lost(self) -> None:
        """The engine is gone, with what it had been given; or it was, and there is another by now."""
        self._kept = self._next or self._kept
        self.serving, self._next, self._laid = -1, None, None

    def close(self) -> None:
        self._helper.shutdown()
