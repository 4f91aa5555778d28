"""What joins an executor's two processes: two lines, two slabs and a bell, as descriptors that either end is made from.

Keeps true: all of it is memory and events without a name; it goes with the last process that holds it.
"""

import os
from dataclasses import dataclass

from workers.executor.line import memory

LINE_BYTES = 8 << 20
"""Of each line: several of the largest turns that a record holds."""


@dataclass(frozen=True, slots=True)
class Wires:
    """Descriptors, valid in this process."""

    orders: int
    """Of the line to the engine."""
    reports: int
    """Of the line from it."""
    slabs: tuple[int, int]
    """Shared memory that grows to hold a policy version each."""
    bell: int
    """An eventfd, rung after an order for an engine that may be asleep."""

    @classmethod
    def new(cls) -> "Wires":
        """Made once, by the process that the other is forked from or is handed them by."""
        slabs = os.memfd_create("rose-slab-0"), os.memfd_create("rose-slab-1")
        orders, reports = memory(LINE_BYTES, "rose-orders"), memory(LINE_BYTES, "rose-reports")
        return cls(orders, reports, slabs, os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
