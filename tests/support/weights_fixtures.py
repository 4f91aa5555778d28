"""Versions of weights without a broker: the records of a publisher, and a log in a dictionary.

Keeps true: manifests and chunks are made with the functions of the publisher (`cut`, the codec, `merge`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rose.schemas.weights import ChunkRef, SliceRef, TensorSpec, WeightChunk, WeightManifest
from rose.topics.settings import BusSettings
from rose.workers.weights import codec
from rose.workers.weights.chunk_stores import StoredChunk
from rose.workers.weights.layout import NO_BASE, Box, digest_of, matrix, slices_of, whole, whole_digest
from rose.workers.weights.manifests import read_manifests
from rose.workers.weights.publish import merge_manifests
from rose.workers.weights.tensors import INFINITY, bits_of, read_box, spec_of, write_box
from rose.workers.weights.trust import Trust

Tensors = dict[str, Tensor]
Place = tuple[int, int]

RUN = ":run"
"""Default run name without a namespace."""


def bare(version: int, base: int | None = None, **fields: Any) -> WeightManifest:
    """Return a manifest without tensors."""
    standard: dict[str, Any] = {"model_id": "m", "run": RUN, "epoch": 0, "step": version, "tensors": (), "slices": ()}
    standard |= {"digest": NO_BASE, "published_at": 0.0}
    return WeightManifest(version=version, base_version=base, **(standard | fields))


def random_tensors(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, random: np.random.Generator) -> Tensors:
    """Return tensors of arbitrary finite bit patterns, subnormals and both zeros included."""
    tensors = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
    for tensor in tensors.values():
        words = bits_of(tensor)
        words[...] = random.integers(0, 1 << (8 * words.itemsize), words.shape, dtype=words.dtype)
        _make_finite(tensor)
    return tensors


def changed(tensors: Tensors, share: float, random: np.random.Generator) -> Tensors:
    """Return a copy in which about the given number of elements have other bits."""
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in copies.values():
        words = bits_of(tensor)
        words += (random.random(words.shape) < share).astype(words.dtype)
        _make_finite(tensor)
    return copies


def _make_finite(tensor: Tensor) -> None:
    words, infinity = bits_of(tensor), INFINITY[spec_of("", tensor).dtype]
    magnitude = words.dtype.type(np.iinfo(words.dtype).max >> 1)
    words[...] = (words & ~magnitude) | ((words & magnitude) % words.dtype.type(infinity))


def same_bits(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(
        bool(np.array_equal(bits_of(some[name]), bits_of(others[name]))) for name in some
    )


def part(tensor: Tensor, box: Box) -> NDArray[Any]:
    """Return the bits of a box."""
    return read_box(bits_of(tensor), box)


def shards_of(box: Box, ranks: int) -> list[Box]:
    """Return row ranges as FSDP2 splits them: equal lengths except for the last, which may be empty."""
    length = -(-box.rows // ranks)
    edges = [min(box.rows, length * rank) for rank in range(ranks + 1)]
    return [Box(start, stop - start, 0, box.columns) for start, stop in pairwise(edges)]


def with_slice(manifest: WeightManifest, number: int, **change: object) -> WeightManifest:
    """Return a complete manifest with one changed slice."""
    slices = list(manifest.slices)
    slices[number] = msgspec.structs.replace(slices[number], **change)
    changed = msgspec.structs.replace(manifest, slices=tuple(slices))
    return msgspec.structs.replace(changed, digest=whole_digest(changed))


@dataclass(slots=True)
class MemoryChunkSink:
    """A chunk log of three partitions in memory."""

    chunks: dict[Place, WeightChunk] = field(default_factory=dict)
    fetched: list[ChunkRef] = field(default_factory=list)
    """Every reference that was ever fetched."""
    partitions: int = 3
    files: tuple[str, ...] = ()

    def put(self, chunk: WeightChunk) -> StoredChunk:
        partition, offset = len(self.chunks) % self.partitions, len(self.chunks) // self.partitions
        self.chunks[partition, offset] = chunk
        return StoredChunk(len(chunk.payload), digest_of(chunk.payload), partition=partition, offset=offset)

    def close(self) -> None:
        """Do nothing: all chunks are stored at once."""

    def store(
        self,
        tensors: Tensors,
        version: int,
        *,
        base: Tensors | None = None,
        base_version: int | None = None,
        column_parts: int = 1,
        row_shards: int = 1,
        chunk_bytes: int = 100,
    ) -> WeightManifest:
        """Store a version: an anchor, or a delta on `base`, written as by `ranks` ranks that each own some rows."""
        specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
        slices = [
            self._slice(number, spec, box, tensors, base, version, chunk_bytes)
            for number, spec in enumerate(specs)
            for shard in shards_of(whole(spec.shape), row_shards)
            for box in slices_of(shard, column_parts=column_parts)
        ]
        manifest = WeightManifest(
            model_id="m",
            run=RUN,
            epoch=0,
            version=version,
            base_version=None if base is None else base_version,
            step=version,
            tensors=tuple(specs),
            slices=tuple(slices),
            digest=NO_BASE,
            published_at=0.0,
        )
        return merge_manifests([manifest])

    def fetch(self, refs: list[ChunkRef]) -> Iterator[tuple[ChunkRef, WeightChunk]]:
        """Return each partition in order, so that slices are interleaved; missing chunks are left out."""
        self.fetched += refs
        for ref in sorted(refs, key=lambda ref: (ref.partition, ref.offset)):
            if (ref.partition, ref.offset) in self.chunks:
                yield ref, self.chunks[ref.partition, ref.offset]

    def _slice(
        self,
        number: int,
        spec: TensorSpec,
        box: Box,
        tensors: Tensors,
        base: Tensors | None,
        version: int,
        chunk_bytes: int,
    ) -> SliceRef:
        new = part(tensors[spec.name], box)
        old = None if base is None else part(base[spec.name], box)
        if old is None:
            payload = codec.dense(new)
        else:
            payload = b"" if np.array_equal(old, new) else codec.encode(old, new, spec.dtype)
        return SliceRef(
            tensor=number,
            row_start=box.row_start,
            rows=box.rows,
            column_start=box.column_start,
            columns=box.columns,
            digest=digest_of(new.tobytes()),
            base_digest=NO_BASE if old is None else digest_of(old.tobytes()),
            chunks=tuple(
                self.put(
                    WeightChunk(
                        model_id="m",
                        version=version,
                        tensor=spec.name,
                        part=place,
                        payload=payload[start : start + chunk_bytes],
                    )
                ).ref()
                for place, start in enumerate(range(0, len(payload), chunk_bytes))
            ),
        )


def covered(spec_shape: tuple[int, ...], boxes: list[Box]) -> NDArray[np.int64]:
    """Return how often each element of a tensor lies in one of the boxes, int64 [rows, columns]."""
    times = np.zeros(matrix(spec_shape), dtype=np.int64)
    for box in boxes:
        write_box(times, box, read_box(times, box) + 1)
    return times


def newest_manifest(settings: BusSettings, trust: Trust) -> WeightManifest | None:
    """Return the newest trusted manifest on the log; None if there is none."""
    found = filter(None, map(trust.verified, read_manifests(settings)))
    return max(found, key=lambda manifest: manifest.order, default=None)
