r"""Output of a command to a terminal, with control characters escaped.

Keeps true: control characters in a record, a key or a reason are shown as text and do not reach the terminal.

Example: "\x1b[2J" -> the four characters \x1b, and [2J.
"""

import errno
import re
import sys
from pathlib import Path
from threading import Timer

from rose.schemas.errors import RoseError, UsageError

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that control a terminal or change the direction of text, except tabs and line ends."""


def escape_control_chars(text: str) -> str:
    """Return the text with its control characters written as escapes."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def print_line(line: str) -> None:
    """Write a line to standard output, with control characters escaped."""
    sys.stdout.write(f"{escape_control_chars(line)}\n")


WAIT_SECONDS = 1.0
"""A notice is printed for a wait that lasts longer, in seconds."""


class WaitNotice:
    """Prints to standard error what a command waits for, if the wait lasts longer than WAIT_SECONDS."""

    def __init__(self) -> None:
        self._timer: Timer | None = None

    def show(self, reason: str) -> None:
        """Set the present reason of the wait, which replaces the one before; empty if the command does not wait."""
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
"""Error numbers of a full disk or quota."""

TRANSIENT = (errno.ENOENT, errno.EIO, errno.ESTALE)
"""Error numbers of file errors that may go away without a change of the configuration."""


def file_error(error: OSError) -> RoseError | None:
    """Return an error with advice about a file or a disk; None for errors of other kinds."""
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
    """Return an error if the working folder does not exist any more; None otherwise."""
    try:
        Path.cwd()
    except OSError as error:
        return UsageError(f"the folder that this was started in cannot be used ({error.strerror}): change into another")
    return None
