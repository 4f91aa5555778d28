"""Settings of the weight transfer."""

from dataclasses import dataclass
from pathlib import Path

DTYPES = ("", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsConfig:
    """How policy versions travel. Raises ValueError for a value out of its range."""

    dtype: str = ""
    """What the trainer's weights are rounded to on the wire: float32, bfloat16 or float16; empty: what they are."""
    anchor_every: int = 20
    """After so many versions that build on the one before comes one that builds on nothing; sooner where cheaper."""
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
            f"dtype must be one of {', '.join(DTYPES[1:])}": self.dtype in DTYPES,
            "anchor_every must be at least 0": self.anchor_every >= 0,
            "column_parts must be at least 1": self.column_parts >= 1,
            "store_above_bytes must be at least 0": self.store_above_bytes >= 0,
        }
        for sentence, holds in in_range.items():
            if not holds:
                raise ValueError(sentence)
