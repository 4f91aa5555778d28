"""What is asked for: a prompt opens one group of trajectories."""

import hashlib
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from rose.schemas.limits import MAX_GROUP_SIZE, MAX_STOP_TOKENS, MAX_TURNS, GroupId, Seed, Text
from rose.schemas.record import Record

TokenId = Annotated[int, Meta(ge=0, lt=2**32)]

MIN_TEMPERATURE = 0.01
"""Below it drawing is greedy, and a token's probability says nothing of how likely it was drawn."""


Temperature = Annotated[float, Meta(ge=0, le=2)]
"""0 is greedy; vLLM takes nothing between 0 and 0.01."""

TopP = Annotated[float, Meta(gt=0, le=1)]

MaxTokens = Annotated[int, Meta(ge=1, le=65_536)]

StopTokenIds = Annotated[tuple[TokenId, ...], Meta(max_length=MAX_STOP_TOKENS)]


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn."""

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    max_tokens: MaxTokens = 256
    """Most tokens of one turn."""
    stop_token_ids: StopTokenIds = ()
    """Any of these ends a turn; it stays in the output."""
    seed: Seed | None = None
    """None: the engine's own stream of randomness."""


class PromptSampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a prompt has its tokens drawn. What is None is as the environment worker that opens it is configured."""

    temperature: Temperature | None = None
    """Below 0.01 it cannot be trained on."""
    top_p: TopP | None = None
    """Below 1 it cannot be trained on."""
    max_tokens: MaxTokens | None = None
    """Most tokens of one turn."""
    stop_token_ids: StopTokenIds | None = None
    """Any of these ends a turn. None: the model's own, empty: none."""
    seed: Seed | None = None
    """Of which each turn's is made. None: the engine's own stream of randomness."""

    def with_defaults(self, defaults: Sampling) -> Sampling:
        """All of it, with what is `defaults` for the rest."""
        values = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}
        return msgspec.structs.replace(defaults, **values)

    @classmethod
    def from_sampling(cls, sampling: Sampling) -> "PromptSampling":
        """One that leaves nothing to a configuration but a seed, which has none to leave it to."""
        return cls(**{name: getattr(sampling, name) for name in cls.__struct_fields__})


ENVIRONMENT_CHARACTERS = 256
"""The longest name of an environment."""

Environment = Annotated[str, Meta(min_length=1, max_length=ENVIRONMENT_CHARACTERS)]


class Prompt(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One task, to be tried `group_size` times.

    What is not said does not travel: an older reader takes a newer writer's prompt unless it asks for what is new.
    """

    SCHEMA: ClassVar[str] = "prompt/3"

    MAX_BYTES: ClassVar[int] = Record.MAX_BYTES - 1024
    """The record of its group holds it, with its sampling in full."""

    group_id: GroupId
    """Unique for ever; trajectories are `<group_id>:<index>`. A second prompt of the same id is dead-lettered."""
    group_size: Annotated[int, Meta(ge=1, le=MAX_GROUP_SIZE)]
    environment: Environment
    """A built-in's name, or `package.module:Class`."""
    seed: Seed | None = None
    """Seeds the environment; every trajectory of the group gets the same task. None: made of the group id."""
    arguments: dict[str, Any] = {}
    """Handed to the environment's `reset`; at most 64 lists and maps within one another."""
    sampling: PromptSampling = PromptSampling()
    max_turns: Annotated[int, Meta(ge=1, le=MAX_TURNS)] = 64
    """A trajectory that is not done by then ends as it stands."""
    note: Text = ""
    """The submitter's own, such as a mark to find the prompt by: it stays with it, on the log and in dead letters."""

    @property
    def task_seed(self) -> int:
        """What the environment is seeded with; of 31 bits if it was made, which every generator takes."""
        if self.seed is not None:
            return self.seed
        return int.from_bytes(hashlib.blake2b(self.group_id.encode(), digest_size=4).digest(), "little") >> 1


def trajectory_id(group_id: str, index: int) -> str:
    """The id of the group's trajectory number `index`, from 0."""
    return f"{group_id}:{index}"


def group_id_of(trajectory_id: str) -> str:
    """The id of the trajectory's group."""
    return trajectory_id.rpartition(":")[0]


def sampling_error(sampling: Sampling | PromptSampling) -> str | None:
    """Why the loss cannot weigh tokens that are drawn like this; None if it can."""
    if sampling.temperature is not None and sampling.temperature < MIN_TEMPERATURE:
        return f"temperature {sampling.temperature:g} draws the likeliest token: give at least {MIN_TEMPERATURE}"
    if sampling.top_p is not None and sampling.top_p < 1:
        return f"top_p {sampling.top_p:g} cuts tokens off that the policy may draw: give 1"
    return None
