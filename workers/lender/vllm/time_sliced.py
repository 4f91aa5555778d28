"""A long function in bounded pieces: on a thread of its own that moves only while it is let.

Keeps true
- Between two pieces the function stands still at a call that it was about to make or had just made. So whoever lets it
  go on may change what belongs to the process before a piece and change it back after. Not so where it makes no such
  call for long (one call of C, a loop without calls) or may not be halted (an import): that is waited for a little, and
  then goes on beside its host.
- It never stands still where Python's own library holds a lock while it calls others (an import, a log line): the host
  would wait for that lock for ever.
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
"""How long after its end a piece is waited for; then it is inside a call of C, and left there."""


_current = threading.local()
"""Of a thread that runs in pieces: its `TimeSlicedCall`."""


def yield_slice() -> None:
    """End the piece in which this is called: what the caller waits for is done by whoever lets it go on."""
    _current.pieces.end_slice()


class TimeSlicedCall(Generic[Result]):
    """One run of `function`."""

    def __init__(self, function: Callable[[], Result], name: str) -> None:
        self.slices = 0
        self.longest_seconds = 0.0
        """Of a piece, as who let it go on waited."""
        self._function = function
        self._deadline = 0.0
        self._go = threading.Semaphore(0)
        self._halted = threading.Semaphore(0)
        self._out = False
        """Whether it was not seen to halt after the last piece."""
        self._made: Result | None = None
        self._error: Exception | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def resume(self, seconds: float) -> bool:
        """Let it go on for so long; whether it is done now."""
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
        """The present piece; for the function alone."""
        self._deadline = 0.0

    def result(self) -> Result:
        """What the function returned, once it is done. Raises what it raised."""
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
        except Exception as error:  # noqa: BLE001  whatever it is, it is the caller's to know
            self._error = error.with_traceback(None)
        finally:
            sys.setprofile(None)
            self._done.set()
            self._halted.release()

    def _trace_function(self) -> Callable[[FrameType, str, Any], None]:
        """Called by Python at each call and return on this thread."""
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
