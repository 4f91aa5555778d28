"""Signals amid whatever the main thread does."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EVERY_SECONDS = 0.01
HANDLED_SECONDS = 0.005
"""Longer than the waits that are tried: such a wait is over by the time at which it would go on."""


@contextmanager
def signals_come() -> Iterator[None]:
    """Every few milliseconds, with a handler that takes its time. On the main thread."""

    def handle(number: int, frame: FrameType | None) -> None:
        time.sleep(HANDLED_SECONDS)  # this is the fault

    def send() -> None:
        while not over.wait(EVERY_SECONDS):
            signal.pthread_kill(main, signal.SIGUSR1)

    main, over, before = threading.get_ident(), threading.Event(), signal.signal(signal.SIGUSR1, handle)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        over.set()
        sender.join()
        signal.signal(signal.SIGUSR1, before)
