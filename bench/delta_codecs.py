"""The delta codecs that are measured, from ROSE and from other projects, and the cutting of an update into slices.

Keeps true
- `decode(old, encode(old, new))` is `new`, bit for bit. Words are flat uint16 (the bits of bfloat16). There is no loop
  over elements, and zstd uses one thread.
- Every codec encodes the same words. ROSE's codec gets slices, as in the weight transfer. For sizes the other codecs
  get whole tensors, so that they have one payload for each tensor; for speeds they get slices too, which fit into the
  cache.

The codecs of other projects are written from their descriptions.

coo      The plain sparse tensor: a uint32 index and the new word for every change.
xor_zstd Every word XORed with its old word, then zstd level 1 (slime).
gap_zstd uint16 distances between changes, and the new words, each stream with zstd level 3 (as PULSE describes it).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import zstandard
from numpy.typing import NDArray

from bench.weight_deltas import Version
from rose.workers.weights.codec import decode, encode
from rose.workers.weights.layout import matrix, slices_of, whole

Words = NDArray[np.uint16]

SKIP = 0xFFFF
"""Gap without a change: skip this number of unchanged words."""


@dataclass(frozen=True)
class Codec:
    """An encoding of the changes of an update."""

    encode: Callable[[Words, Words], bytes]
    """(old, new) -> payload"""
    decode: Callable[[Words, bytes], Words]
    """(old, payload) -> new"""


def coo_encode(old: Words, new: Words) -> bytes:
    changed = np.flatnonzero(old != new).astype(np.uint32)
    return changed.tobytes() + new[changed].tobytes()


def coo_decode(old: Words, payload: bytes) -> Words:
    count = len(payload) // 6
    new = old.copy()
    new[np.frombuffer(payload, np.uint32, count)] = np.frombuffer(payload, np.uint16, count, offset=4 * count)
    return new


def xor_zstd_encode(old: Words, new: Words) -> bytes:
    payload: bytes = zstandard.ZstdCompressor(level=1).compress((old ^ new).data)
    return payload


def xor_zstd_decode(old: Words, payload: bytes) -> Words:
    words: Words = old ^ np.frombuffer(zstandard.ZstdDecompressor().decompress(payload), np.uint16)
    return words


def gap_zstd_encode(old: Words, new: Words) -> bytes:
    changed = np.flatnonzero(old != new)
    gaps = np.diff(changed, prepend=-1) - 1
    skips = gaps // SKIP
    stream = np.full(len(gaps) + int(skips.sum()), SKIP, dtype=np.uint16)
    stream[np.arange(len(gaps)) + np.cumsum(skips)] = gaps % SKIP
    compressor = zstandard.ZstdCompressor(level=3)
    first: bytes = compressor.compress(stream.data)
    second: bytes = compressor.compress(new[changed].data)
    return len(first).to_bytes(4, "little") + first + second


def gap_zstd_decode(old: Words, payload: bytes) -> Words:
    split = 4 + int.from_bytes(payload[:4], "little")
    decompressor = zstandard.ZstdDecompressor()
    stream = np.frombuffer(decompressor.decompress(payload[4:split]), np.uint16)
    is_change = stream != SKIP
    places = np.cumsum(stream + is_change.astype(np.int64)) - 1
    new = old.copy()
    new[places[is_change]] = np.frombuffer(decompressor.decompress(payload[split:]), np.uint16)
    return new


OTHER_CODECS: Mapping[str, Codec] = {
    "coo": Codec(coo_encode, coo_decode),
    "xor_zstd": Codec(xor_zstd_encode, xor_zstd_decode),
    "gap_zstd": Codec(gap_zstd_encode, gap_zstd_decode),
}

DTYPE = "bfloat16"

OURS = "rose"


def _decode(old: Words, payload: bytes) -> Words:
    return decode(old, payload, DTYPE).astype(np.uint16, copy=False)


CODECS: Mapping[str, Codec] = {OURS: Codec(partial(encode, dtype=DTYPE), _decode), **OTHER_CODECS}
"""Codecs by name; ROSE's codec is the first."""


def tensors(old: Version, new: Version) -> Iterator[tuple[Words, Words]]:
    """Yield each tensor as flat (old, new) words."""
    for name, before in old.items():
        yield before.reshape(-1), new[name].reshape(-1)


def slices(old: Version, new: Version) -> Iterator[tuple[Words, Words]]:
    """Yield each slice of each tensor as flat (old, new) words."""
    for name, before in old.items():
        shape = matrix(before.shape)
        for box in slices_of(whole(shape)):
            rows = slice(box.row_start, box.row_start + box.rows)
            yield before.reshape(shape)[rows].reshape(-1), new[name].reshape(shape)[rows].reshape(-1)
