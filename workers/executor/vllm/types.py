"""Types of the engine's input, output and errors. Imports neither vLLM nor torch."""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rose.schemas.errors import RoseError, UsageError
from rose.schemas.prompts import MIN_TEMPERATURE, Sampling, stop_tokens_error
from rose.schemas.sampled_tokens import SampledTokens
from rose.schemas.turns import TurnTimes

LINE_CHARACTERS = 300
"""Longest line of an error text that is not cut, in characters."""


class EngineStartError(UsageError):
    """vLLM does not start with this model and these settings."""


class EngineRefusal(RoseError):
    """The engine cannot run a turn; the message says why."""


class SwapRefused(RoseError):
    """The engine refuses a policy version; the old version continues to serve."""


class EngineBroken(RoseError):
    """A step failed, or a failed swap could not be undone: the engine must not run another step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine."""

    model_folder: Path
    """Hugging Face folder: config.json and safetensors. Its weights serve as `policy_version` until the first swap."""
    policy_version: int = -1
    """Version of the folder's weights; -1 for weights of no version."""
    dtype: str = "float32"
    """`float32`, `bfloat16` or `float16`: element type of computation, weights and KV cache."""
    max_model_len: int = 1024
    """Most tokens of one turn, context and output together."""
    max_running: int = 64
    """Most turns in one step; further turns wait."""
    kv_cache_bytes: int | None = 64 << 20
    """Memory of the KV cache; None lets vLLM take what `gpu_memory_utilization` leaves."""
    block_tokens: int = 32
    """Tokens of one KV block, the unit of prefix reuse. A multiple of 32 on a CPU."""
    step_tokens: int = 1024
    """Most tokens that one step computes: longer prefills are chunked. Larger steps exceed the caches of a CPU."""
    seed: int | None = None
    """Seed of the process's random generators; None takes a random seed."""
    vllm_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `vllm.EngineArgs`. Without `enforce_eager`, vLLM compiles the model and records CUDA graphs
    on a GPU, and does neither on a CPU."""


class FinishedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn that has left an engine."""

    name: str
    sampled: SampledTokens
    """Sampled tokens, the stop token included; see `Engine` for the logprobs."""
    finish_reason: str
    """`stop`, `length` or `abort`."""
    context_tokens: int
    cached_tokens: int
    """Context tokens that were found in the prefix cache instead of computed."""
    times: TurnTimes
    """The engine's times: start of the step that computed the first context token, first token and end."""


@dataclass(frozen=True, slots=True)
class HeldTurn:
    """The KV tokens of a turn in the engine."""

    key: str
    held_tokens: int
    """Tokens whose KV the turn holds; 0 while the turn waits."""
    most_tokens: int
    """The most tokens whose KV the turn can hold."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step."""

    finished: list[FinishedTurn]
    tokens: int
    """Tokens that the step computed, prefill and decode together; 0 without work."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The engine's load at one moment."""

    device: str
    running: int
    waiting: int
    tokens: int
    """Context and output so far of all turns held."""
    kv_bytes_total: int
    kv_bytes_free: int
    """Bytes of blocks that no running turn holds; prefixes cached in them are evicted when the space is needed."""
    kv_bytes_per_token: int


def block_bytes(kv_cache: Any) -> int:
    """Return the bytes of one block of a cache in one process. `kv_cache`: vLLM's KVCacheConfig.

    Each of its tensors is a part of one allocation, and has the size of the whole allocation.
    """
    return int(max((tensor.size for tensor in kv_cache.kv_cache_tensors), default=0) // kv_cache.num_blocks)


def turn_error(context: Sequence[int], sampling: Sampling, *, longest_tokens: int, vocabulary: int) -> str | None:
    """Return why an engine cannot run a turn; None if it can. vLLM crashes at a token outside its vocabulary.

    `longest_tokens`: most tokens of context and output together.
    """
    if not 0 < len(context) < longest_tokens:
        return f"a context of {len(context)} tokens: 1 to {longest_tokens - 1} can be run"
    for token in (min(context), max(context)):
        if not 0 <= token < vocabulary:
            return f"token id {token} is outside the vocabulary of {vocabulary}"
    if error := stop_tokens_error(sampling, vocabulary):
        return error
    if 0 < sampling.temperature < MIN_TEMPERATURE:  # vLLM silently raises such a temperature
        return f"temperature {sampling.temperature} is neither 0 nor at least {MIN_TEMPERATURE}"
    return None


def first_line(error: Exception) -> str:
    """Return the first line of an error text; of a long line its first sentence, cut at LINE_CHARACTERS.

    A line that ends with a colon is continued with the next line.
    """
    text = f"{type(error).__name__} {error}" if isinstance(error, KeyError) else str(error)
    first, *others = [line.strip() for line in text.splitlines() if line.strip()] or [_where(error)]
    line = f"{first} {others[0]}" if others and first.endswith(":") else first
    return line if len(line) <= LINE_CHARACTERS else line.partition(". ")[0][:LINE_CHARACTERS]


def _where(error: Exception) -> str:
    """Describe an error without a text: its type, and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    return ": ".join([type(error).__name__, *(frame.line for frame in frames[-1:] if frame.line)])
