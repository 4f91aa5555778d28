"""Which of many that cost the same: by hashes of their names and of the turn's key, so that it stays with one choice.

Keeps true
- The answer is a function of who is equal, of the key, and of how large the fleet is, in steps of four times: in which
  order executors came is of no account.
- Where one executor comes or goes most keys stay: of a few equals all but those that it takes or leaves, of many those
  that are not next to it. They all move where a fleet grows or shrinks past such a step.
- A fleet that is idle as a whole is never looked through. Of more than `compared_count` equals those decide whose
  hashes are next to the key's, on a ring.
"""

import hashlib
from bisect import bisect, insort
from collections.abc import Callable, Collection
from math import isqrt

from rose.pipeline.routing.candidates import Candidate

MIN_COMPARED = 32
"""Equals that are all compared, in a small fleet."""

COMPARED_WINDOW = 4
"""Of more equals than are all compared, those that are."""


def compared_count(executors: int) -> int:
    """Equals that are all compared in a fleet of so many: a power of two, so that it seldom changes.

    To compare one costs about what it costs to pass one on the ring; and where M of N are equal, WINDOW * N / M are
    passed: so it grows with the root of N.
    """
    return max(MIN_COMPARED, 1 << isqrt(COMPARED_WINDOW * executors).bit_length())


class HashRing:
    """All seats by the hashes of their names."""

    def __init__(self) -> None:
        self._candidates: list[tuple[int, int, Candidate]] = []

    def __len__(self) -> int:
        return len(self._candidates)

    def add(self, candidate: Candidate) -> None:
        insort(self._candidates, (candidate.hash, candidate.number, candidate))

    def remove(self, candidate: Candidate) -> None:
        self._candidates.remove((candidate.hash, candidate.number, candidate))

    def choose(self, key: int, equals: Collection[Candidate], is_equal: Callable[[Candidate], bool]) -> Candidate:
        """The one for this key. `equals`: all of them, or more than `compared_count` where there are as many."""
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
    """64 bits of a name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def rendezvous_weight(worker: int, key: int) -> int:
    """The weight of a worker's hash under this key; the highest wins (highest random weight hashing)."""
    mixed = (worker ^ key) * 0x9E3779B97F4A7C15 & 2**64 - 1
    return (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93 & 2**64 - 1
