r"""Standard streams of a command: text for a terminal, notices and errors, and streams that are closed or unread.

Keeps true
- Control characters in a record, a key or a reason are shown as text and do not reach the terminal.
- None of the three streams is missing: a closed stream is /dev/null, and no file that is opened later takes its number.
- A character that the encoding of a terminal or a locale does not have is written as an escape that JSON and TOML have
  too.
- A program continues when no process reads its standard error any more, for example after the end of a log reader.
- The terminal is in its own mode again after keys were read from it.
- Output that cannot be written is reported in one sentence, once, and ends the command with its own exit status.

Example: "\x1b[2J" -> the four characters \x1b, and [2J.
"""

import codecs
import errno
import os
import re
import sys
import termios
import tty
from collections.abc import Generator
from contextlib import suppress
from io import FileIO, TextIOWrapper
from pathlib import Path
from threading import Timer
from typing import Any, Literal, TextIO

from rose.schemas.errors import RoseError, UsageError
from rose.topics.processes import stream_like, unread_stream

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that control a terminal or change the direction of text, except tabs and line ends."""


def escape_control_chars(text: str) -> str:
    """Return the text with its control characters written as escapes."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def print_line(line: str) -> None:
    """Write a line to standard output, with control characters escaped."""
    sys.stdout.write(f"{escape_control_chars(line)}\n")


KEYS = {b"\x1b[C": "n", b"\x1bOC": "n", b" ": "n", b"\n": "n", b"\r": "n", b"\x1b[D": "p", b"\x1bOD": "p", b"\x04": "q"}
"""Commands of the keys that are no letters: arrows, space, return and the end of a file."""


def read_commands(source: TextIO) -> Generator[str, None, None]:
    """Yield a command for each key that is pressed, or for each line if `source` is no terminal.

    An arrow to the right, a space and an empty line are "n", an arrow to the left is "p". Ends with the source.
    """
    if not source.isatty():
        yield from (line.strip() or "n" for line in source)
        return
    number = source.fileno()
    before = termios.tcgetattr(number)
    try:
        tty.setcbreak(number, termios.TCSADRAIN)  # the default would drop keys that were pressed before
        while pressed := os.read(number, 16):
            yield KEYS.get(pressed, pressed[:1].decode(errors="replace"))
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


CLEAR = "\x1b[2J\x1b[H"
"""Clears a terminal and moves its cursor to the beginning."""


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


ESCAPED = "rose.escaped"
"""Name of the error handler that writes escapes for characters that an encoding does not have."""

BROKEN_PIPE = 1
"""Exit status if the reader of the output has gone, as in typer."""


def repair_streams() -> None:
    """Make standard input, output and error usable, also if the caller has closed some of them.

    Call this before anything is read or written.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
    sys.stdin = sys.stdin or _opened(0, "r")
    sys.stdout = sys.stdout or _opened(1, "w")
    sys.stderr = sys.stderr or _opened(2, "w")
    codecs.register_error(ESCAPED, _escaped)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout = stream_like(sys.stdout, _Output(1, "w", closefd=False), errors=ESCAPED)
    if isinstance(sys.stderr, TextIOWrapper):
        sys.stderr.reconfigure(errors=ESCAPED)
        if _is_descriptor(sys.stderr, 2):
            sys.stderr = unread_stream(2, sys.stderr)


def _is_descriptor(stream: TextIOWrapper, number: int) -> bool:
    try:
        return stream.fileno() == number
    except OSError:  # it is in memory
        return False


def flush_streams() -> None:
    """Write what is still buffered for standard output; call this last.

    Raises RoseError, or SystemExit if the reader of the output has gone.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        _discard(1)
        if isinstance(error, BrokenPipeError):
            sys.exit(BROKEN_PIPE)
        raise RoseError(f"standard output cannot be written ({error.strerror}): give it another place") from None


def print_error(sentence: str) -> None:
    """A sentence on standard error, if that can be written."""
    try:
        sys.stderr.write(f"rose: {sentence}\n")
        sys.stderr.flush()
    except OSError:
        _discard(2)


class _Output(FileIO):
    """Standard output, whose errors say so."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = "standard output"
            raise


def _opened(number: int, mode: Literal["r", "w"]) -> TextIOWrapper:
    return open(number, mode, encoding="utf-8", closefd=False)


def _discard(number: int) -> None:
    """Send pending output to /dev/null, because the interpreter would try to write it again at its end."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    written = [f"\\u{ord(each):04x}" if ord(each) < 0x10000 else f"\\U{ord(each):08x}" for each in characters]
    return "".join(written), error.end
