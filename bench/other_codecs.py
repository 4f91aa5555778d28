"""The delta codecs of other projects, re-made from their descriptions to be measured beside ROSE's.

Keeps true: `decode(old, encode(old, new))` is `new`, bit for bit; words are flat uint16 (bfloat16 as its bits). No loop
over elements; zstd runs on one thread.

coo      The plain sparse tensor: a uint32 index and the new word for every change.
xor_zstd Every word XORed with its old one, then zstd level 1 (slime).
gap_zstd uint16 distances between changes and the new words, each stream by zstd level 3 (as PULSE describes it).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import zstandard
from numpy.typing import NDArray

Words = NDArray[np.uint16]

SKIP = 0xFFFF
"""A gap that says: pass over so many unchanged words, no change here."""


@dataclass(frozen=True)
class Codec:
    """A way to write down what changed."""

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
