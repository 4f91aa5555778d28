"""What goes into the engine and what comes out of it. Imports neither vLLM nor torch."""

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rose.schemas.errors import RoseError, UsageError
from rose.schemas.turns import VersionSpan

LINE_CHARACTERS = 300
"""Of a line that is not cut."""


class ModelFolderError(UsageError):
    """A model folder that no engine can be made from."""


class EngineStartError(UsageError):
    """vLLM does not start with this model and these settings."""


class EngineRefusal(RoseError):
    """A turn that this engine cannot run; the message says why."""


class SwapRefused(RoseError):
    """A policy version that was not taken; the old one serves on."""


class EngineBroken(RoseError):
    """A step failed, or a failed swap could not be undone: the engine must not run another step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine."""

    model_folder: Path
    """Hugging Face folder: config.json and safetensors. Its weights serve as `policy_version` until the first swap."""
    policy_version: int = -1
    """Of the folder's weights; -1 says that they are of none."""
    dtype: str = "float32"
    """`float32`, `bfloat16` or `float16`: what the engine computes in and keeps its weights and KV cache in."""
    max_model_len: int = 1024
    """Most tokens of one turn, context and output together."""
    max_running: int = 64
    """Most turns in one step; more wait."""
    kv_cache_bytes: int | None = 64 << 20
    """Memory of the KV cache; None lets vLLM take what `gpu_memory_utilization` leaves."""
    block_tokens: int = 32
    """Tokens of one KV block, the unit of prefix reuse. A CPU wants a multiple of 32."""
    step_tokens: int = 1024
    """Most tokens that one step computes: longer prefills are cut. On a CPU larger steps fall out of the caches."""
    seed: int | None = None
    """Of the engine's stream of randomness, which is the process's; None draws one from the system."""
    enforce_eager: bool = True
    """False lets vLLM compile the model and record CUDA graphs: a slow start that pays on GPUs."""
    vllm_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Any other argument of `vllm.EngineArgs`, as `gpu_memory_utilization` or `quantization`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedTurn:
    """A turn that has left the engine. Times are unix seconds, 0.0 where the turn never came by."""

    key: str
    tokens: list[int]
    """Sampled, the stop token included."""
    logprobs: npt.NDArray[np.float32]
    """Of each sampled token, natural logarithm: see `Engine`."""
    finish_reason: str
    """`stop`, `length` or `abort`."""
    spans: tuple[VersionSpan, ...]
    """Over `tokens`, without gaps: the version whose weights sampled them."""
    context_tokens: int
    cached_tokens: int
    """Of the context, found in the prefix cache instead of computed."""
    added_at: float
    scheduled_at: float
    """The step began that computed its first context token."""
    first_token_at: float
    finished_at: float


@dataclass(frozen=True, slots=True)
class HeldTurn:
    """A turn in the engine, at this moment."""

    key: str
    held_tokens: int
    """Whose KV it holds; 0 while it waits."""
    most_tokens: int
    """The most that it can come to hold."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did."""

    finished: list[FinishedTurn]
    tokens: int
    """Computed in this step, prefill and decode together; 0 when there was nothing to do."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The engine's own figures at this moment."""

    device: str
    running: int
    waiting: int
    tokens: int
    """Context and output so far of all turns held."""
    kv_bytes_total: int
    kv_bytes_free: int
    """Blocks that no running turn holds; prefixes kept in them are given up when the space is needed."""
    kv_bytes_per_token: int


def first_line(error: Exception) -> str:
    """Of what a library says of an error; of a line that is long its first sentence."""
    text = f"{type(error).__name__} {error}" if isinstance(error, KeyError) else str(error)
    line = next((line.strip() for line in text.splitlines() if line.strip()), "") or _where(error)
    return line if len(line) <= LINE_CHARACTERS else line.partition(". ")[0][:LINE_CHARACTERS]


def _where(error: Exception) -> str:
    """Of an error that says nothing: its type, and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    return ": ".join([type(error).__name__, *(frame.line for frame in frames[-1:] if frame.line)])
