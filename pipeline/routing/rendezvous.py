"""Rendezvous hashing: the choice among executors of equal cost, by hashes of their names and of the turn's key.

Keeps true
- The choice depends on the set of equal executors, on the key, and on the size of the fleet in steps of a factor of
  four. The order in which executors were added has no influence.
- When an executor comes or goes, most keys keep their executor: among few equals all keys but those of that executor,
  among many equals the keys that are not next to it on the ring. All keys may move when the fleet size passes a step.
- The search never examines a whole idle fleet. Of more than `compared_count` equals, only those compete whose hashes
  are next to the key on a hash ring.
"""

import hashlib
from bisect import bisect, insort
from collections.abc import Callable, Collection
from math import isqrt

from rose.pipeline.routing.candidates import Candidate

MIN_COMPARED = 32
"""Least value of `compared_count`."""

COMPARED_WINDOW = 4
"""Executors that are compared if there are more than `compared_count` equals."""


def compared_count(executors: int) -> int:
    """Up to how many equals are all compared in a fleet of `executors`: a power of two, so that it seldom changes.

    Comparing an executor costs about as much as passing an executor on the ring. If M of N executors are equal,
    COMPARED_WINDOW * N / M executors are passed, so the best bound grows with the square root of N.
    """
    return max(MIN_COMPARED, 1 << isqrt(COMPARED_WINDOW * executors).bit_length())


class HashRing:
    """All candidates, ordered by the hashes of their names."""

    def __init__(self) -> None:
        self._candidates: list[tuple[int, int, Candidate]] = []

    def __len__(self) -> int:
        return len(self._candidates)

    def add(self, candidate: Candidate) -> None:
        """Add a candidate."""
        insort(self._candidates, (candidate.hash, candidate.number, candidate))

    def remove(self, candidate: Candidate) -> None:
        """Remove a candidate. Raises ValueError if it is not in the ring."""
        self._candidates.remove((candidate.hash, candidate.number, candidate))

    def choose(self, key: int, equals: Collection[Candidate], is_equal: Callable[[Candidate], bool]) -> Candidate:
        """The candidate for this key among candidates of equal cost.

        `key`: 64-bit hash. `equals`: all equals, or any set of more than `compared_count` of them. `is_equal`: whether
        a candidate is one of the equals.
        """
        chosen = equals if len(equals) <= compared_count(len(self)) else self._window_at(key, is_equal)
        return max(chosen, key=lambda candidate: rendezvous_weight(candidate.hash, key))

    def _window_at(self, key: int, is_equal: Callable[[Candidate], bool]) -> list[Candidate]:
        window: list[Candidate] = []
        begin = bisect(self._candidates, (key,))
        for position in range(begin - len(self._candidates), begin):
            candidate = self._candidates[position][2]
            if is_equal(candidate):
                window.append(candidate)
                if len(window) == COMPARED_WINDOW:
                    break
        return window


def name_hash(name: str) -> int:
    """A 64-bit hash of a name, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def rendezvous_weight(worker: int, key: int) -> int:
    """The weight of a worker's hash under this key; the highest wins (highest random weight hashing)."""
    mixed = (worker ^ key) * 0x9E3779B97F4A7C15 & 2**64 - 1
    return (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93 & 2**64 - 1
