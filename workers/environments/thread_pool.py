"""The threads of an event loop's default pool, for environments that call `asyncio.to_thread`.

Keeps true
- A call that hangs takes its own thread and no other's: there is one for each call, and an idle one serves again.
- A process ends whatever hangs: nobody joins these threads.
- Calls that go on after whoever awaited them has given them up are counted.
"""

import os
import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock, Thread
from typing import Any, ParamSpec, TypeVar

from rose.workers.environments.forked_child import end_if_forked

P = ParamSpec("P")
T = TypeVar("T")

IDLE_KEPT = 8
"""Threads that wait for the next call, at most."""

_getpid = os.getpid

Call = Callable[[], None]


class _Outcome(Future[T]):
    """Future of one call."""

    def __init__(self, stuck: "set[_Outcome[Any]]") -> None:
        super().__init__()
        self._stuck = stuck
        self._pid = _getpid()

    def cancel(self) -> bool:
        """Cancel the future; a call that runs on is counted as stuck until it ends."""
        cancelled = super().cancel()
        if self.running():
            self._stuck.add(self)
            if not self.running():  # it has ended meanwhile
                self._stuck.discard(self)
        return cancelled

    def run(self, call: Callable[[], T]) -> None:
        """Make the call, in the present thread."""
        if not self.set_running_or_notify_cancel():
            return
        try:
            outcome = call()
        except BaseException as error:  # noqa: BLE001 - user code: whoever awaits the call is told
            end_if_forked(self._pid, error)
            self.set_exception(error)
        else:
            end_if_forked(self._pid)
            self.set_result(outcome)
        self._stuck.discard(self)


class EnvironmentThreadPool(ThreadPoolExecutor):
    """A default executor of an event loop. asyncio takes no other class than ThreadPoolExecutor for it."""

    def __init__(self) -> None:
        super().__init__()
        self._guard = Lock()
        self._calls: queue.Queue[Call | None] = queue.Queue()
        self._waiting = 0
        self._stuck: set[_Outcome[Any]] = set()

    @property
    def stuck(self) -> int:
        """Calls that go on though they were given up."""
        return len(self._stuck)

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call the function in a thread that does nothing else meanwhile."""
        outcome = _Outcome[T](self._stuck)
        call = partial(outcome.run, partial(function, *args, **kwargs))
        with self._guard:
            served = self._waiting > 0
            self._waiting -= served
        if served:
            self._calls.put(call)
        else:
            Thread(target=self._serve, args=(call,), name="environment-call", daemon=True).start()
        return outcome

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads that wait; a call that hangs is left behind."""
        with self._guard:
            idle, self._waiting = self._waiting, -(1 << 60)
        for _ in range(max(0, idle)):
            self._calls.put(None)

    def _serve(self, call: Call | None) -> None:
        while call is not None:
            call()
            del call  # and all that it held
            with self._guard:
                if not 0 <= self._waiting < IDLE_KEPT:
                    return
                self._waiting += 1
            call = self._calls.get()
