"""The process beside, as the guest meets it: one at a time, who is told of what it could not know, or hung up on.

Keeps true: a link that is over is closed once it is left, and never while it is in use.
"""

import socket
from contextlib import suppress

from workers.executor.line import Line
from workers.executor.wires import Wires
from workers.executor.words import Gone, Outbox
from workers.lender.feeder import Feeder
from workers.lender.link import End


class Caller:
    """At the link that was taken last, if there is one."""

    def __init__(self, feeder: Feeder) -> None:
        self.wires: Wires | None = None
        self.reports: Outbox | None = None
        """While there is a link that could be taken."""
        self._feeder = feeder
        self._link: End | None = None

    @property
    def changed(self) -> bool:
        """Whether another has come, or this one has left."""
        return self._feeder.link is not self._link

    def take(self) -> None:
        """Leave the link, and take the newest. Raises OSError or LineBroken, and nobody is there then."""
        self.wires = self.reports = None
        while self._feeder.ended:  # first: the link that is taken now may end at any moment
            self._feeder.ended.pop().close()
        self._link = self._feeder.link
        if self._link is not None:
            self.reports = Outbox(Line(self._link.wires.reports))
            self.wires = self._link.wires

    def tell(self, gone: Gone, *, last: bool) -> None:
        """Where it has no room, or is the `last` word, as no engine is to blame, the end of the link says as much."""
        if self.reports is None:
            return
        self.reports.say(gone)
        if last or len(self.reports):
            self.hang_up()

    def hang_up(self) -> None:
        """Nobody answers: who is at the other end begins anew."""
        if self._link is not None:
            with suppress(OSError):
                self._link.connection.shutdown(socket.SHUT_RDWR)
