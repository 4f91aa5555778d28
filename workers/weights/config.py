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
    """How policy versions travel. Raises ValueError for a value out of its range."""

    run: str = DEFAULT_RUN
    """Whose versions they are: executors take those of this run, in their own namespace, and of no other."""
    dtype: str = ""
    """What weights that are finer are rounded to on the wire: float32, bfloat16 or float16; empty: `executor.dtype`."""
    anchor_every: int = 20
    """After so many versions that build on the one before comes one that builds on nothing; sooner where cheaper."""
    anchor_max_age_seconds: float = 21_600.0
    """After so long the next version builds on nothing too: a joiner never needs what is much older."""
    column_parts: int = 1
    """Ranges into which the columns of matrices are cut, so that receivers sharded along columns fetch only theirs."""
    store: str = ""
    """Path or URL (fsspec's, as s3://bucket/folder) of a store for large anchors that the trainer and all executors
    reach; empty: every chunk goes over the log."""
    store_above_bytes: int = 256 * 2**20
    """Models larger than this have their anchors in the store, if there is one."""
    signing_key: Path | None = None
    """PEM file with the Ed25519 key with which the trainer signs its versions; `rose keys` makes one."""
    trusted_key: Path | None = None
    """PEM file with the public key by which executors know the trainer; once set, nothing else is taken."""

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
