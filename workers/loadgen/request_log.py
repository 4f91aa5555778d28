"""`serving.jsonl`: the latency of users' requests, one JSON line a request.

Keeps true: a line is written in one piece when its request has ended; several writers may share the file.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec


class UserRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request to a serving engine, by the clock of its sender."""

    at: float
    """Unix seconds at which the request was due."""
    seconds: float
    """Time from `at` until its last token or its failure."""
    prompt_tokens: int
    tokens: int = 0
    """Tokens that came."""
    first_token_seconds: float | None = None
    """TTFT: from `at` to its first token; None if it got none."""
    token_seconds: float | None = None
    """TPOT: the mean time between its tokens; None where there were fewer than two."""
    error: str = ""
    """Why it failed; empty if it did not."""


REQUEST_LOG = "serving.jsonl"


class RequestLog:
    """Appends to the request log of a run folder."""

    def __init__(self, run_folder: Path) -> None:
        run_folder.mkdir(parents=True, exist_ok=True)
        self._file = (run_folder / REQUEST_LOG).open("ab", buffering=0)

    def append(self, line: UserRequest) -> None:
        """Write the line of a request."""
        self._file.write(msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_request_log(run_folder: Path) -> Sequence[UserRequest]:
    """The complete lines of a run's request log, sorted by time; empty if the file does not exist."""
    file = run_folder / REQUEST_LOG
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    whole = [msgspec.json.decode(line, type=UserRequest) for line in lines if line.endswith(b"\n")]
    return sorted(whole, key=lambda each: each.at)
