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
    WRONG_DTYPE = "wrong_dtype"
    """An element type that the receiver's engine cannot hold exactly."""
    UNSIGNED = "unsigned"
    """Signed by nobody, where a key is set: nothing is learned from it."""
    FORGED = "forged"
    """Signed by another key, or changed since: nothing is learned from it."""
    STRANGER = "stranger"
    """Of another run or namespace: nothing is learned from it."""
    WRONG_BASE = "wrong_base"
    """It builds on a version that is not on the log, or on other bytes than that version's."""
    MISSING_CHUNK = "missing_chunk"
    """The log does not hold it any more, or never did."""
    WRONG_CHUNK = "wrong_chunk"
    """What lies at the place is another chunk, or not of the size that the manifest says."""
    WRONG_DIGEST = "wrong_digest"
    """A chunk is not intact, or all slices together are not what the manifest says."""
    WRONG_RESULT = "wrong_result"
    """A slice does not decode to what was published."""
    NOT_FINITE = "not_finite"
    """A weight of it is no finite number."""
    UNREADABLE = "unreadable"
    """Reading it raised what nobody expects: see the log."""


OF_THE_BASE = frozenset({Refusal.WRONG_BASE, Refusal.WRONG_RESULT})
"""Refusals that may be the fault of what a version was built upon."""


class VersionRefused(Exception):
    """A version that must not be taken; the one that serves, serves on."""

    def __init__(self, refusal: Refusal, detail: str) -> None:
        super().__init__(detail)
        self.refusal = refusal
