"""What the processes of a run say of themselves."""

from typing import Annotated, ClassVar

from msgspec import Meta

from rose.schemas.limits import Id, Text
from rose.schemas.record import Record


class RoleBegun(Record, frozen=True, kw_only=True):
    """A process has begun, or has given up what it was at and begins anew. A process that is well says it once."""

    SCHEMA: ClassVar[str] = "role-begun/1"

    role: Id
    """Which process, as its log names it."""
    times: Annotated[int, Meta(ge=1, le=2**53)] = 1
    """How often since it last said so."""
    reason: Text = ""
    """Why it begins anew; empty where the process has just started."""
    place: Text = ""
    """Where the process runs: its host, and its number among the processes of its name there. One that ends and is
    started again has the same, and namesakes that run at once have different ones; empty where it is not known."""
