"""Prefix locations: which executor is believed to have how much of a trajectory's context in its prefix cache.

Keeps true
- Cached tokens count only in the cache and under the policy version that computed them. KV of another version is
  useless. A restart empties the cache, and so does a time without a version, as for a suspended lender.
- The most recently used `capacity` trajectories and groups are remembered, and at most as many older ones.
"""

from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

from rose.pipeline.routing.liveness import Executor
from rose.pipeline.routing.turn import TrajectoryState

Value = TypeVar("Value")


class CachedPrefix(NamedTuple):
    """The first `tokens` tokens of a context, in one executor's cache."""

    incarnation: int
    cache_generation: int
    """Cache generation of the incarnation."""
    version: int
    tokens: int


class RecentlyUsed(Generic[Value]):
    """Recently used values in two generations. When the newer generation is full, the older generation is dropped."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._newer: dict[str, Value] = {}
        self._older: dict[str, Value] = {}

    def get(self, name: str) -> Value | None:
        """Return the value of a name, without counting this as a use; None if the name is not known."""
        found = self._newer.get(name)
        return self._older.get(name) if found is None else found

    def put(self, name: str, value: Value) -> None:
        """Keep a value as the most recently used."""
        self._newer[name] = value
        if len(self._newer) > self._capacity:
            self._older, self._newer = self._newer, {name: value}


class PrefixLocations:
    """Remembers where trajectories last ran, and where the prompts of groups were computed."""

    def __init__(self, capacity: int) -> None:
        self._trajectories: RecentlyUsed[TrajectoryState] = RecentlyUsed(capacity)
        self._groups: RecentlyUsed[dict[str, CachedPrefix]] = RecentlyUsed(capacity)

    def trajectory(self, trajectory_id: str) -> TrajectoryState:
        """The state of a trajectory; a new state, which is not kept yet, if the trajectory is not remembered."""
        found = self._trajectories.get(trajectory_id)
        return TrajectoryState() if found is None else found

    def on_turn_finished(self, trajectory_id: str, trajectory: TrajectoryState, turn: int) -> None:
        """Record the number of a finished turn, and remember the trajectory."""
        trajectory.turn = turn
        self._trajectories.put(trajectory_id, trajectory)

    def on_prompt_dispatched(self, group_id: str, worker: str, prefix: CachedPrefix) -> None:
        """Record that an executor computes the group's shared prompt."""
        holders = self._groups.get(group_id)
        if holders is None:
            holders = {}
        self._groups.put(group_id, holders)
        holders[worker] = prefix

    def cached_tokens(
        self, trajectory: TrajectoryState, group_id: str, context_tokens: int, executors: Mapping[str, Executor]
    ) -> tuple[tuple[str, int], ...]:
        """Executors with the number of tokens that each is believed to have cached of a turn's context.

        `context_tokens`: length of the context with the partial. The last token of the context is never counted,
        because an engine computes it in any case.
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
