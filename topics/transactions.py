"""Calls of Kafka transactions: retried while the broker refuses them for the moment, given up when they hang.

librdkafka's `send_offsets_to_transaction` ignores its timeout while the broker that it takes for the coordinator of the
group cannot be reached (#5456), even when another broker has long taken over.

Keeps true
- A retried call continues the same transaction: what was written in it is still in it.
- A whole transaction is repeated only once the last one was aborted, with growing pauses, for at most
  TRANSACTION_SECONDS.
- A call is given up only if this process was awake and the broker answered others for half of the time. The broker is
  the coordinator of the group whose offsets are committed; for a commit or an abort it is any broker. While the broker
  is away the call is waited for, and the process does not count as hung (`topics/health.py`), unless the process has
  been asked to stop.
- A slow coordinator is waited for as long as a transaction may be open.
- What a call that was given up holds is freed when the call returns, if it ever does.

Example
    run_guarded(lambda: producer.send_offsets_to_transaction(...), CallWatchdog(lambda:
    reader.reach_coordinator(place)))
"""

import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, Queue
from threading import Thread

import structlog
from confluent_kafka import KafkaError, KafkaException

from rose.schemas.errors import RoseError
from rose.topics.errors import BusError
from rose.topics.health import HEALTH
from rose.topics.queries import noop
from rose.topics.settings import TRANSACTION_MILLISECONDS

WATCHDOG_SECONDS = 1.0
"""Between two looks."""

HUNG_CALL_SECONDS = 1.2 * TRANSACTION_MILLISECONDS / 1000
"""A transaction that lasts longer than TRANSACTION_MILLISECONDS is aborted by the broker, when it looks for such next.
A commit of offsets also waits, as long as a broker's session lasts, for a copy of the coordinator's log on one that
died: 6 s where ROSE starts the brokers, 9 s with Kafka's own settings."""

HUNG_CALL_LEAVING_SECONDS = 5.0
"""The same for whoever is asked to leave, of what the next owner does again."""


class HungCall(RoseError):
    """It has not returned though the broker answers, or does not answer whoever wants to leave."""


class CallWatchdog:
    """For one call, which is looked at every so often."""

    def __init__(
        self,
        ask_broker: Callable[[], object],
        *,
        on_broker_away: Callable[[], object] = HEALTH.report_progress,
        still_needed: Callable[[], bool] = lambda: True,
        check_seconds: float = WATCHDOG_SECONDS,
        seconds: float = HUNG_CALL_SECONDS,
        leaving_seconds: float | None = None,
    ) -> None:
        """`ask_broker` raises RoseError while the broker is away, `on_broker_away` is called at looks at which that is
        so.

        `still_needed`: whether the call is waited for even then. `seconds`: how long it is though the broker answers
        others, which is asked for in the second half of that; three looks or more. `leaving_seconds`: the same once it
        is not wanted, if that differs.
        """
        self.check_seconds = check_seconds
        self._ask_broker, self._on_broker_away, self._still_needed = ask_broker, on_broker_away, still_needed
        self._seconds = seconds
        self._leaving_seconds = seconds if leaving_seconds is None else leaving_seconds
        self._checks, self._answered, self._has_warned = 0, 0, False

    def check(self) -> None:
        """It has not returned for a look's time more. Raises HungCall."""
        self._checks += 1
        half = (self._seconds if self._still_needed() else self._leaving_seconds) / self.check_seconds / 2
        if self._checks <= half:
            return
        if self._answered >= half - 1:  # and the call had a look's time since: it may have returned amid that one
            seconds = self._checks * self.check_seconds
            raise HungCall(f"it has not returned for {seconds:.0f} s, though the broker answers others")
        if self._broker_answers():
            self._answered += 1
        elif not self._still_needed():
            raise HungCall("the broker answers nobody, and nobody waits for it any more")
        else:
            self._on_broker_away()

    def _broker_answers(self) -> bool:
        try:
            self._ask_broker()
        except RoseError as error:
            if not self._has_warned:
                structlog.get_logger("bus").warning("a call waits for the broker", reason=str(error))
            self._has_warned = True
            return False
        return True


def run_guarded(call: Callable[[], object], watchdog: CallWatchdog) -> None:
    """Make the call, on a thread of its own, and wait for it. Raises HungCall, and what the call raises."""
    ended: Queue[BaseException | None] = Queue()  # no SimpleQueue: a signal amid its wait can make that endless
    Thread(target=_run_call, args=(call, ended), name="call", daemon=True).start()
    while True:
        raised, has_ended = None, False
        with suppress(Empty):
            raised, has_ended = ended.get(timeout=watchdog.check_seconds), True
        if not has_ended:
            # With nothing being handled: what the client raises amid that is never freed, nor its frames.
            watchdog.check()
            continue
        if raised is not None:
            try:
                raise raised
            finally:
                del raised  # its traceback has this frame, and so all that the call has
        return


def poll_until_done(call: Callable[[float], bool], watchdog: CallWatchdog, on_wait: Callable[[], None] = noop) -> None:
    """Make a call that says within so many seconds whether it is done, and goes on when it is made again, until it is.

    `on_wait` is called after each look; what it raises ends the wait. Raises HungCall, and what the call raises.
    """
    while not call(watchdog.check_seconds):
        watchdog.check()
        on_wait()


def _run_call(call: Callable[[], object], ended: "Queue[BaseException | None]") -> None:
    try:
        call()
    except BaseException as error:  # noqa: BLE001
        ended.put(error)  # for the thread that waits
    else:
        ended.put(None)


TRANSACTION_SECONDS = 60.0
"""How long beginning, committing or aborting a transaction may take before it is an error."""

RETRY_SECONDS = 0.2
"""Before a call is made again that was refused for the moment, and a transaction for the first time."""

MAX_RETRY_SECONDS = 5.0
"""Before a transaction is made again: each pause is twice the one before."""

PERMANENT_REJECTIONS = (
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.RECORD_LIST_TOO_LARGE,
    KafkaError.INVALID_RECORD,
    KafkaError.POLICY_VIOLATION,
)
"""What a broker says of a record that it will refuse again."""


def in_time_slices(call: Callable[[float], object]) -> Callable[[float], bool]:
    """Goes on with a call of a transaction for so many seconds; whether it is done. Raises KafkaException."""
    deadline = time.monotonic() + TRANSACTION_SECONDS

    def continue_call(seconds: float) -> bool:
        started_at = time.monotonic()
        try:
            call(seconds)
        except KafkaException as error:
            error_code: KafkaError = error.args[0]
            may_continue = error_code.retriable() or error_code.code() == KafkaError._TIMED_OUT
            now = time.monotonic()
            if not may_continue or now > deadline:
                raise
            time.sleep(
                max(0.0, started_at + seconds - now)
            )  # refused at once: who counts turns takes each for its time
            return False
        return True

    return continue_call


def retry_until_accepted(call: Callable[[float], object]) -> None:
    """Make a call that cannot be gone on with, again while it is refused for the moment: librdkafka has no producer id
    then, or has not heard yet what its coordinator can do.

    `call` takes the seconds that it has. Raises KafkaException.
    """
    deadline = time.monotonic() + TRANSACTION_SECONDS
    while True:
        try:
            call(deadline - time.monotonic())
        except KafkaException as error:
            has_warned: KafkaError = error.args[0]
            if not has_warned.retriable() or time.monotonic() + RETRY_SECONDS >= deadline:
                raise
        else:
            return
        time.sleep(RETRY_SECONDS)


def retry_until_committed(transaction: Callable[[], None], was_aborted: Callable[[BusError], bool]) -> None:
    """Make a transaction, again while `was_aborted` says that the one that failed so is not on the log. Raises
    BusError.
    """
    deadline, pause = time.monotonic() + TRANSACTION_SECONDS, RETRY_SECONDS
    while True:
        try:
            transaction()
        except BusError as error:
            if time.monotonic() + pause > deadline or not was_aborted(error):
                raise
            structlog.get_logger("bus").warning("a transaction is made again", reason=str(error), seconds=pause)
        else:
            return
        time.sleep(pause)  # for leaders and coordinators to settle: who undid it does not tell when
        pause = min(2 * pause, MAX_RETRY_SECONDS)
