"""Transactions, and calls of one, that are broken off though nothing is lost: they are made again.

Keeps true
- What was written in the transaction is still in it, and the call that goes through in the end does what it should.
- A whole transaction is made again once it is undone, with a pause that grows.
- Nothing is begun again TRANSACTION_SECONDS after the first time, whether a broker answers or not.
"""

import time
from collections.abc import Callable

import structlog
from confluent_kafka import KafkaError, KafkaException

from topics.errors import BusError

TRANSACTION_SECONDS = 60.0
"""How long beginning, committing or aborting a transaction may take before it is an error."""

AGAIN_SECONDS = 0.2
"""Before a call is made again that was refused for the moment, and a transaction for the first time."""

LONGEST_SECONDS = 5.0
"""Before a transaction is made again: each pause is twice the one before."""

NEVER_TAKEN = (
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.RECORD_LIST_TOO_LARGE,
    KafkaError.INVALID_RECORD,
    KafkaError.POLICY_VIOLATION,
)
"""What a broker says of a record that it will refuse again."""


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


def until_kept(transaction: Callable[[], None], undoes: Callable[[BusError], bool]) -> None:
    """Make a transaction, again while `undoes` says that the one that failed so is not on the log. Raises BusError."""
    deadline, pause = time.monotonic() + TRANSACTION_SECONDS, AGAIN_SECONDS
    while True:
        try:
            transaction()
        except BusError as error:
            if time.monotonic() + pause > deadline or not undoes(error):
                raise
            structlog.get_logger("bus").warning("a transaction is made again", reason=str(error), seconds=pause)
        else:
            return
        time.sleep(pause)  # for leaders and coordinators to settle: who undid it does not tell when
        pause = min(2 * pause, LONGEST_SECONDS)
