"""The bus's end of an executor's wires: orders to the engine, its reports, and versions laid for it.

Keeps true
- Orders arrive in the order in which they were given, and nobody waits for the engine to take them.
- A version is laid on the slab that does not serve, and one at a time.
"""

import select
from collections.abc import Iterator, Mapping
from threading import Event

from torch import Tensor

from workers.executor.line import Line
from workers.executor.slabs import lay
from workers.executor.vllm.types import EngineBroken, EngineStartError
from workers.executor.wires import Wires
from workers.executor.words import REPORTS, Failed, Gone, Order, Outbox, Prepare, Report, Serving, Tick

READY_LOOK_SECONDS = 0.05
"""Between two looks for the first report of an engine, which takes seconds to start."""


class EngineLink:
    """To one engine, wherever it runs."""

    def __init__(self, wires: Wires, life: int) -> None:
        """`life`: a descriptor that becomes readable once the engine's process is gone."""
        self._wires = wires
        self._orders = Outbox(Line(wires.orders))
        self._reports = Line(wires.reports)
        self._life = select.poll()
        self._life.register(life, select.POLLIN)
        self._serving_slab = 1

    def order(self, order: Order) -> None:
        """Never waits."""
        self._orders.say(order)
        self._wires.ring()

    def lay(self, version: int, tensors: Mapping[str, Tensor]) -> Prepare:
        """Copy a version to where the engine reads it, on any thread. The order that says so is the
        caller's to give. The one before must have been served or refused.
        """
        slab = 1 - self._serving_slab
        return Prepare(version, slab, lay(self._wires.slabs[slab], tensors))

    def reports(self) -> Iterator[Report]:
        """Those that are there. Raises EngineStartError or EngineBroken when the engine has failed or is gone."""
        self._orders.flush()
        gone = bool(self._life.poll(0))
        for message in self._reports.read():
            report = REPORTS.decode(message)
            if isinstance(report, Failed):
                raise (EngineStartError if report.usage else EngineBroken)(report.reason)
            if isinstance(report, Gone):
                raise EngineBroken(f"{report.reason}; the server builds another guest in {report.seconds:.0f} s")
            if isinstance(report, Serving):
                self._serving_slab = 1 - self._serving_slab
            yield report
        if gone:
            raise EngineBroken("the engine's process has ended: its last words, if any, are in the log before this")

    def first_tick(self, stop: Event) -> Tick | None:
        """Wait for the engine to be ready; None once `stop` is set. Raises EngineStartError or EngineBroken."""
        while not stop.is_set():
            for report in self.reports():
                if isinstance(report, Tick):
                    return report
            self.wait(READY_LOOK_SECONDS)
        return None

    def wait(self, seconds: float) -> None:
        """So long, or until the engine's process is gone."""
        self._life.poll(1000 * seconds)
