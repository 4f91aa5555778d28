"""The one thread of a guest: waits for the process beside, and wakes the engine's loop.

Keeps true
- It sleeps in the kernel while the engine's loop is awake: it takes the interpreter when somebody knocks or leaves,
  and, only while it is armed, at an order or after a heartbeat's time.
- Heartbeats are due while there is a link, or a guest: one that nobody is linked to is to hear of a stop all the same.
- Nothing is lost between the two: what is written before it is armed wakes it when it is.
"""

import os
import selectors
import time
from collections.abc import Callable
from contextlib import suppress
from logging import Logger
from pathlib import Path
from threading import Thread

from workers.lender.link import End, LinkRefused, listen, welcome

REST_SECONDS = 0.1
"""After a knock that cannot be answered: it may stay, and the interpreter is serving's."""


class Feeder:
    """Holds the newest link; a new one ends the one before it."""

    def __init__(self, path: Path, wake: Callable[[], None], *, beat_seconds: float, log: Logger) -> None:
        """`wake` is called on the feeder's thread. Raises UsageError."""
        self.link: End | None = None
        self.ended: list[End] = []
        """Links that are over, for the engine's loop to close when it no longer uses them."""
        self.guest_lives = False
        """As the engine's loop says before it sleeps."""
        self._wake = wake
        self._beat_seconds = beat_seconds
        self._log = log
        self._path = path
        self._listener = listen(path)
        self._arm = os.eventfd(0, os.EFD_NONBLOCK)
        self._armed = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._arm, selectors.EVENT_READ)
        Thread(target=self._run, name="rose-feeder", daemon=True).start()

    def arm(self) -> None:
        """The engine's loop is about to sleep: wake it at the next order, or when a heartbeat is due."""
        if not self._armed:
            self._armed = True
            os.eventfd_write(self._arm, 1)

    def _run(self) -> None:
        while True:
            beats = self._armed and (self.link is not None or self.guest_lives)
            patience = self._beat_seconds if beats else None
            ready = {key.fileobj for key, _ in self._selector.select(patience)}
            if self._listener in ready:
                self._welcome()
            elif self.link is not None and self.link.connection in ready:
                self._end()
                self._wake()
            elif self._arm in ready:
                os.eventfd_read(self._arm)
                if self.link is not None and self.link.wires.bell not in self._selector.get_map():
                    self._selector.register(self.link.wires.bell, selectors.EVENT_READ)
            else:
                self._disarm()
                self._wake()

    def _disarm(self) -> None:
        self._armed = False
        link = self.link
        if link is not None and link.wires.bell in self._selector.get_map():
            self._selector.unregister(link.wires.bell)
            with suppress(BlockingIOError):
                os.eventfd_read(link.wires.bell)

    def _welcome(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # who knocked has left, or no descriptor is
            time.sleep(REST_SECONDS)
            return
        try:
            link = welcome(connection)
        except LinkRefused as refusal:
            connection.close()
            self._log.warning("rose: who knocked was sent away: %s", refusal)
            return
        self._end()
        self._selector.register(link.connection, selectors.EVENT_READ)
        self.link = link
        self._wake()

    def _end(self) -> None:
        link = self.link
        if link is None:
            return
        self._disarm()
        self._selector.unregister(link.connection)
        self.link = None  # first: who empties `ended` closes what it finds there
        self.ended.append(link)
