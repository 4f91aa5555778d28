"""Routing policies of other projects, with which ROSE's placement is compared, written from their sources.

Keeps true: a policy uses only the information that its source uses. It sends a turn as soon as the turn is requested,
and the engine queues turns that it cannot run yet. Random draws depend on a seed.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol
from zlib import crc32

CACHE_THRESHOLD = 0.3
"""Least known share of a context for a cached prefix to count."""
BALANCE_ABSOLUTE, BALANCE_RELATIVE = 64, 1.5
"""Largest lead of the busiest executor over the idlest, as a number of turns and as a factor. All three values are the
defaults of vllm-router."""


class Request(Protocol):
    """The properties of a request that a policy may use."""

    @property
    def trajectory_id(self) -> str: ...

    @property
    def context_tokens(self) -> int: ...

    @property
    def pieces(self) -> Sequence[int]:
        """Return the keys of its context's pieces of `piece_tokens` tokens.

        Keys are equal if all tokens up to the end of the piece are equal.
        """
        ...

    @property
    def piece_tokens(self) -> int: ...


class Policy(ABC):
    """Chooses an executor by its number.

    `outstanding`: number of turns that each executor was sent and has not answered.
    """

    def __init__(self, executors: int) -> None:
        self.outstanding = [0] * executors

    def choose(self, request: Request) -> int:
        """Choose an executor, and count the turn as outstanding."""
        executor = self._choose(request)
        self.outstanding[executor] += 1
        return executor

    def answered(self, executor: int) -> None:
        """Count an answered turn."""
        self.outstanding[executor] -= 1

    def ended(self, trajectory_id: str) -> None:  # noqa: B027  most policies keep no state of a trajectory
        """Forget a trajectory after its last turn."""

    @abstractmethod
    def _choose(self, request: Request) -> int:
        """Return the number of the executor; the caller counts the turn."""

    def _idlest(self) -> int:
        return min(range(len(self.outstanding)), key=self.outstanding.__getitem__)


class RoundRobin(Policy):
    """Chooses the executors in turn."""

    def __init__(self, executors: int) -> None:
        super().__init__(executors)
        self._next = 0

    def _choose(self, request: Request) -> int:
        self._next = (self._next + 1) % len(self.outstanding)
        return self._next


class PowerOfTwo(Policy):
    """Draws two executors at random and chooses the one with fewer outstanding turns (Mitzenmacher, 2001; vllm-router,
    `power_of_two`).
    """

    def __init__(self, executors: int, seed: int) -> None:
        super().__init__(executors)
        self._random = random.Random(seed)

    def _choose(self, request: Request) -> int:
        pair = self._random.sample(range(len(self.outstanding)), 2)
        return min(pair, key=self.outstanding.__getitem__)


class Sticky(Policy):
    """Keeps a trajectory on its first executor: the one with the fewest live trajectories at that time, ties by a hash
    of both (vllm-router, `sticky_least_loaded`).
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
    """Chooses the executor with the longest known prefix, as `cache_aware` of sglang's gateway and vllm-router.

    If the prefix is at most CACHE_THRESHOLD of the context, or the busiest executor leads the idlest by both bounds,
    the policy chooses the executor with the fewest outstanding turns.

    The tree holds requested tokens and not sampled tokens, as in the sources; of equal prefixes the newest counts. The
    sources prune their tree at 64 Mi characters, which no workload here reaches.
    """

    def __init__(self, executors: int) -> None:
        super().__init__(executors)
        self._tree: dict[int, int] = {}
        """Newest executor of each prefix, by the key of the prefix."""

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
"""Policies by name, created from the number of executors and a seed."""
