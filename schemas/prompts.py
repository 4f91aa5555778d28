"""Prompts. A prompt opens one group of trajectories."""

import hashlib
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from rose.schemas.limits import (
    MAX_GROUP_SIZE,
    MAX_STOP_TOKENS,
    MAX_TURN_TOKENS,
    MAX_TURNS,
    GroupId,
    Seed,
    Text,
    Version,
)
from rose.schemas.record import Record

TokenId = Annotated[int, Meta(ge=0, lt=2**32)]

MIN_TEMPERATURE = 0.01
"""Least temperature that is not greedy. Below it, a token's probability does not say how likely the token was drawn."""


Temperature = Annotated[float, Meta(ge=0, le=2)]
"""Sampling temperature: 0 is greedy; vLLM accepts nothing between 0 and 0.01."""

TopP = Annotated[float, Meta(gt=0, le=1)]

MaxTokens = Annotated[int, Meta(ge=1, le=MAX_TURN_TOKENS)]

StopTokenIds = Annotated[tuple[TokenId, ...], Meta(max_length=MAX_STOP_TOKENS)]


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling settings of a turn."""

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    max_tokens: MaxTokens = 256
    """Most tokens of one turn."""
    stop_token_ids: StopTokenIds = ()
    """Tokens that end a turn; the stop token stays in the output."""
    seed: Seed | None = None
    """Seed of the turn. None: the engine's own stream of randomness."""


class PromptSampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling settings of a prompt. A setting that is None follows the configuration of the environment worker."""

    temperature: Temperature | None = None
    """Temperature; a value below 0.01 cannot be trained on."""
    top_p: TopP | None = None
    """Nucleus sampling; a value below 1 cannot be trained on."""
    max_tokens: MaxTokens | None = None
    """Most tokens of one turn."""
    stop_token_ids: StopTokenIds | None = None
    """Tokens that end a turn. None: the model's own, empty: none."""
    seed: Seed | None = None
    """Seed from which the seed of each turn is made. None: the engine's own stream of randomness."""

    def with_defaults(self, defaults: Sampling) -> Sampling:
        """Return all settings, with those of `defaults` where this has none."""
        values = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}
        return msgspec.structs.replace(defaults, **values)

    @classmethod
    def from_sampling(cls, sampling: Sampling) -> "PromptSampling":
        """Return settings of which only the seed is left to the configuration, which has none."""
        return cls(**{name: getattr(sampling, name) for name in cls.__struct_fields__})


ENVIRONMENT_CHARACTERS = 256
"""Most characters of an environment's name."""

Environment = Annotated[str, Meta(min_length=1, max_length=ENVIRONMENT_CHARACTERS)]

EvaluationSet = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{0,40}\Z")]
"""Name of a set of prompts that the policy is evaluated on; empty for prompts to train on."""

EVALUATION_PREFIX = "evaluation:"
"""Beginning of the ids of all groups of evaluations, and of no other group."""


class Prompt(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One task, to be tried `group_size` times.

    Fields with their default are not written, so an older reader takes a newer prompt unless it uses a new field.
    """

    SCHEMA: ClassVar[str] = "prompt/3"

    MAX_BYTES: ClassVar[int] = Record.MAX_BYTES - 1024
    """The record of its group holds it, with its sampling in full."""

    group_id: GroupId
    """Unique id; trajectories are `<group_id>:<index>`. A second prompt of the same id is dead-lettered."""
    group_size: Annotated[int, Meta(ge=1, le=MAX_GROUP_SIZE)]
    environment: Environment
    """Name of a built-in environment, or `package.module:Class`."""
    seed: Seed | None = None
    """Seed of the environment; every trajectory of the group gets the same task. None: derived from the group id."""
    arguments: dict[str, Any] = {}
    """Arguments of the environment's `reset`; at most 64 lists and maps within one another."""
    sampling: PromptSampling = PromptSampling()
    max_turns: Annotated[int, Meta(ge=1, le=MAX_TURNS)] = 64
    """Most turns; a trajectory that is not done by then ends."""
    note: Text = ""
    """Remark of the submitter, such as a mark to find the prompt by. It is kept on the log and in dead letters."""
    evaluation: EvaluationSet = ""
    """Name of the evaluation set that the prompt belongs to. Empty: its trajectories are for training."""
    pinned_version: Version | None = None
    """Policy version that has to sample all turns, of a prompt of an evaluation; None: any version."""

    @property
    def task_seed(self) -> int:
        """Return the seed of the environment; a derived seed has 31 bits, which every generator accepts."""
        if self.seed is not None:
            return self.seed
        return int.from_bytes(hashlib.blake2b(self.group_id.encode(), digest_size=4).digest(), "little") >> 1


def is_evaluation(group_id: str) -> bool:
    """Return whether this is the id of a group of an evaluation, whose trajectories are never trained on."""
    return group_id.startswith(EVALUATION_PREFIX)


def trajectory_id(group_id: str, index: int) -> str:
    """Return the id of the group's trajectory number `index`, from 0."""
    return f"{group_id}:{index}"


def group_id_of(trajectory_id: str) -> str:
    """Return the id of the trajectory's group."""
    return trajectory_id.rpartition(":")[0]


def sampling_error(sampling: Sampling | PromptSampling) -> str | None:
    """Return why the loss cannot weigh tokens that are drawn with these settings; None if it can."""
    if sampling.temperature is not None and sampling.temperature < MIN_TEMPERATURE:
        return f"temperature {sampling.temperature:g} draws the likeliest token: give at least {MIN_TEMPERATURE}"
    if sampling.top_p is not None and sampling.top_p < 1:
        return f"top_p {sampling.top_p:g} cuts tokens off that the policy may draw: give 1"
    return None


def stop_tokens_error(sampling: Sampling | PromptSampling, vocabulary: int) -> str | None:
    """Return why a model with so many tokens cannot end a turn as these settings say; None if it can."""
    for token in sampling.stop_token_ids or ():
        if token >= vocabulary:
            return f"stop_token_ids: token id {token} is outside the vocabulary of {vocabulary}"
    return None
