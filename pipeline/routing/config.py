"""Configuration of the router."""

from dataclasses import dataclass

from rose.schemas.setting_bounds import MAX_COUNT, check_bounds

MAX_ATTEMPTS = 10_000
"""Upper bound of `max_attempts`."""

MAX_LOW_WATER_SECONDS = 3600.0
"""Upper bound of `low_water_seconds`: a low water that is committed less often is useless."""


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """How the router treats turns and executors."""

    max_attempts: int = 8
    """Attempts at one turn that end by somebody's fault before it is failed. Refusals for lack of room, preemptions and
    silences that end are nobody's."""
    max_lag_versions: int = 2
    """Policy versions that a LIVE executor may be behind the newest that is served before it gets no new turns."""
    max_waiting_turns: int = 20_000
    """Most turns that wait for room. While more turns wait, requests are left on their topic."""
    remembered_trajectories: int = 100_000
    """Trajectories, and as many groups, whose place of cached tokens is remembered; up to twice as many for a while."""
    low_water_seconds: float = 5.0
    """How often the place from which a restart would read is noted and committed."""

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
