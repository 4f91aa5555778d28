"""Runs a long function in bounded pieces, on a thread that advances only while it is resumed.

Keeps true
- Between two pieces the function is halted at a call that it is about to make or has just made. The caller may
  therefore change process-wide values before a piece and restore them after. This does not hold if the function makes
  no such call for long (one C call, a loop without calls) or may not be halted (an import): the caller waits a little,
  and the function then continues in parallel.
- The function is never halted while the standard library holds a lock and calls other code (an import, a log call): the
  caller would wait for the lock forever.
"""

import concurrent.futures.thread
import functools
import logging
import queue
import sys
import threading
from collections.abc import Callable
from time import perf_counter
from types import FrameType
from typing import Any, Generic, TypeVar, cast

Result = TypeVar("Result")

LOCKS = frozenset(
    {"<frozen importlib._bootstrap>"}
    | {str(module.__file__) for module in (functools, logging, queue, threading, concurrent.futures.thread)}
)
"""Files whose functions hold locks while they call others."""

GRACE_SECONDS = 0.002
"""How long the caller waits after the end of a piece; a thread that is not halted by then is inside a C call."""


_current = threading.local()
"""The `TimeSlicedCall` of the current thread."""


def yield_slice() -> None:
    """End the current piece, for a function that waits for the thread that resumes it."""
    _current.pieces.end_slice()


class TimeSlicedCall(Generic[Result]):
    """One run of `function` in pieces."""

    def __init__(self, function: Callable[[], Result], name: str) -> None:
        self.slices = 0
        self.longest_seconds = 0.0
        """Longest time that a caller of `resume` has waited."""
        self._function = function
        self._deadline = 0.0
        self._go = threading.Semaphore(0)
        self._halted = threading.Semaphore(0)
        self._out = False
        """Whether the thread was not halted at the end of the last piece."""
        self._made: Result | None = None
        self._error: Exception | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def resume(self, seconds: float) -> bool:
        """Let the function run for `seconds`. Return whether it is done."""
        if self._done.is_set():
            return True
        began = perf_counter()
        self._deadline = began + seconds
        if not self._out or self._halted.acquire(blocking=False):
            self._go.release()
        self._out = not self._halted.acquire(timeout=seconds + GRACE_SECONDS)
        self.slices += 1
        self.longest_seconds = max(self.longest_seconds, perf_counter() - began)
        return self._done.is_set() and not self._out

    def end_slice(self) -> None:
        """End the current piece. Only the function itself may call this."""
        self._deadline = 0.0

    def result(self) -> Result:
        """Return what the function returned, after it is done. Raises what the function raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return cast(Result, self._made)

    def _run(self) -> None:
        self._go.acquire()
        _current.pieces = self
        sys.setprofile(self._trace_function())
        try:
            self._made = self._function()
        except Exception as error:  # noqa: BLE001  `result` raises it
            self._error = error.with_traceback(None)
        finally:
            sys.setprofile(None)
            self._done.set()
            self._halted.release()

    def _trace_function(self) -> Callable[[FrameType, str, Any], None]:
        """Return the profile function, which Python calls at each call and return on this thread."""
        holding = 0

        def halt_if_due(frame: FrameType, event: str, _: Any) -> None:
            nonlocal holding
            if event == "call":
                holding += frame.f_code.co_filename in LOCKS
            elif event == "return":
                holding -= frame.f_code.co_filename in LOCKS
            if not holding and perf_counter() >= self._deadline:
                self._halted.release()
                self._go.acquire()

        return halt_if_due
