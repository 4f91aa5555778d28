"""A stream for what a program says of itself: whoever reads it may go away, and the program goes on."""

from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any


class _Heedless(FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def unread_stream(number: int, like: TextIOWrapper) -> TextIOWrapper:
    """A stream `like` this one on the descriptor `number`.

    What is written when nobody reads it any more is lost, without an error.
    """
    return TextIOWrapper(
        BufferedWriter(_Heedless(number, "w", closefd=False)),
        encoding=like.encoding,
        errors=like.errors,
        line_buffering=like.line_buffering,
        write_through=like.write_through,
    )
