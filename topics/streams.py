"""Text streams on a file descriptor: like another stream, or without an error when the reader is gone."""

from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any


class _UnreadFile(FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def unread_stream(number: int, like: TextIOWrapper) -> TextIOWrapper:
    """A stream `like` this one on the descriptor `number`; output without a reader is lost without an error."""
    return stream_like(like, _UnreadFile(number, "w", closefd=False))


def stream_like(like: TextIOWrapper, file: FileIO, *, errors: str | None = None) -> TextIOWrapper:
    """A stream `like` this one on another file. `errors`: the handler of characters that the encoding does not have."""
    return TextIOWrapper(
        BufferedWriter(file),
        encoding=like.encoding,
        errors=errors or like.errors,
        line_buffering=like.line_buffering,
        write_through=like.write_through,
    )
