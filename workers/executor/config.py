"""Settings of a rollout executor."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig:
    """One executor: its engine and how much it takes on."""

    model_folder: Path
    """Hugging Face folder that gives architecture and tokenizer; weights come from the log."""
    model_id: str = "policy"
    """Whose weight versions to follow."""
    slot: int = 0
    """The executor's inbox partition, and its ordinal; no two executors share one."""
    max_turns: int = 64
    """Turns held at once, running and waiting."""
    max_model_len: int = 1024
    """Longest context and output of one turn, in tokens."""
    kv_cache_bytes: int = 64 << 20
    """Memory of the KV cache."""
    step_tokens: int = 1024
    """Most tokens of one engine step, at least `max_turns`; longer prefills are cut into chunks."""
    dtype: str = "float32"
    """What the engine computes in."""
    drain_before_swap: bool = False
    """Whether turns in the engine end on the version they began on: new ones then wait until it is empty. Otherwise
    they go on under the new version, and their spans say from which token on."""
    heartbeat_seconds: float = 0.1
    """Time between heartbeats, at most 0.2."""
