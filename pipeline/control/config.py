"""Configuration of the control app."""

from dataclasses import dataclass

from rose.schemas.grants import MAX_LEASE_SECONDS
from rose.schemas.setting_bounds import HIGHEST_PORT, MAX_COUNT, YEAR_SECONDS, check_bounds


@dataclass(frozen=True, slots=True)
class ControlConfig:
    """When lenders are woken, parked and moved, and the page that shows the decisions."""

    most_lenders: int = 0
    """Most serving workers that lend at once; 0: no limit."""
    lease_seconds: float = 30.0
    """Seconds that a grant holds unless it is renewed. The control app renews it three times in that time."""
    margin_seconds: float = 2.0
    """A lender is woken if it would work for more than this many seconds before the waiting work is done. A lender is
    of no use if the other executors would do all work in half of this time."""
    min_gain: float = 0.25
    """A lender is also woken if it would add at least this share of an executor's work to the held turns, because each
    turn makes the steps of its executor longer. A lender is of no use for them if it adds less than half of this share.
    A quarter covers what a woken lender costs: the contexts that it computes again, and its users' wait."""
    dwell_seconds: float = 20.0
    """Least time between two changes of one worker: wake, park or move. In a cell that has working executors, a further
    lender must be worthwhile for as long before it is woken."""
    idle_seconds: float = 10.0
    """Time without use after which a lender is parked."""
    page_host: str = "127.0.0.1"
    """Address that serves the page; loopback by default."""
    page_port: int = 6066
    """Port of the page that shows decisions and their reasons; 0 means off."""

    def __post_init__(self) -> None:
        check_bounds(
            self,
            {
                "most_lenders": (0, MAX_COUNT),
                "lease_seconds": (1, MAX_LEASE_SECONDS),
                "margin_seconds": (0.001, YEAR_SECONDS),
                "min_gain": (0.01, 1),
                "dwell_seconds": (0, YEAR_SECONDS),
                "idle_seconds": (0, YEAR_SECONDS),
                "page_port": (0, HIGHEST_PORT),
            },
        )
