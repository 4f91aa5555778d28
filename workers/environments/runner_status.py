"""Signs of life of a runner, in memory that its process shares with the worker.

Keeps true: they can be read whatever blocks that process, and after whatever has ended it.
"""

import asyncio
import mmap
import os
from collections.abc import Callable, Coroutine, Generator, MutableSequence
from typing import Any, TypeVar, cast

from rose.workers.environments.jobs import Job

T = TypeVar("T")

StatusCounters = MutableSequence[int]
"""One number at each of the places below."""

BEATS, LIVE, STUCK, RUNNING = range(4)
"""RUNNING: 0 while no job's code runs; 1 more than the number of a job while that does, also when it ends the process.
"""

COUNTERS = 4

COUNTERS_BYTES = COUNTERS * 8


def map_counters(shared: int) -> StatusCounters:
    """The signs of life in this shared memory, whose descriptor is closed."""
    memory = mmap.mmap(shared, COUNTERS_BYTES)
    os.close(shared)
    return cast("StatusCounters", memoryview(memory).cast("q"))


class TrackedCall(Coroutine[Any, Any, T]):
    """A call into an environment, which is named in the signs of life whenever its own code runs.

    `look` is called with false before that and with true after it, while it is still named. Where `has_left` is true
    the code is cancelled instead.
    """

    def __init__(
        self,
        code: Coroutine[Any, Any, T],
        signs: StatusCounters,
        job: Job | None,
        look: Callable[[bool], None],
        has_left: Callable[[], bool],
    ) -> None:
        self._code = code
        self._signs = signs
        self._look = look
        self._has_left = has_left
        self._mark = job.ticket + 1 if job is not None and isinstance(job.ticket, int) else -1

    def send(self, value: Any) -> Any:
        """Continue the call; a call whose runner has left is cancelled."""
        if self._has_left():
            return self._run(self._code.throw, asyncio.CancelledError())
        return self._run(self._code.send, value)

    def throw(self, *error: Any) -> Any:
        """Raise an error inside the call."""
        return self._run(self._code.throw, *error)

    def close(self) -> None:
        """Close the call's coroutine."""
        self._code.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._code.__await__()

    def _run(self, code: Callable[..., Any], *given: Any) -> Any:
        self._look(False)
        outer, self._signs[RUNNING] = self._signs[RUNNING], self._mark
        try:
            return code(*given)
        finally:
            self._look(True)
            self._signs[RUNNING] = outer  # of a loop that runs within another's
