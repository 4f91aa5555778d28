"""Policies of routing that ROSE's is held against, re-made from what their sources say. Each is a few lines.

Keeps true: a policy knows what its source knows. It sends a turn the moment that it is asked for, and the engine queues
what it cannot run yet. Draws are by seed.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol
from zlib import crc32

CACHE_THRESHOLD = 0.3
"""Share of a context that must be known for its place to count."""
BALANCE_ABSOLUTE, BALANCE_RELATIVE = 64, 1.5
"""Turns, and times as many, that the busiest may be ahead of the idlest. All three are vllm-router's defaults."""


class Request(Protocol):
    """What a policy may look at."""

    @property
    def trajectory_id(self) -> str: ...

    @property
    def context_tokens(self) -> int: ...

    @property
    def pieces(self) -> Sequence[int]:
        """Keys of its context's pieces of `piece_tokens`: equal where all tokens up to a piece's end are."""
        ...

    @property
    def piece_tokens(self) -> int: ...


class Policy(ABC):
    """Chooses an executor by its number. `outstanding`: turns that each was sent and has not answered."""

    def __init__(self, executors: int) -> None:
        self.outstanding = [0] * executors

    def asked(self, request: Request) -> int:
        """Choose, and count the turn as outstanding."""
        executor = self._choose(request)
        self.outstanding[executor] += 1
        return executor

    def answered(self, executor: int) -> None:
        """A turn has come back."""
        self.outstanding[executor] -= 1

    def ended(self, trajectory_id: str) -> None:  # noqa: B027  most policies keep nothing of it
        """A trajectory has had its last turn."""

    @abstractmethod
    def _choose(self, request: Request) -> int:
        """By its number; `asked` counts the turn."""

    def _idlest(self) -> int:
        return min(range(len(self.outstanding)), key=self.outstanding.__getitem__)


class RoundRobin(Policy):
    """Each executor in turn."""

    def __init__(self, executors: int) -> None:
        super().__init__(executors)
        self._next = 0

    def _choose(self, request: Request) -> int:
        self._next = (self._next + 1) % len(self.outstanding)
        return self._next


class PowerOfTwo(Policy):
    """Of two drawn at random the one with fewer outstanding turns (Mitzenmacher, 2001; vllm-router, `power_of_two`)."""

    def __init__(self, executors: int, seed: int) -> None:
        super().__init__(executors)
        self._random = random.Random(seed)

    def _choose(self, request: Request) -> int:
        pair = self._random.sample(range(len(self.outstanding)), 2)
        return min(pair, key=self.outstanding.__getitem__)


class Sticky(Policy):
    """A trajectory stays for life where it began: with the executor of the fewest live trajectories then, ties by a
    hash of the two (vllm-router, `sticky_least_loaded`).
    """

    def __init__(self, executors: int) -> None:
        super().__init__(executors)
        self._homes: dict[str, int] = {}
        self._live = [0] * executors

    def ended(self, trajectory_id: str) -> None:
        self._live[self._homes.pop(trajectory_id)] -= 1

    def _choose(self, request: Request) -> int:
        name = request.trajectory_id
        if name not in self._homes:
            everybody = range(len(self._live))
            self._homes[name] = min(everybody, key=lambda each: (self._live[each], crc32(f"{name}:{each}".encode())))
            self._live[self._homes[name]] += 1
        return self._homes[name]


class RadixTree(Policy):
    """The executor that was sent the longest known prefix, if it is more than CACHE_THRESHOLD of the context, else the
    one with the fewest outstanding turns; that one as well while the busiest is ahead of the idlest by both bounds
    (sglang's gateway and vllm-router, `cache_aware`).

    Its tree holds what was asked, not what was sampled, as theirs does; of equal prefixes the newest counts. Theirs is
    pruned at 64 Mi characters, which no workload here comes to.
    """

    def __init__(self, executors: int) -> None:
        super().__init__(executors)
        self._tree: dict[int, int] = {}
        """By the key of a prefix: who was sent it last."""

    def _choose(self, request: Request) -> int:
        chosen = self._found(request)
        for key in request.pieces:
            self._tree[key] = chosen
        return chosen

    def _found(self, request: Request) -> int:
        most, least = max(self.outstanding), min(self.outstanding)
        if most - least > BALANCE_ABSOLUTE and most > BALANCE_RELATIVE * least:
            return self._idlest()
        known, holder = 0, -1
        for key in request.pieces:
            if key not in self._tree:
                break
            known, holder = known + request.piece_tokens, self._tree[key]
        return holder if known > CACHE_THRESHOLD * request.context_tokens else self._idlest()


POLICIES: dict[str, Callable[[int, int], Policy]] = {
    "round robin": lambda executors, seed: RoundRobin(executors),
    "power of two": PowerOfTwo,
    "sticky": lambda executors, seed: Sticky(executors),
    "radix tree": lambda executors, seed: RadixTree(executors),
}
"""Each by its name, from how many executors there are and a seed."""
