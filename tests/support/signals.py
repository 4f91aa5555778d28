"""Signals that interrupt the main thread."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EVERY_SECONDS = 0.01
HANDLED_SECONDS = 0.005
"""Duration of the signal handler. It exceeds the tested waits, so that a wait is over when it would continue."""


@contextmanager
def signals_come() -> Iterator[None]:
    """Interrupt the main thread every few milliseconds with a slow handler."""

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
