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

Example:
    run_guarded(lambda: producer.send_offsets_to_transaction(...), CallWatchdog(lambda:
    reader.reach_coordinator(place)))
"""

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, Queue

import structlog
from confluent_kafka import KafkaError, KafkaException

from rose.schemas.errors import RoseError
from rose.topics.backoff import Backoff
from rose.topics.errors import BusError, is_transient
from rose.topics.health import HEALTH
from rose.topics.processes import start_thread
from rose.topics.queries import noop
from rose.topics.settings import TRANSACTION_MILLISECONDS

WATCHDOG_SECONDS = 1.0
"""Time between two checks."""

HUNG_CALL_SECONDS = 1.2 * TRANSACTION_MILLISECONDS / 1000
"""How long a call may take although the broker answers other clients. The broker aborts a transaction that lasts longer
than TRANSACTION_MILLISECONDS at its next check. A commit of offsets may also wait for a replica of the coordinator's
log on a broker that died, for as long as a broker's session: 6 s for brokers that ROSE starts, 9 s by Kafka's default.
"""

HUNG_CALL_LEAVING_SECONDS = 5.0
"""The same bound for a process that is asked to stop, for calls whose work the next owner repeats."""


class HungCall(RoseError):
    """A call has not returned although the broker answers, or the broker is away and the process wants to stop."""


class CallWatchdog:
    """Decides when one call is given up; `check` is called at regular intervals while the call runs."""

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
        """`ask_broker` raises RoseError while the broker is away; `on_broker_away` is called at each check then.

        `still_needed`: whether the call is waited for while the broker is away. `check_seconds`: time between two
        checks. `seconds`: how long the call is waited for although the broker answers other clients, which is checked
        in the second half of that time; at least three checks. `leaving_seconds`: the same once the call is not
        needed, if it differs.
        """
        self.check_seconds = check_seconds
        self._ask_broker, self._on_broker_away, self._still_needed = ask_broker, on_broker_away, still_needed
        self._seconds = seconds
        self._leaving_seconds = seconds if leaving_seconds is None else leaving_seconds
        self._checks, self._answered, self._has_warned = 0, 0, False

    def check(self) -> None:
        """Called once per `check_seconds` while the call has not returned. Raises HungCall to give the call up."""
        self._checks += 1
        half = (self._seconds if self._still_needed() else self._leaving_seconds) / self.check_seconds / 2
        if self._checks <= half:
            return
        if self._answered >= half - 1:  # the last answer was one check ago, so the call had time to return after it
            seconds = self._checks * self.check_seconds
            raise HungCall(f"it has not returned for {seconds:.0f} s, though the broker answers others")
        if self._broker_answers():
            self._answered += 1
        elif not self._still_needed():
            raise HungCall("the broker answers no client, and the call is not needed any more")
        else:
            self._on_broker_away()

    def _broker_answers(self) -> bool:
        try:
            self._ask_broker()
        except RoseError as error:
            if not self._has_warned:
                structlog.get_logger("bus").warning("call_waits_for_broker", reason=str(error))
            self._has_warned = True
            return False
        return True


Guarded = tuple[Callable[[], object], "Queue[BaseException | None]"]
"""A call, and the queue for its exception; None if it raises none."""

_IDLE: "list[Queue[Guarded]]" = []
"""The queues of the threads that wait for a call. A thread is kept, because the system may refuse to start another."""

os.register_at_fork(after_in_child=_IDLE.clear)  # a child has none of the threads


def run_guarded(call: Callable[[], object], watchdog: CallWatchdog) -> None:
    """Run the call on a thread that runs nothing else meanwhile, and wait for it.

    Raises HungCall, ThreadRefused, or the exception of the call.
    """
    ended: Queue[BaseException | None] = Queue()  # a signal during the wait of a SimpleQueue can make the wait endless
    try:
        calls = _IDLE.pop()
    except IndexError:
        calls = Queue()
        start_thread(_serve_calls, calls, name="call")
    calls.put((call, ended))
    while True:
        raised, has_ended = None, False
        with suppress(Empty):
            raised, has_ended = ended.get(timeout=watchdog.check_seconds), True
        if not has_ended:
            # Outside of any exception handler: an exception that the client raises in a handler is never freed, nor are
            # its frames.
            watchdog.check()
            continue
        if raised is not None:
            try:
                raise raised
            finally:
                del raised  # its traceback refers to this frame, and so to all objects of the call
        return


def poll_until_done(call: Callable[[float], bool], watchdog: CallWatchdog, on_wait: Callable[[], None] = noop) -> None:
    """Repeat a call until it returns True. The call takes the seconds that it may last and continues when repeated.

    `on_wait` is called after each check; an exception of `on_wait` ends the wait. Raises HungCall, or the exception of
    the call.
    """
    while not call(watchdog.check_seconds):
        watchdog.check()
        on_wait()


def _serve_calls(calls: "Queue[Guarded]") -> None:
    while True:
        _run_call(*calls.get(), calls)  # without a variable, which would hold the call until the next one


def _run_call(call: Callable[[], object], ended: "Queue[BaseException | None]", calls: "Queue[Guarded]") -> None:
    try:
        call()
    except BaseException as error:  # noqa: BLE001
        _IDLE.append(calls)
        ended.put(error)  # raised again on the thread that waits
    else:
        _IDLE.append(calls)
        ended.put(None)


TRANSACTION_SECONDS = 60.0
"""How long beginning, committing or aborting a transaction may take before it is an error."""

RETRY_SECONDS = 0.2
"""Pause before a refused call is repeated, and before the first repetition of a transaction."""

MAX_RETRY_SECONDS = 5.0
"""Longest pause before a transaction is repeated."""


def in_time_slices(call: Callable[[float], object]) -> Callable[[float], bool]:
    """Make a transaction call resumable: the returned function runs it for some seconds and returns whether it is done.

    The returned function raises KafkaException for an error that is not transient or asks for an abort, and for any
    error after TRANSACTION_SECONDS.
    """
    deadline = time.monotonic() + TRANSACTION_SECONDS

    def continue_call(seconds: float) -> bool:
        started_at = time.monotonic()
        try:
            call(seconds)
        except KafkaException as error:
            now, cause = time.monotonic(), error.args[0]
            if cause.txn_requires_abort() or not is_transient(cause) or now > deadline:
                raise
            # The caller counts slices as time, so a slice that is refused at once lasts as long as the others.
            time.sleep(max(0.0, started_at + seconds - now))
            return False
        return True

    return continue_call


def retry_until_accepted(call: Callable[[float], object]) -> None:
    """Repeat a call that cannot be resumed while it is refused with a retriable error.

    librdkafka refuses such a call while it has no producer id, or does not know the features of its coordinator yet.
    `call` takes the seconds that it may last. Raises KafkaException.
    """
    deadline = time.monotonic() + TRANSACTION_SECONDS
    while True:
        try:
            call(deadline - time.monotonic())
        except KafkaException as error:
            refused: KafkaError = error.args[0]  # after a timeout, which is transient too, the call may have been done
            if not refused.retriable() or time.monotonic() + RETRY_SECONDS >= deadline:
                raise
        else:
            return
        time.sleep(RETRY_SECONDS)


def retry_until_committed(transaction: Callable[[], None], was_aborted: Callable[[BusError], bool]) -> None:
    """Repeat a transaction while it fails and `was_aborted` returns that the failed one is not on the log.

    Raises BusError: the last failure, if it may be on the log or TRANSACTION_SECONDS are over.
    """
    deadline = time.monotonic() + TRANSACTION_SECONDS
    backoff = Backoff(RETRY_SECONDS, MAX_RETRY_SECONDS, reset_seconds=math.inf)
    while True:
        try:
            transaction()
        except BusError as error:
            pause = backoff.failed(time.monotonic())
            if backoff.until > deadline or not was_aborted(error):
                raise
            structlog.get_logger("bus").warning("transaction_retried", reason=str(error), retry_seconds=pause)
        else:
            return
        time.sleep(pause)  # until leaders and coordinators have settled, which the broker does not report
