"""Settings of a rollout executor."""

import math
import re
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rose.schemas.errors import UsageError
from rose.schemas.heartbeats import MAX_HELD_TURNS
from rose.schemas.turns import FENCING_KEY

NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""The pattern of `rose.schemas.limits.Id`."""

VLLM_ARGUMENTS = frozenset(
    {
        "attention_backend",
        "attention_config",
        "block_size",
        "compilation_config",
        "cudagraph_capture_sizes",
        "disable_cascade_attn",
        "enable_flashinfer_autotune",
        "enforce_eager",
        "gpu_memory_utilization",
        "kernel_config",
        "kv_cache_dtype",
        "kv_cache_dtype_skip_layers",
        "linear_backend",
        "long_prefill_token_threshold",
        "mamba_backend",
        "mamba_block_size",
        "mamba_cache_dtype",
        "mamba_ssm_cache_dtype",
        "max_cudagraph_capture_size",
        "moe_backend",
        "optimization_level",
        "performance_mode",
        "safetensors_load_strategy",
        "tensor_parallel_size",
        "use_fp64_gumbel",
    }
)
"""Arguments of `vllm.EngineArgs` that `executor.vllm` may set. They change how fast an engine computes, in how much
memory and in which precision. Other arguments change which tokens are sampled, or follow from other settings."""


WIDE_TYPES = ("float32", "float16", "half", "bfloat16")
"""Element types of a KV cache that are not of 8 bits."""

MAX_RANKS = 64
"""Most ranks of one engine."""

OTHER_ATTENTION = frozenset({"use_non_causal", "indexer_sparse_logits"})
"""Fields of vLLM's attention configuration with which a model computes other logprobs than in training."""


def _is_plain(value: Any) -> bool:
    """Whether TOML and JSON can write the value, and read the same again."""
    match value:
        case float():
            return math.isfinite(value)
        case list():
            return all(map(_is_plain, value))
        case dict():
            return all(isinstance(name, str) and _is_plain(inner) for name, inner in value.items())
    return isinstance(value, bool | int | str)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig:
    """One executor: its engine, and how many turns it takes.

    Raises ValueError for a value out of its range.
    """

    model_folder: Path
    """Hugging Face folder with the architecture and the tokenizer; weights come from the log."""
    model_id: str = "policy"
    """Name of the policy whose versions the executor follows."""
    name: str = ""
    """Unique name of the executor; empty: the host's name, which on a cluster is the pod's name."""
    slot: int | None = None
    """Inbox partition that the executor reads; unset: it follows from the name. Several executors may share one."""
    max_turns: int = 64
    """Most turns held at once, running and waiting."""
    max_model_len: int = 1024
    """Longest context and output of one turn, in tokens."""
    kv_cache_bytes: int = 64 << 20
    """Size of the KV cache. For a lender: the most of serving's KV memory that turns may hold."""
    step_tokens: int = 1024
    """Most tokens of one engine step, at least `max_turns`; longer prefills are split into chunks."""
    dtype: str = "float32"
    """Element type in which the engine computes: `float32`, `bfloat16` or `float16`."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """Arguments of the engine by vLLM's names, as `enforce_eager`, `compilation_config`, `attention_backend`,
    `kv_cache_dtype`, `gpu_memory_utilization` or `tensor_parallel_size` (ranks on one machine). An engine on a CPU is
    always eager, one on a GPU only if `enforce_eager` is true. With `gpu_memory_utilization` vLLM chooses the size of
    the KV cache; leave a quarter of the weights' size free, to stage versions. A `kv_cache_dtype` of 8 bits changes
    logprobs: `trainer.max_logprob_difference` must allow the difference. Lenders do not use this table."""
    drain_before_swap: bool = False
    """Whether running turns end under the version under which they began; new turns then wait until the engine is
    empty. Otherwise running turns continue under the new version, and their spans say from which token on."""
    heartbeat_seconds: float = 0.1
    """Time between two heartbeats."""

    def __post_init__(self) -> None:
        in_range = {
            "slot must be from 0 to 2^31 - 1": self.slot is None or 0 <= self.slot < 2**31,
            f"max_turns must be from 1 to {MAX_HELD_TURNS}": 1 <= self.max_turns <= MAX_HELD_TURNS,
            "max_model_len must be from 2 to 2^31": 2 <= self.max_model_len <= 2**31,
            "kv_cache_bytes must be from 1 to 2^50": 1 <= self.kv_cache_bytes <= 2**50,
            "step_tokens must be from 1 to 2^31": 1 <= self.step_tokens <= 2**31,
            "heartbeat_seconds must be from 0.01 to 0.2": 0.01 <= self.heartbeat_seconds <= 0.2,
        }
        for sentence, holds in in_range.items():
            if not holds:
                raise ValueError(sentence)
        if unknown := sorted(self.vllm.keys() - VLLM_ARGUMENTS):
            raise ValueError(f"vllm cannot set {unknown[0]}: it may set {', '.join(sorted(VLLM_ARGUMENTS))}")
        for name, value in self.vllm.items():
            if not _is_plain(value):
                raise ValueError(f"vllm.{name} must be made of truth values, finite numbers, texts, lists and tables")
        cache = self.vllm.get("kv_cache_dtype")
        if cache in WIDE_TYPES and cache != self.dtype:
            raise ValueError(
                f"vllm.kv_cache_dtype is {cache} and dtype {self.dtype}: take auto, {self.dtype} or a type of 8 bits, "
                "because vLLM may read other wide types as if they were the engine's"
            )
        ranks = self.vllm.get("tensor_parallel_size", 1)
        if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= MAX_RANKS:
            raise ValueError(f"vllm.tensor_parallel_size must be a whole number from 1 to {MAX_RANKS}")
        attention = self.vllm.get("attention_config")
        if isinstance(attention, dict) and (other := sorted(attention.keys() & OTHER_ATTENTION)):
            raise ValueError(f"vllm.attention_config cannot set {other[0]}: tokens would have other logprobs")

    @property
    def worker(self) -> str:
        """The executor's name. Raises UsageError if the name is invalid."""
        name = self.name or socket.gethostname()
        if NAME.fullmatch(name) is None or name == FENCING_KEY:
            raise UsageError(
                f"{name!r} cannot be an executor's name: give one in executor.name, of 1 to 128 characters of "
                f"A-Z a-z 0-9 . _ : -, other than {FENCING_KEY!r}"
            )
        return name

    @property
    def short_name(self) -> str:
        """The part of the name behind its last hyphen, as of a pod's name, for short process names."""
        return self.worker.rpartition("-")[2]
