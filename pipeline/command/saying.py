"""What a command says, on a terminal that obeys what it is sent.

Keeps true: what others wrote into a record, a key or a reason is shown, and does nothing: control characters are
written out.

Example: "\\x1b[2J" -> the five characters \\x1b, and [2J.
"""

import re
import sys
from threading import Timer

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""What steers a terminal, or turns the order of letters round; but for tabs and the ends of lines."""


def harmless(text: str) -> str:
    """The text, with what is no letter written out."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(line: str) -> None:
    """A line on standard output."""
    sys.stdout.write(f"{harmless(line)}\n")


WAIT_SECONDS = 1.0
"""A wait that lasts for longer is told."""


class Waits:
    """Tells on standard error what a command waits for, each thing once it has lasted for WAIT_SECONDS."""

    def __init__(self) -> None:
        self._timer: Timer | None = None

    def begin(self, what: str) -> None:
        """It waits for this from now on, and for nothing else; empty for nothing."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = Timer(WAIT_SECONDS, _tell, [what]) if what else None
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()


def _tell(what: str) -> None:
    sys.stderr.write(f"rose: {harmless(what)}\n")
    sys.stderr.flush()
