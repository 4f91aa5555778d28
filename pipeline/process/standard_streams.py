"""Standard input, output and error of a command, whatever whoever started it made of them.

Keeps true
- None of the three is missing: one that was closed is /dev/null, and no file that is opened later takes its number.
- What the encoding of a terminal or a locale has no letter for is written as an escape that JSON and TOML have too.
- A program goes on when nobody reads its standard error any more, as when a reader of logs has ended.
- Output that cannot be written is told in a sentence, once, and ends with an exit status of its own.
"""

import codecs
import os
import sys
from contextlib import suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any, Literal

from rose.schemas.errors import RoseError
from rose.topics.unread_stream import unread_stream

ESCAPED = "rose.escaped"
"""The name of what writes letters that an encoding does not have."""

BROKEN_PIPE = 1
"""Exit status when nobody reads on, as typer has it."""


def repair_streams() -> None:
    """Make standard input, output and error usable whatever the caller left of them.

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
        sys.stdout = _named(sys.stdout)
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

    Raises RoseError, or SystemExit if nobody reads the output.
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


def _named(stream: TextIOWrapper) -> TextIOWrapper:
    return TextIOWrapper(
        BufferedWriter(_Output(1, "w", closefd=False)),
        encoding=stream.encoding,
        errors=ESCAPED,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _opened(number: int, mode: Literal["r", "w"]) -> TextIOWrapper:
    return open(number, mode, encoding="utf-8", closefd=False)


def _discard(number: int) -> None:
    """What waits to be written goes nowhere: the interpreter would try again at its end."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    written = [f"\\u{ord(each):04x}" if ord(each) < 0x10000 else f"\\U{ord(each):08x}" for each in letters]
    return "".join(written), error.end
