"""How an update is cut before it is coded, and the codecs that are measured on it.

Keeps true: every codec codes the same words. ROSE's gets slices, as the weight transfer cuts them. For sizes the peers
get whole tensors, so that they pay for one payload a tensor; for speeds they get slices too, which stay in the cache.
"""

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bench.peer_codecs import PEERS, Codec, Words
from bench.weight_deltas import Version
from workers.weights.codec import decode, encode

SLICE_ELEMENTS = 1 << 20
"""Most elements of a slice; it holds whole rows."""

DTYPE = "bfloat16"

OURS = "rose"


def _decode(old: Words, payload: bytes) -> Words:
    return decode(old, payload, DTYPE).astype(np.uint16, copy=False)


CODECS: Mapping[str, Codec] = {OURS: Codec(partial(encode, dtype=DTYPE), _decode), **PEERS}
"""By name; ROSE's first."""


def tensors(old: Version, new: Version) -> Iterator[tuple[Words, Words]]:
    """Each tensor as flat (old, new) words."""
    for name, before in old.items():
        yield before.reshape(-1), new[name].reshape(-1)


def slices(old: Version, new: Version) -> Iterator[tuple[Words, Words]]:
    """Each slice of each tensor as flat (old, new) words."""
    for name, before in old.items():
        for rows in _row_slices(before):
            yield before[rows].reshape(-1), new[name][rows].reshape(-1)


def _row_slices(tensor: NDArray[np.uint16]) -> Iterator[slice]:
    step = max(1, SLICE_ELEMENTS * len(tensor) // tensor.size)
    for start in range(0, len(tensor), step):
        yield slice(start, start + step)
