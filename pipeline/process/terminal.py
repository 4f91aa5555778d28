"""What a command says, on a terminal that obeys what it is sent.

Keeps true: what others wrote into a record, a key or a reason is shown, and does nothing: control characters are
written out.

Example: "\\x1b[2J" -> the five characters \\x1b, and [2J.
"""

import errno
import re
import sys
from pathlib import Path
from threading import Timer

from rose.schemas.errors import RoseError, UsageError

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""What steers a terminal, or turns the order of letters round; but for tabs and the ends of lines."""


def escape_control_chars(text: str) -> str:
    """The text, with what is no letter written out."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def print_line(line: str) -> None:
    """A line on standard output."""
    sys.stdout.write(f"{escape_control_chars(line)}\n")


WAIT_SECONDS = 1.0
"""A wait that lasts for longer is told."""


class WaitNotice:
    """Tells on standard error what a command waits for, each thing once it has lasted for WAIT_SECONDS."""

    def __init__(self) -> None:
        self._timer: Timer | None = None

    def show(self, reason: str) -> None:
        """It waits for this from now on, and for nothing else; empty for nothing."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = Timer(WAIT_SECONDS, _print_notice, [reason]) if reason else None
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()


def _print_notice(what: str) -> None:
    sys.stderr.write(f"rose: {escape_control_chars(what)}\n")
    sys.stderr.flush()


DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Nothing more can be written."""

TRANSIENT = (errno.ENOENT, errno.EIO, errno.ESTALE)
"""What was wrong with a file may be mended by itself."""


def file_error(error: OSError) -> RoseError | None:
    """What a person can mend about a file or a disk; None of any other error."""
    if error.errno in DISK_FULL:
        where = f" ({error.filename})" if error.filename else ""
        return RoseError(
            f"{error.strerror}{where}: free some space, and start it again; what is on the log is not lost"
        )
    if error.filename is None:
        return _working_folder_error()
    kind = RoseError if error.errno in TRANSIENT else UsageError
    return kind(f"{error.filename} cannot be used ({error.strerror}): mend that, or name another place for it")


def _working_folder_error() -> UsageError | None:
    """That the folder which all relative paths begin at is there no more; None while it is."""
    try:
        Path.cwd()
    except OSError as error:
        return UsageError(f"the folder that this was started in cannot be used ({error.strerror}): change into another")
    return None
