"""Decisions on prompts: what becomes of a message in a prompt partition.

Keeps true: a decision is written once no reset of its environments is awaited.
"""

from dataclasses import dataclass, field
from enum import Enum

from rose.schemas.prompts import Prompt
from rose.topics.records import Envelope, InvalidMessage


@dataclass(frozen=True, slots=True)
class ResetResult:
    """The result of resetting an environment."""

    observation: bytes
    """Tokens of the first observation, framed and packed."""
    state: bytes


class DecisionKind(Enum):
    """Kind of the decision on a prompt."""

    OPEN = "open"
    REFUSE = "refuse"
    """The message becomes a dead letter."""
    FORWARD = "forward"
    """The message is forwarded to the home of its group."""
    PASS = "pass"
    """The prompt was decided before and is read again."""


@dataclass(slots=True)
class PromptDecision:
    """The decision on one message of the prompt partition. It is written once no reset is awaited."""

    message: Envelope | InvalidMessage
    kind: DecisionKind
    prompt: Prompt | None = None
    """None if the message is no prompt. The group size of a prompt to be opened includes surplus trajectories."""
    needed: int = 0
    """See `Group.needed`."""
    refusal: str = ""
    """Why the prompt is refused."""
    repeated: bool = False
    """Refused because its group is known; the record of the group is not changed."""
    home: int = 0
    """Home partition to which the message is forwarded."""
    awaited: int = 0
    """Number of environments that are still being reset."""
    reset_results: dict[int, ResetResult | str] = field(default_factory=dict)
    """Results of the resets, by index in the group; a string is the reason of a failure."""

    @property
    def opens(self) -> Prompt:
        """The prompt of a decision that opens a group."""
        assert self.prompt is not None
        return self.prompt
