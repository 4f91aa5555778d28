"""A call into librdkafka that may never return is given up, and whoever made it goes on without it.

librdkafka's `send_offsets_to_transaction` ignores its timeout while the broker that it takes for the coordinator of the
group cannot be reached (#5456), also where another one has long taken over, as when brokers are restarted one by one.

Keeps true
- Only looks count that this process was awake for: a call is not given up because the process was frozen.
- A call that waits for a broker that is away is waited for: what makes it a lost one is that the broker has answered
  others for half of the time. Nor does its loop count as hung meanwhile (`topics/health.py`).
- What a call that was given up holds is let go when it returns after all, if ever.

Example
    unless_hung(lambda: producer.send_offsets_to_transaction(...), lambda: reach(settings))
"""

from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread

from schemas.errors import RoseError
from topics.health import HEALTH

LOOK_SECONDS = 1.0
"""Between two looks."""

HUNG_SECONDS = 5.0
"""A coordinator is another's place within one or two; so is a small request answered by a busy broker."""


class HungCall(RoseError):
    """It has not returned though the broker answers."""


def unless_hung(
    call: Callable[[], object],
    reach: Callable[[], object],
    *,
    excuse: Callable[[], object] = HEALTH.turned_over,
    look_seconds: float = LOOK_SECONDS,
    hung_seconds: float = HUNG_SECONDS,
) -> None:
    """Make the call, on a thread of its own, and wait for it. `excuse` is called at looks at which no broker answers.

    `reach` raises RoseError while none does. Raises HungCall, and what the call raises.
    """
    ended: SimpleQueue[BaseException | None] = SimpleQueue()
    Thread(target=_make, args=(call, ended), name="call", daemon=True).start()
    looks, late, answered = 0, hung_seconds / look_seconds / 2, 0
    while True:
        try:
            raised = ended.get(timeout=look_seconds)
        except Empty:
            looks += 1
        else:
            if raised is not None:
                raise raised
            return
        if looks <= late:
            continue
        if not _answers(reach):
            excuse()
            continue
        answered += 1
        if answered >= late:
            raise HungCall(f"it has not returned for {looks * look_seconds:.0f} s, though the broker answers others")


def _make(call: Callable[[], object], ended: "SimpleQueue[BaseException | None]") -> None:
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
