"""Why a receiver does not take a version."""

from enum import Enum


class Refusal(Enum):
    """Why a receiver does not take a version."""

    UNKNOWN_TENSOR = "unknown_tensor"
    MISSING_TENSOR = "missing_tensor"
    BAD_SHAPE = "bad_shape"
    """Another shape or element type than the model's, or a tensor named twice."""
    BAD_TILING = "bad_tiling"
    """The slices do not cover each element once, or their sizes do not follow from their coordinates."""
    BAD_SIGNATURE = "bad_signature"
    """Not signed by a key that this receiver trusts."""
    WRONG_BASE = "wrong_base"
    """It builds on a version that is not on the log, or on other bytes than that version's."""
    MISSING_CHUNK = "missing_chunk"
    """The log does not hold it any more, or never did."""
    WRONG_CHUNK = "wrong_chunk"
    """What lies at the place is another chunk, not of the size that the manifest says, or no payload of the codec."""
    WRONG_DIGEST = "wrong_digest"


class VersionRefused(Exception):
    """A version that must not be taken; the one that serves, serves on."""

    def __init__(self, refusal: Refusal, detail: str) -> None:
        super().__init__(detail)
        self.refusal = refusal
