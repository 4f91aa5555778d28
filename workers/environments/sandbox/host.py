"""Shared by all sandboxes of one process: settings, the store of packs, and the traffic of checkpoints over the host.

Keeps true: at most CHECKPOINTS_AT_ONCE checkpoints are read and written at a time by all workers of a user on a host,
and together they write at most `bytes_per_second`.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import msgspec

from rose.topics.processes import start_thread
from rose.workers.environments.sandbox.leases import PASS_SECONDS, host_slot
from rose.workers.environments.sandbox.store import PackStore

CHECKPOINTS_AT_ONCE = 2

T = TypeVar("T")

SWEEP_PASSES = 6
"""Renewals of packs between two sweeps of the store."""


class SandboxSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a worker for its sandboxes; see EnvironmentConfig."""

    store: str = ""
    store_seconds: float = 3600.0
    bytes_per_second: int = 64 << 20


class SandboxHost:
    """The settings of this process's sandboxes, and its share of the host."""

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings
        self._saves: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._saves_begun = False
        self.store = PackStore(Path(settings.store), settings.store_seconds) if settings.store else None
        self._lineages: dict[str, int] = {}
        """Sandboxes that this process holds."""
        self._lock = threading.Lock()
        if self.store is not None:
            start_thread(self._keep, name="sandbox-store")

    def hold(self, lineage: str) -> None:
        """Keep the packs of this sandbox from now on."""
        with self._lock:
            self._lineages[lineage] = self._lineages.get(lineage, 0) + 1
        if self.store is not None:
            self.store.renew(lineage)

    def let_go(self, lineage: str, *, ended: bool) -> None:
        """Do not keep the packs of this sandbox any more. `ended`: nobody needs them."""
        with self._lock:
            self._lineages[lineage] = self._lineages.get(lineage, 1) - 1
            if self._lineages[lineage] <= 0:
                del self._lineages[lineage]
        if ended and self.store is not None:
            self.store.end(lineage)

    @contextmanager
    def turn_to_save(self, wanted: threading.Event) -> Iterator[list[int]]:
        """Wait for one of the host's places; yield a list for the bytes that are written, or end if not `wanted`.

        Raises SaveAbandoned.
        """
        with host_slot(CHECKPOINTS_AT_ONCE, wanted) as has_slot:
            if not has_slot:
                raise SaveAbandoned
            written: list[int] = []
            began = time.monotonic()
            yield written
            share = self._settings.bytes_per_second / CHECKPOINTS_AT_ONCE
            time.sleep(max(0.0, began + sum(written) / share - time.monotonic()))

    def start_save(self, save: Callable[[], T]) -> "Future[T]":
        """Have one of this process's saving threads make the call. They are daemons: no exit waits for a store."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(save())
            except BaseException as error:  # noqa: BLE001 - the caller gets it
                done.set_exception(error)

        with self._lock:
            if not self._saves_begun:
                self._saves_begun = True
                for _ in range(CHECKPOINTS_AT_ONCE):
                    start_thread(self._save, name="sandbox-save")
        self._saves.put(run)
        return done

    def _save(self) -> None:
        while True:
            self._saves.get()()

    def _keep(self) -> None:
        assert self.store is not None
        while True:
            for passes in range(SWEEP_PASSES):
                with self._lock:
                    lineages = list(self._lineages)
                for lineage in lineages:
                    self.store.renew(lineage)
                if passes == 0:
                    with suppress(OSError):
                        self.store.sweep()
                time.sleep(PASS_SECONDS)


class SaveAbandoned(Exception):
    """A checkpoint is not needed any more."""


_host: SandboxHost | None = None


def configure_sandboxes(settings: SandboxSettings) -> None:
    """Set this process's settings. Raises UsageError if the store's folder cannot be made."""
    global _host
    _host = SandboxHost(settings)


def sandbox_host() -> SandboxHost:
    """The host of this process's sandboxes."""
    if _host is None:
        configure_sandboxes(SandboxSettings())
    assert _host is not None
    return _host
