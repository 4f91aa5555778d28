"""A call into librdkafka that may never return, or never be done, is given up, and whoever made it goes on without it.

librdkafka's `send_offsets_to_transaction` ignores its timeout while the broker that it takes for the coordinator of the
group cannot be reached (#5456), also where another one has long taken over, as when brokers are restarted one by one.

Keeps true
- Only looks count that this process was awake for: a call is not given up because the process was frozen.
- A call whose broker is away is waited for: what makes it a lost one is that the broker has answered others, for as
  many looks as half of the time has. The broker is the coordinator of the group whose offsets are committed; of a
  commit or an abort, whose coordinator no client can ask for, any. Nor does its loop count as hung meanwhile
  (`topics/health.py`). Who is asked to leave waits for no broker that is away.
- A coordinator that is slow holds up, and is no loss: it is waited for as long as a transaction may be open.
- What a call that was given up holds is let go when it returns after all, if ever.

Example
    unless_hung(lambda: producer.send_offsets_to_transaction(...), Wait(lambda: reader.reach_coordinator(place)))
"""

from collections.abc import Callable
from contextlib import suppress
from queue import Empty, Queue
from threading import Thread

import structlog

from schemas.errors import RoseError
from topics.asking import nothing
from topics.health import HEALTH
from topics.settings import TRANSACTION_MILLISECONDS

LOOK_SECONDS = 1.0
"""Between two looks."""

GIVEN_UP_SECONDS = 1.2 * TRANSACTION_MILLISECONDS / 1000
"""A transaction that lasts longer than TRANSACTION_MILLISECONDS is aborted by the broker, when it looks for such next.
A commit of offsets also waits, as long as a broker's session lasts, for a copy of the coordinator's log on one that
died: 6 s where ROSE starts the brokers, 9 s with Kafka's own settings."""

LEAVING_SECONDS = 5.0
"""The same for whoever is asked to leave, of what the next owner does again."""


class HungCall(RoseError):
    """It has not returned though the broker answers, or does not answer whoever wants to leave."""


class Wait:
    """For one call, which is looked at every so often."""

    def __init__(
        self,
        reach: Callable[[], object],
        *,
        excuse: Callable[[], object] = HEALTH.turned_over,
        wanted: Callable[[], bool] = lambda: True,
        look_seconds: float = LOOK_SECONDS,
        seconds: float = GIVEN_UP_SECONDS,
        leaving_seconds: float | None = None,
    ) -> None:
        """`reach` raises RoseError while the broker is away, `excuse` is called at looks at which that is so.

        `wanted`: whether the call is waited for even then. `seconds`: how long it is though the broker answers others,
        which is asked for in the second half of that; three looks or more. `leaving_seconds`: the same once it is not
        wanted, if that differs.
        """
        self.look_seconds = look_seconds
        self._reach, self._excuse, self._wanted = reach, excuse, wanted
        self._seconds = seconds
        self._leaving_seconds = seconds if leaving_seconds is None else leaving_seconds
        self._looks, self._answered, self._told = 0, 0, False

    def look(self) -> None:
        """It has not returned for a look's time more. Raises HungCall."""
        self._looks += 1
        half = (self._seconds if self._wanted() else self._leaving_seconds) / self.look_seconds / 2
        if self._looks <= half:
            return
        if self._answered >= half - 1:  # and the call had a look's time since: it may have returned amid that one
            seconds = self._looks * self.look_seconds
            raise HungCall(f"it has not returned for {seconds:.0f} s, though the broker answers others")
        if self._is_answered():
            self._answered += 1
        elif not self._wanted():
            raise HungCall("the broker answers nobody, and nobody waits for it any more")
        else:
            self._excuse()

    def _is_answered(self) -> bool:
        try:
            self._reach()
        except RoseError as error:
            if not self._told:
                structlog.get_logger("bus").warning("a call waits for the broker", reason=str(error))
            self._told = True
            return False
        return True


def unless_hung(call: Callable[[], object], wait: Wait) -> None:
    """Make the call, on a thread of its own, and wait for it. Raises HungCall, and what the call raises."""
    ended: Queue[BaseException | None] = Queue()  # no SimpleQueue: a signal amid its wait can make that endless
    Thread(target=_make, args=(call, ended), name="call", daemon=True).start()
    while True:
        raised, has_ended = None, False
        with suppress(Empty):
            raised, has_ended = ended.get(timeout=wait.look_seconds), True
        if not has_ended:
            wait.look()  # with nothing being handled: what the client raises amid that is never freed, nor its frames
            continue
        if raised is not None:
            try:
                raise raised
            finally:
                del raised  # its traceback has this frame, and so all that the call has
        return


def until_done(call: Callable[[float], bool], wait: Wait, meanwhile: Callable[[], None] = nothing) -> None:
    """Make a call that says within so many seconds whether it is done, and goes on when it is made again, until it is.

    `meanwhile` is called after each look; what it raises ends the wait. Raises HungCall, and what the call raises.
    """
    while not call(wait.look_seconds):
        wait.look()
        meanwhile()


def _make(call: Callable[[], object], ended: "Queue[BaseException | None]") -> None:
    try:
        call()
    except BaseException as error:  # noqa: BLE001
        ended.put(error)  # for the thread that waits
    else:
        ended.put(None)
