"""Rounds of tail batching (RollPacker, arXiv 2509.21009): slow groups are deferred and run together. Pure.

A round lasts from one step of the trainer to the next. A short round opens more groups than a step needs. The groups
that have not ended when the step is done are deferred: their turns are put on hold, with what was sampled. A round that
begins with a whole window of deferred groups is long: it runs these groups, and opens no more than a step needs. Where
fewer groups are slow, a round is long once a group has waited for as many rounds as the ratio defers a window in: its
tokens would be too old later. Without tail batching (`groups_ratio` 1) a round is long while any group is deferred:
workers with it may have had the homes before.

Keeps true
- Between the rounds the window is always filled: by deferred groups first in a long round, by prompts first in a short
  one. So a round ends, however few prompts there are.
- A group is deferred at most `max_deferrals` times.
- Which groups are deferred is on the log (`Group.deferred`), in one transaction with the holds of their turns.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

from rose.workers.environments.config import deferred_versions
from rose.workers.environments.home import Home, OpenGroup
from rose.workers.environments.outbox import PendingTransition
from rose.workers.environments.trajectory import Trajectory, TrajectoryRules
from rose.workers.environments.transitions import put_on_hold, request_again

PROMPTS_SECONDS = 2.0
"""How long no prompt must have waited before a short round takes deferred groups: prompts take a while to be read."""


@dataclass(slots=True, kw_only=True)
class Rounds:
    """The rounds of one worker."""

    window_groups: int
    """Groups that a long round runs at once."""
    groups_ratio: float = 1.0
    """Groups that a short round runs at once, relative to `window_groups`; 1: nothing is deferred."""
    max_deferrals: int = 1
    step: int = 0
    """The trainer's step that began the round."""
    is_long: bool = False
    rounds_waited: int = 0
    """Rounds in a row that began with deferred groups."""
    prompts_at: float = 0.0
    """Monotonic seconds at which a prompt last waited, or the round began."""

    @property
    def limit(self) -> int:
        """Groups that may be active at once."""
        return self.window_groups if self.is_long else math.ceil(self.window_groups * self.groups_ratio)

    def recover(self, homes: Collection[Home], monotonic: float) -> None:
        """Begin a round with homes that were built from the log; nothing is deferred by that."""
        self.step = max((home.newest_step for home in homes), default=0)
        self._begin(homes, monotonic)

    def advance(
        self, homes: Collection[Home], rules: TrajectoryRules, now: float, monotonic: float
    ) -> list[PendingTransition]:
        """Begin a new round after a step of the trainer, and fill the window with deferred groups.

        `now`: Unix seconds; `monotonic`: seconds of a clock that only runs forward.
        """
        if self.groups_ratio <= 1 and not self.is_long:
            return []
        written: list[PendingTransition] = []
        step = max((home.newest_step for home in homes), default=0)
        if step > self.step:
            self.step = step
            if not self.is_long:
                for home in homes:
                    written += defer_unfinished(home, rules, now, max_deferrals=self.max_deferrals)
            self._begin(homes, monotonic)
        if any(home.waits for home in homes):
            self.prompts_at = monotonic
        if self.is_long or monotonic - self.prompts_at >= PROMPTS_SECONDS:
            room = self.limit - sum(home.active_groups for home in homes)
            for home, group in _deferred(homes)[:room] if room > 0 else ():
                written += resume(home, group, rules, now)
        return written

    def _begin(self, homes: Collection[Home], monotonic: float) -> None:
        deferred = len(_deferred(homes))
        have_waited = deferred > 0 and self.rounds_waited >= deferred_versions(self.groups_ratio) - 1
        self.is_long = deferred >= self.window_groups or have_waited
        self.rounds_waited = self.rounds_waited + 1 if deferred else 0
        self.prompts_at = monotonic


def defer_unfinished(home: Home, rules: TrajectoryRules, now: float, *, max_deferrals: int) -> list[PendingTransition]:
    """Defer the groups that have trajectories under way, and put their turns on hold."""
    written = []
    for group_id, group in home.open_groups.items():
        live = _live(home, group)
        if group_id not in home.groups or group.deferred or not live or group.deferrals >= max_deferrals:
            continue
        if group.prompt.evaluation:
            continue
        group.deferred, group.deferrals = True, group.deferrals + 1
        home.changed_groups.add(group_id)
        waiting = [trajectory for trajectory in live if not trajectory.applying]
        written += [
            PendingTransition(home, each.trajectory_id, put_on_hold(each, rules, now), None) for each in waiting
        ]
    return written


def resume(home: Home, group: OpenGroup, rules: TrajectoryRules, now: float) -> list[PendingTransition]:
    """Go on with a deferred group: request the turns of its trajectories again."""
    group.deferred = False
    home.changed_groups.add(group.prompt.group_id)
    waiting = [trajectory for trajectory in _live(home, group) if not trajectory.applying]
    return [PendingTransition(home, each.trajectory_id, request_again(each, rules, now), None) for each in waiting]


def _live(home: Home, group: OpenGroup) -> list[Trajectory]:
    return [home.trajectories[name] for name in group.members if name in home.trajectories]


def _deferred(homes: Collection[Home]) -> list[tuple[Home, OpenGroup]]:
    """The deferred groups of these homes, the one that was opened first ahead."""
    found = [
        (home.groups[group_id].changed_at, group_id, home, group)
        for home in homes
        for group_id, group in home.open_groups.items()
        if group.deferred and group_id in home.groups
    ]
    return [(home, group) for _, _, home, group in sorted(found, key=lambda each: each[:2])]
