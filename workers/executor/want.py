"""What an engine would do next, for who shares a thread with it. Pure."""

from dataclasses import dataclass
from enum import Enum


class Work(Enum):
    """How a piece of work may be bounded."""

    STEP = "step"
    """One of the engine's, of as many tokens as there is time for."""
    PIECE = "piece"
    """Something that is done whole or not at all."""
    ANY = "any"
    """Something that goes on for as long as it may."""


@dataclass(frozen=True, slots=True)
class Want:
    """One piece of work."""

    work: Work
    seconds: float
    """That it would take, as predicted."""
