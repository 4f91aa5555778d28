"""The engine's side of an executor while there is no engine: parked, being built, or waiting after a fault.

Keeps true: it beats as an engine does, says why there is none and what serving has to do, and answers every turn that
comes: untouched.
"""

import time
from collections.abc import Callable

from workers.executor.line import Line
from workers.executor.words import ORDERS, Outbox, Park, Slack, Take, Tick, Wake, untouched

NOT_WOKEN = "it was not told to lend"


class Parked:
    """What answers at the wires where an `EngineHost` would."""

    def __init__(self, orders: Line, reports: Outbox, slack: Callable[[], Slack], *, tick_seconds: float) -> None:
        self.granted = 0
        """KV bytes that it may hold, as far as it was told; 0: it is not to lend."""
        self.why = NOT_WOKEN
        """There is no engine."""
        self._orders = orders
        self._reports = reports
        self._slack = slack
        self._tick_seconds = tick_seconds
        self._next_tick = 0.0

    @property
    def busy(self) -> bool:
        """Whether a tick has something to do."""
        return bool(self._orders)

    def tick(self) -> None:
        """Take orders in, and beat. What is said of a version is for the engine that is gone."""
        self._reports.flush()
        for message in self._orders.read():
            match order := ORDERS.decode(message):
                case Take():
                    self._reports.say(untouched(order.name, time.time()))
                case Wake() | Park():
                    self.granted = order.most_bytes if isinstance(order, Wake) else 0
                case _:
                    pass
        if time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + self._tick_seconds
            self._reports.say(_nothing(self.why, self._slack()))

    def beat(self, *, held: bool = False) -> None:
        """The same: nothing of it takes long."""
        self.tick()

    def stands(self, *, held: bool) -> bool:
        """Nor has it a turn that could wait for the end of a step."""
        self.tick()
        return True

    def leave(self) -> None:
        """Nobody's turns are here."""


def _nothing(why: str, slack: Slack) -> Tick:
    return Tick(
        version=-1,
        device="none",
        running=0,
        waiting=0,
        kv_bytes_total=0,
        kv_bytes_free=0,
        kv_bytes_per_token=1,
        prefill_tokens_per_second=1.0,
        decode_tokens_per_second=1.0,
        steps=0,
        step_seconds=0.0,
        parked=why,
        slack=slack,
    )
