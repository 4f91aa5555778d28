"""Calls of a transaction that librdkafka breaks off though nothing is lost: they are made again, as it asks for.

Keeps true
- What was written in the transaction is still in it, and the call that goes through in the end does what it should.
- Nothing is begun again TRANSACTION_SECONDS after the first time, whether a broker answers or not.
"""

import time
from collections.abc import Callable

from confluent_kafka import KafkaError, KafkaException

TRANSACTION_SECONDS = 60.0
"""How long beginning, committing or aborting a transaction may take before it is an error."""

AGAIN_SECONDS = 0.2
"""Before a call is made again that was refused for the moment."""


def in_turns(call: Callable[[float], object]) -> Callable[[float], bool]:
    """Goes on with a call of a transaction for so many seconds; whether it is done. Raises KafkaException."""
    deadline = time.monotonic() + TRANSACTION_SECONDS

    def go_on(seconds: float) -> bool:
        began = time.monotonic()
        try:
            call(seconds)
        except KafkaException as error:
            told: KafkaError = error.args[0]
            goes_on = told.retriable() or told.code() == KafkaError._TIMED_OUT
            now = time.monotonic()
            if not goes_on or now > deadline:
                raise
            time.sleep(max(0.0, began + seconds - now))  # refused at once: who counts turns takes each for its time
            return False
        return True

    return go_on


def until_taken(call: Callable[[float], object]) -> None:
    """Make a call that cannot be gone on with, again while it is refused for the moment: librdkafka has no producer id
    then, or has not heard yet what its coordinator can do.

    `call` takes the seconds that it has. Raises KafkaException.
    """
    deadline = time.monotonic() + TRANSACTION_SECONDS
    while True:
        try:
            call(deadline - time.monotonic())
        except KafkaException as error:
            told: KafkaError = error.args[0]
            if not told.retriable() or time.monotonic() + AGAIN_SECONDS >= deadline:
                raise
        else:
            return
        time.sleep(AGAIN_SECONDS)
