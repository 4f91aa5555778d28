"""What is asked for: a prompt opens one group of trajectories."""

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from schemas.limits import GROUP_SIZE, STOPS, TURNS, GroupId, Seed, Text
from schemas.record import Record

TokenId = Annotated[int, Meta(ge=0, lt=2**32)]

LEAST_TEMPERATURE = 0.01
"""Below it drawing is greedy, and a token's probability says nothing of how likely it was drawn."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are drawn."""

    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    """0 is greedy; vLLM takes nothing between 0 and 0.01."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    max_tokens: Annotated[int, Meta(ge=1, le=65_536)] = 256
    """Most tokens of one turn."""
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=STOPS)] = ()
    """Any of these ends a turn; it stays in the output."""
    seed: Seed | None = None
    """None: the engine's own stream of randomness."""


Environment = Annotated[str, Meta(min_length=1, max_length=256)]


class Prompt(Record, frozen=True, kw_only=True):
    """One task, to be tried `group_size` times."""

    SCHEMA: ClassVar[str] = "prompt/2"

    group_id: GroupId
    """Unique for ever; trajectories are `<group_id>:<index>`. A second prompt of the same id is dead-lettered."""
    group_size: Annotated[int, Meta(ge=1, le=GROUP_SIZE)]
    environment: Environment
    """A built-in's name, or `package.module:Class`."""
    seed: Seed
    """Seeds the environment; every trajectory of the group gets the same task."""
    arguments: dict[str, Any] = {}
    """Handed to the environment's `reset`; at most 64 lists and maps within one another."""
    sampling: Sampling | None = None
    """None: the environment worker's configured sampling."""
    max_turns: Annotated[int, Meta(ge=1, le=TURNS)] = 64
    """A trajectory that is not done by then ends as it stands."""
    note: Text = ""
    """Free text of the submitter."""


def trajectory_id(group_id: str, index: int) -> str:
    """The id of the group's trajectory number `index`, from 0."""
    return f"{group_id}:{index}"


def unpriced(sampling: Sampling) -> str:
    """Why the loss cannot weigh tokens that are drawn like this; empty if it can."""
    if sampling.temperature < LEAST_TEMPERATURE:
        return f"temperature {sampling.temperature:g} draws the likeliest token: give at least {LEAST_TEMPERATURE}"
    if sampling.top_p < 1:
        return f"top_p {sampling.top_p:g} cuts tokens off that the policy may draw: give 1"
    return ""
