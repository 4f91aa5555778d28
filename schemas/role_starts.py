"""Records of the starts of a run's processes."""

from typing import Annotated, ClassVar

from msgspec import Meta

from rose.schemas.limits import Id, Text
from rose.schemas.record import Record


class RoleBegun(Record, frozen=True, kw_only=True):
    """A process has started, or has failed and restarts in place. A healthy process writes this once."""

    SCHEMA: ClassVar[str] = "role-begun/1"

    role: Id
    """Name of the process, as in its log."""
    times: Annotated[int, Meta(ge=1, le=2**53)] = 1
    """Number of restarts since its last record."""
    reason: Text = ""
    """Why it restarts; empty if the process has just started."""
    place: Text = ""
    """Where the process runs: its host, and its number among the processes of its name there. A restarted process has
    the same place; processes of one name that run at once have different places. Empty if not known."""
