"""Which of many that cost the same: by hashes of their names and of the turn's key, so that it stays with one choice.

Keeps true
- The answer is a function of who is equal, of the key, and of how large the fleet is, in steps of four times: in which
  order executors came is of no account.
- Where one executor comes or goes most keys stay: of a few equals all but those that it takes or leaves, of many those
  that are not next to it. They all move where a fleet grows or shrinks past such a step.
- A fleet that is idle as a whole is never looked through. Of more than `compared` equals those decide whose hashes are
  next to the key's, on a ring.
"""

import hashlib
from bisect import bisect, insort
from collections.abc import Callable, Collection
from math import isqrt

from pipeline.routing.peers import Seat

LEAST_COMPARED = 32
"""Equals that are all compared, in a small fleet."""

WINDOW = 4
"""Of more equals than are all compared, those that are."""


def compared(executors: int) -> int:
    """Equals that are all compared in a fleet of so many: a power of two, so that it seldom changes.

    To compare one costs about what it costs to pass one on the ring; and where M of N are equal, WINDOW * N / M are
    passed: so it grows with the root of N.
    """
    return max(LEAST_COMPARED, 1 << isqrt(WINDOW * executors).bit_length())


class Ring:
    """All seats by the hashes of their names."""

    def __init__(self) -> None:
        self._seats: list[tuple[int, int, Seat]] = []

    def __len__(self) -> int:
        return len(self._seats)

    def add(self, seat: Seat) -> None:
        insort(self._seats, (seat.hash, seat.number, seat))

    def remove(self, seat: Seat) -> None:
        self._seats.remove((seat.hash, seat.number, seat))

    def first(self, key: int, equals: Collection[Seat], is_equal: Callable[[Seat], bool]) -> Seat:
        """The one for this key. `equals`: all of them, or more than `compared` where there are as many."""
        chosen = equals if len(equals) <= compared(len(self)) else self._next_to(key, is_equal)
        return max(chosen, key=lambda seat: rendezvous(seat.hash, key))

    def _next_to(self, key: int, is_equal: Callable[[Seat], bool]) -> list[Seat]:
        window: list[Seat] = []
        begin = bisect(self._seats, (key,))
        for place in range(begin - len(self._seats), begin):
            seat = self._seats[place][2]
            if is_equal(seat):
                window.append(seat)
                if len(window) == WINDOW:
                    break
        return window


def name_hash(name: str) -> int:
    """64 bits of a name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def rendezvous(worker: int, key: int) -> int:
    """The weight of a worker's hash under this key; the highest wins (highest random weight hashing)."""
    mixed = (worker ^ key) * 0x9E3779B97F4A7C15 & 2**64 - 1
    return (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93 & 2**64 - 1
