"""How an update is cut before it is coded, and the codecs that are measured on it.

Keeps true: every codec codes the same words. ROSE's gets slices, as the weight transfer cuts them. For sizes the others
get whole tensors, so that they pay for one payload a tensor; for speeds they get slices too, which stay in the cache.
"""

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np

from bench.other_codecs import OTHER_CODECS, Codec, Words
from bench.weight_deltas import Version
from rose.workers.weights.codec import decode, encode
from rose.workers.weights.layout import matrix, slices_of, whole

DTYPE = "bfloat16"

OURS = "rose"


def _decode(old: Words, payload: bytes) -> Words:
    return decode(old, payload, DTYPE).astype(np.uint16, copy=False)


CODECS: Mapping[str, Codec] = {OURS: Codec(partial(encode, dtype=DTYPE), _decode), **OTHER_CODECS}
"""By name; ROSE's first."""


def tensors(old: Version, new: Version) -> Iterator[tuple[Words, Words]]:
    """Each tensor as flat (old, new) words."""
    for name, before in old.items():
        yield before.reshape(-1), new[name].reshape(-1)


def slices(old: Version, new: Version) -> Iterator[tuple[Words, Words]]:
    """Each slice of each tensor as flat (old, new) words."""
    for name, before in old.items():
        shape = matrix(before.shape)
        for box in slices_of(whole(shape)):
            rows = slice(box.row_start, box.row_start + box.rows)
            yield before.reshape(shape)[rows].reshape(-1), new[name].reshape(shape)[rows].reshape(-1)
