"""A call into librdkafka that may never return, or never be done, is given up, and whoever made it goes on without it.

librdkafka's `send_offsets_to_transaction` ignores its timeout while the broker that it takes for the coordinator of the
group cannot be reached (#5456), also where another one has long taken over, as when brokers are restarted one by one.

Keeps true
- Only looks count that this process was awake for: a call is not given up because the process was frozen.
- A call that waits for a broker that is away is waited for: what makes it a lost one is that the broker has answered
  others for half of the time; of a group's offsets the broker is its coordinator. Nor does its loop count as hung
  meanwhile (`topics/health.py`). Who is asked to leave waits for no broker that is away.
- A coordinator that is slow holds up, and is no loss: it is waited for until the broker has ended the transaction.
- What a call that was given up holds is let go when it returns after all, if ever.

Example
    unless_hung(lambda: producer.send_offsets_to_transaction(...), Wait(lambda: reader.reach_coordinator(place)))
"""

from collections.abc import Callable
from contextlib import suppress
from queue import Empty, Queue
from threading import Thread

from schemas.errors import RoseError
from topics.health import HEALTH
from topics.settings import TRANSACTION_MILLISECONDS

LOOK_SECONDS = 1.0
"""Between two looks."""

HUNG_SECONDS = 1.2 * TRANSACTION_MILLISECONDS / 1000
"""The broker has long ended a transaction that lasts longer than this: whoever gives up then gives up nothing that
might still be kept. A coordinator that is another's, or that waits until a dead copy of its log counts as one, needs
some ten seconds of it with Kafka's own settings."""


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
        seconds: float = HUNG_SECONDS,
    ) -> None:
        """`reach` raises RoseError while no broker answers, `excuse` is called at looks at which that is so.

        `wanted`: whether the call is waited for even then. One that is answered others is for `seconds`.
        """
        self.look_seconds = look_seconds
        self._reach, self._excuse, self._wanted = reach, excuse, wanted
        self._half = seconds / look_seconds / 2
        self._looks, self._answered = 0, 0

    def look(self) -> None:
        """It has not returned for a look's time more. Raises HungCall."""
        self._looks += 1
        if self._looks <= self._half:
            return
        if self._answered >= self._half - 1:  # and the call had a look's time since: it may have returned amid that one
            seconds = self._looks * self.look_seconds
            raise HungCall(f"it has not returned for {seconds:.0f} s, though the broker answers others")
        if _answers(self._reach):
            self._answered += 1
        elif not self._wanted():
            raise HungCall("no broker answers, and nobody waits for it any more")
        else:
            self._excuse()


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


def until_done(call: Callable[[float], bool], wait: Wait) -> None:
    """Make a call that says within so many seconds whether it is done, and goes on when it is made again, until it is.

    Raises HungCall, and what the call raises.
    """
    while not call(wait.look_seconds):
        wait.look()


def _make(call: Callable[[], object], ended: "Queue[BaseException | None]") -> None:
    try:
        call()
    except BaseException as error:  # noqa: BLE001
        ended.put(error)  # for the thread that waits
    else:
        ended.put(None)


def _answers(reach: Callable[[], object]) -> bool:
    try:
        reach()
    except RoseError:
        return False
    return True
