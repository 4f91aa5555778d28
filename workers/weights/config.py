"""Settings of the weight transfer."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HOLDS: Mapping[str, tuple[str, ...]] = {
    "float32": ("float32", "bfloat16", "float16"),
    "bfloat16": ("bfloat16",),
    "float16": ("float16",),
}
"""The element types whose values each element type holds exactly."""

DEFAULT_RUN = "run"
"""Name of the run where a publisher and its receivers are not given one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsConfig:
    """How policy versions are encoded and stored.

    Raises ValueError for a value out of its range.
    """

    run: str = DEFAULT_RUN
    """Name of the run. Executors take the versions of this run in their own namespace, and no others."""
    dtype: str = ""
    """Element type to which finer weights are rounded for the transfer; empty: `executor.dtype`."""
    anchor_every: int = 20
    """Number of consecutive deltas after which an anchor (a complete version) is published; sooner where that is
    cheaper."""
    anchor_max_age_seconds: float = 21_600.0
    """Age of the last anchor after which the next version is an anchor, so that a new executor needs nothing much
    older."""
    column_parts: int = 1
    """Parts into which the columns of matrices are cut, so that receivers sharded by columns fetch only their parts."""
    encode_on_gpu: bool = False
    """Whether a trainer on a GPU collects the changes of its weights there. That needs Triton and a C compiler, and as
    much more GPU memory as the published weights."""
    store: str = ""
    """Path or URL (fsspec, as s3://bucket/folder) of a store for large anchors, which the trainer and all executors
    reach; empty: every chunk is on the log."""
    store_above_bytes: int = 256 * 2**20
    """Model size above which anchors are in the store, if there is one."""
    signing_key: Path | None = None
    """PEM file with the Ed25519 key with which the trainer signs its versions; `rose keys` makes one."""
    trusted_key: Path | None = None
    """PEM file with the trainer's public key. Executors with this key take only versions that it verifies."""

    def __post_init__(self) -> None:
        in_range = {
            f"dtype must be one of {', '.join(HOLDS)}": self.dtype in ("", *HOLDS),
            "anchor_every must be from 0 to 1000000": 0 <= self.anchor_every <= 1_000_000,
            "anchor_max_age_seconds must be from 0 to 1e9": 0 <= self.anchor_max_age_seconds <= 1e9,
            "column_parts must be from 1 to 4096": 1 <= self.column_parts <= 4_096,
            "store_above_bytes must be from 0 to 2^60": 0 <= self.store_above_bytes <= 2**60,
        }
        for sentence, holds in in_range.items():
            if not holds:
                raise ValueError(sentence)
