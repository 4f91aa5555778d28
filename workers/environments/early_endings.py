"""Ends trajectories early: those that their group does not need, that are too old to be trained on, or overdue. Pure.

Keeps true
- A trajectory whose environment step is running is not ended before the step is done.
- No trajectory ends as too old while all results are too old: executors that do not follow the versions would use up
  the prompts as fast as they are read.
- An early ending is a sample without a reward, in one transaction with the withdrawal of the trajectory's turn.
"""

from collections.abc import Iterable, Iterator

from rose.schemas.samples import Ending
from rose.schemas.turns import TurnResult
from rose.workers.environments.home import Home
from rose.workers.environments.outbox import PendingTransition
from rose.workers.environments.trajectory import Trajectory, TrajectoryRules
from rose.workers.environments.transitions import end_early


def ending_at_result(home: Home, trajectory: Trajectory, result: TurnResult) -> Ending | None:
    """Return why a trajectory ends at this result, whatever its environment says; None if it does not."""
    group = home.open_groups.get(trajectory.prompt.group_id)
    if group is not None and group.is_complete:
        return Ending.SURPLUS
    if trajectory.prompt.evaluation:  # never trained on
        return None
    versions = [span.version for span in result.spans]
    if trajectory.oldest_version is not None:
        versions.append(trajectory.oldest_version)
    is_stale = min(versions, default=home.oldest_fresh) < home.oldest_fresh <= home.newest_version
    return Ending.STALE if is_stale else None


def surplus_endings(home: Home, rules: TrajectoryRules, now: float) -> list[PendingTransition]:
    """End the trajectories of the groups that have become complete."""
    counted = (home.open_groups.get(group_id) for group_id in home.changed_groups)
    complete = [group for group in counted if group is not None and group.is_complete]
    waiting = _waiting(home, (name for group in complete for name in group.members))
    return [_end(home, trajectory, Ending.SURPLUS, rules, now) for trajectory in waiting]


def stale_endings(home: Home, rules: TrajectoryRules, now: float) -> list[PendingTransition]:
    """End the trajectories with a token that is older than the trainer's staleness bound allows."""
    fresh = home.oldest_fresh
    if fresh == home.swept_fresh or home.newest_version < fresh:
        return []
    home.swept_fresh = fresh
    waiting = [life for life in _waiting(home, home.trajectories) if not life.prompt.evaluation]
    stale = [life for life in waiting if life.oldest_version is not None and life.oldest_version < fresh]
    return [_end(home, trajectory, Ending.STALE, rules, now) for trajectory in stale]


def overdue_endings(home: Home, rules: TrajectoryRules, now: float, monotonic: float) -> list[PendingTransition]:
    """End the trajectories that take longer than the deadline. `now`: Unix seconds; `monotonic`: seconds."""
    overdue = home.overdue_groups(now, monotonic, rules.deadline_seconds)
    waiting = _waiting(home, (name for group in overdue for name in group.members))
    failure = f"it had not ended {rules.deadline_seconds:g} s after its group was opened (trajectory_deadline_seconds)"
    return [_end(home, trajectory, Ending.FAILED, rules, now, failure=failure) for trajectory in waiting]


def _waiting(home: Home, names: Iterable[str]) -> Iterator[Trajectory]:
    """Yield those of these trajectories that wait for a result; results that arrive later are not applied to them."""
    for name in list(names):
        trajectory = home.trajectories.get(name)
        if trajectory is not None and not trajectory.applying:
            yield trajectory


def _end(
    home: Home, trajectory: Trajectory, ending: Ending, rules: TrajectoryRules, now: float, *, failure: str = ""
) -> PendingTransition:
    trajectory.applying = True
    written = end_early(trajectory, ending, rules, now, failure=failure)
    return PendingTransition(home, trajectory.trajectory_id, written, None)
