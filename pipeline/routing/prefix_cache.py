"""Prefixes: which executor is believed to have how much of a trajectory's context in its prefix cache.

Keeps true
- Cached tokens count only in the cache and under the policy version that computed them: KV of another version is worth
  nothing, and a restart or a while without a version, as of a lender that is parked, empties the cache.
- The `capacity` trajectories and groups that were used last are remembered, and at most as many before them.
"""

from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

from rose.pipeline.routing.liveness import Executor
from rose.pipeline.routing.turn import TrajectoryState

Value = TypeVar("Value")


class CachedPrefix(NamedTuple):
    """The first `tokens` of a context, in one executor's cache."""

    incarnation: int
    cache_generation: int
    """Of that start."""
    version: int
    tokens: int


class RecentlyUsed(Generic[Value]):
    """What was used last, in two halves: the older one is forgotten whole when the newer is full."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._newer: dict[str, Value] = {}
        self._older: dict[str, Value] = {}

    def get(self, name: str) -> Value | None:
        found = self._newer.get(name)
        return self._older.get(name) if found is None else found

    def put(self, name: str, value: Value) -> None:
        """Keep it as the one that was used last."""
        self._newer[name] = value
        if len(self._newer) > self._capacity:
            self._older, self._newer = self._newer, {name: value}


class PrefixLocations:
    """Where trajectories last ran, and where the prompts of groups were computed."""

    def __init__(self, capacity: int) -> None:
        self._trajectories: RecentlyUsed[TrajectoryState] = RecentlyUsed(capacity)
        self._groups: RecentlyUsed[dict[str, CachedPrefix]] = RecentlyUsed(capacity)

    def trajectory(self, trajectory_id: str) -> TrajectoryState:
        """What is known of it; what is not yet kept is known of nobody."""
        found = self._trajectories.get(trajectory_id)
        return TrajectoryState() if found is None else found

    def on_turn_finished(self, trajectory_id: str, trajectory: TrajectoryState, turn: int) -> None:
        """Remember that a turn has finished."""
        trajectory.turn = turn
        self._trajectories.put(trajectory_id, trajectory)

    def on_prompt_dispatched(self, group_id: str, worker: str, prefix: CachedPrefix) -> None:
        """Remember that an executor computes the group's shared prompt."""
        holders = self._groups.get(group_id)
        if holders is None:
            holders = {}
        self._groups.put(group_id, holders)
        holders[worker] = prefix

    def cached_tokens(
        self, trajectory: TrajectoryState, group_id: str, context_tokens: int, executors: Mapping[str, Executor]
    ) -> tuple[tuple[str, int], ...]:
        """Executors and the tokens that each is believed to hold of the `context_tokens` that the turn begins with.

        The last token of a context is never counted: an engine computes it in any case.
        """
        tokens_by_worker = context_tokens - 1 if context_tokens else 0
        worker = trajectory.worker
        if worker and _is_valid(
            executors.get(worker), trajectory.incarnation, trajectory.cache_generation, trajectory.version
        ):
            return ((worker, trajectory.tokens if trajectory.tokens < tokens_by_worker else tokens_by_worker),)
        holders = self._groups.get(group_id)
        if not holders:
            return ()
        return tuple(
            (worker, min(prefix.tokens, tokens_by_worker))
            for worker, prefix in holders.items()
            if _is_valid(executors.get(worker), prefix.incarnation, prefix.cache_generation, prefix.version)
        )


def _is_valid(executor: Executor | None, incarnation: int, cache_generation: int, version: int) -> bool:
    return (
        executor is not None
        and executor.heartbeat is not None
        and executor.incarnation == incarnation
        and executor.cache_generation == cache_generation
        and executor.heartbeat.policy_version == version
    )
