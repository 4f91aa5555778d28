"""Prefixes: which executor is believed to have how much of a trajectory's context in its prefix cache.

Keeps true
- Cached tokens count only under the incarnation and the policy version that computed them: KV of another version is
  worth nothing, and a restart empties the cache.
- At most `capacity` trajectories and groups are remembered; the longest unused are forgotten first.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.routing.liveness import Executor
from schemas.turns import TurnRequest


class Prefix(NamedTuple):
    """The first `tokens` of a context, in one executor's cache."""

    incarnation: int
    version: int
    tokens: int


@dataclass(slots=True)
class Trajectory:
    """What is known of a trajectory between its turns."""

    turn: int = -1
    """The newest that has finished, one way or the other."""
    worker: str = ""
    prefix: Prefix | None = None


class Prefixes:
    """Where trajectories last ran, and where the prompts of groups were computed."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._trajectories: OrderedDict[str, Trajectory] = OrderedDict()
        self._groups: OrderedDict[str, dict[str, Prefix]] = OrderedDict()

    def finished_turn(self, trajectory_id: str) -> int:
        """The newest turn known to have finished; -1 if none is."""
        known = self._trajectories.get(trajectory_id)
        return -1 if known is None else known.turn

    def finished(self, trajectory_id: str, turn: int) -> None:
        """Remember that a turn has finished."""
        self._trajectory(trajectory_id).turn = turn

    def left(self, trajectory_id: str, worker: str, prefix: Prefix) -> None:
        """Remember where the trajectory's newest execution left its tokens."""
        known = self._trajectory(trajectory_id)
        known.worker, known.prefix = worker, prefix

    def prompted(self, group_id: str, worker: str, prefix: Prefix) -> None:
        """Remember that an executor computes the group's shared prompt."""
        holders = self._groups.get(group_id)
        if holders is None:
            holders = self._groups[group_id] = {}
            if len(self._groups) > self._capacity:
                self._groups.popitem(last=False)
        else:
            self._groups.move_to_end(group_id)
        holders[worker] = prefix

    def cached(
        self, request: TurnRequest, context_tokens: int, executors: dict[str, Executor]
    ) -> tuple[tuple[str, int], ...]:
        """Executors and the tokens that each is believed to hold of the `context_tokens` that the turn begins with.

        The last token of a context is never counted: an engine computes it in any case.
        """
        most = max(0, context_tokens - 1)
        known = self._trajectories.get(request.trajectory_id)
        if known is not None and known.prefix is not None and _valid(known.prefix, executors.get(known.worker)):
            return ((known.worker, min(known.prefix.tokens, most)),)
        return tuple(
            (worker, min(prefix.tokens, most))
            for worker, prefix in self._groups.get(request.group_id, {}).items()
            if _valid(prefix, executors.get(worker))
        )

    def _trajectory(self, trajectory_id: str) -> Trajectory:
        known = self._trajectories.get(trajectory_id)
        if known is None:
            known = self._trajectories[trajectory_id] = Trajectory()
            if len(self._trajectories) > self._capacity:
                self._trajectories.popitem(last=False)
        else:
            self._trajectories.move_to_end(trajectory_id)
        return known


def _valid(prefix: Prefix, executor: Executor | None) -> bool:
    return (
        executor is not None
        and executor.beat is not None
        and executor.incarnation == prefix.incarnation
        and executor.beat.policy_version == prefix.version
    )
