"""Configuration of the control app."""

from dataclasses import dataclass

from rose.schemas.grants import MAX_LEASE_SECONDS
from rose.schemas.setting_bounds import MAX_COUNT, YEAR_SECONDS, check_bounds

HIGHEST_PORT = 65_535


@dataclass(frozen=True, slots=True)
class ControlConfig:
    """How capacity is granted, and where that is shown."""

    most_lenders: int = 0
    """Serving workers that lend at once, at most; 0: as many as are worth it."""
    lease_seconds: float = 30.0
    """Seconds that a grant holds unless it is renewed. The control app renews it three times in that time."""
    margin_seconds: float = 2.0
    """A lender is woken if it would work for more than this many seconds before the waiting work is done. A lender is
    of no use if the other executors would do all work in half of this time."""
    dwell_seconds: float = 20.0
    """A worker that was woken or parked stays so for at least so long, and one that was moved where it is. For as long
    one more has to be worth it in a cell in which somebody is at work already."""
    idle_seconds: float = 10.0
    """After so long without being of use a lender is parked."""
    page_host: str = "127.0.0.1"
    """Address that the page is served on; loopback unless said otherwise."""
    page_port: int = 6066
    """Port of the page that shows what was decided and why; 0 is off."""

    def __post_init__(self) -> None:
        check_bounds(
            self,
            {
                "most_lenders": (0, MAX_COUNT),
                "lease_seconds": (1, MAX_LEASE_SECONDS),
                "margin_seconds": (0.001, YEAR_SECONDS),
                "dwell_seconds": (0, YEAR_SECONDS),
                "idle_seconds": (0, YEAR_SECONDS),
                "page_port": (0, HIGHEST_PORT),
            },
        )
