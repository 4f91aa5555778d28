"""Configuration of the router."""

from dataclasses import dataclass

from rose.schemas.setting_bounds import MAX_COUNT, check_bounds

MAX_ATTEMPTS = 10_000
"""Upper bound of `max_attempts`."""

MAX_LOW_WATER_SECONDS = 3600.0
"""Upper bound of `low_water_seconds`: a low water that is committed less often is useless."""


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Limits for turns and executors."""

    max_attempts: int = 8
    """Failed attempts after which a turn fails. Refusals for lack of room, preemptions and temporary silence do not
    count."""
    max_lag_versions: int = 2
    """Policy versions that a live executor may lag behind the newest served version; an executor further behind gets no
    new turns."""
    max_waiting_turns: int = 20_000
    """Most turns that wait for room. While more turns wait, requests are left on their topic."""
    remembered_trajectories: int = 100_000
    """Trajectories, and as many groups, whose prefix locations are remembered; up to twice as many for a while."""
    low_water_seconds: float = 5.0
    """Time between two commits of the offsets from which a restarted router reads."""

    def __post_init__(self) -> None:
        check_bounds(
            self,
            {
                "max_attempts": (1, MAX_ATTEMPTS),
                "max_lag_versions": (0, MAX_COUNT),
                "max_waiting_turns": (1, MAX_COUNT),
                "remembered_trajectories": (1, MAX_COUNT),
                "low_water_seconds": (0, MAX_LOW_WATER_SECONDS),
            },
        )
