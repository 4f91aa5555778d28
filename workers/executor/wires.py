"""What joins an executor's two processes: two lines, two slabs and a bell, as descriptors that either end is made from.

Keeps true
- All of it is memory and events without a name; it goes with the last process that holds it.
- What the other process could shrink, and so end this one, is never mapped.
"""

import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from workers.executor.line import LineBroken, check_sealed, memory, sealed

LINE_BYTES = 8 << 20
"""Of each line: several of the largest turns that a record holds."""

COUNT = 5
"""Descriptors that a `Wires` has."""


@dataclass(frozen=True, slots=True)
class Wires:
    """Descriptors, valid in this process."""

    orders: int
    """Of the line to the engine."""
    reports: int
    """Of the line from it."""
    bell: int
    """An eventfd, rung after an order for an engine that may be asleep."""
    slab_0: int
    slab_1: int
    """Shared memory that grows to hold a policy version each."""

    @classmethod
    def new(cls) -> "Wires":
        """Made once, by the process that the other is forked from, or that hands them to it."""
        lines = memory(LINE_BYTES, "rose-orders"), memory(LINE_BYTES, "rose-reports")
        return cls(*lines, os.eventfd(0, os.EFD_CLOEXEC), sealed(0, "rose-slab-0"), sealed(0, "rose-slab-1"))

    @classmethod
    def handed(cls, descriptors: Sequence[int]) -> "Wires":
        """Of descriptors that another process has handed over, in their order. Raises LineBroken."""
        if len(descriptors) != COUNT:
            raise LineBroken(f"{len(descriptors)} descriptors came, not {COUNT}")
        wires = cls(*descriptors)
        for memory_of in (wires.orders, wires.reports, *wires.slabs):
            check_sealed(memory_of)
        return wires

    @property
    def slabs(self) -> tuple[int, int]:
        return self.slab_0, self.slab_1

    @property
    def descriptors(self) -> tuple[int, ...]:
        """In the order in which they are handed over."""
        return tuple(astuple(self))

    def ring(self) -> None:
        """Wake the engine."""
        os.eventfd_write(self.bell, 1)

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
