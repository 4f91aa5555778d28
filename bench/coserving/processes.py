"""The benchmark's end of a client process. Keeps true: a client never outlives the block in which it was started."""

import select
import subprocess
import sys
from typing import TypeVar

import msgspec

from rose.schemas.errors import RoseError

READY_SECONDS = 60.0

Measured = TypeVar("Measured")


class ClientError(RoseError):
    """A client ended without a result."""


class Client:
    """A client process from its task to its result; a context manager."""

    def __init__(self, kind: str, task: msgspec.Struct) -> None:
        """Start a client. `kind`: users, rollouts or guests."""
        self._kind = kind
        program = ["bench.coserving.guests"] if kind == "guests" else ["bench.coserving.clients", kind]
        self._process = subprocess.Popen(
            [sys.executable, "-m", *program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.say(msgspec.json.encode(task))

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def say(self, line: bytes) -> None:
        """Write a line to the client. Raises ClientError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise ClientError(f"a process of {self._kind} ended before its time") from error

    def wait_until_ready(self) -> None:
        """Wait until the client is ready. Raises ClientError."""
        self._line(READY_SECONDS)

    def result(self, measured: type[Measured], *, seconds: float) -> Measured:
        """Return the client's result, after waiting at most `seconds`. Raises ClientError."""
        return msgspec.json.decode(self._line(seconds), type=measured)

    def _line(self, seconds: float) -> bytes:
        assert self._process.stdout is not None
        # A client prints two lines, flushes each, and reads input between them: no line is left in a buffer.
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            raise ClientError(f"a process of {self._kind} wrote nothing for {seconds:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise ClientError(f"a process of {self._kind} ended with status {self._process.wait()}")
        return line
