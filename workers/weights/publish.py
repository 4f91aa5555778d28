"""Publishing policy versions: what changed since the last one, in chunks of slices, and the manifest that commits them.

Keeps true
- A version is published once its manifest is on the log, and no chunk of it is stored after that.
- A rank publishes what it owns (of a DTensor its local shard, without gathering); nothing is published twice.
- A version builds on the one that the same publisher made before, else on nothing: the first one is an anchor, and so
  is one after every `anchor_every` versions, or sooner when the chain since the last has cost as much as an anchor.

The whole contract of another trainer with the bus:

    publisher = WeightPublisher(BusSettings("broker:9092"), "policy")
    for version in range(1, steps + 1):
        ...  # an optimizer step
        publisher.publish(model.named_parameters(), version)
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import msgspec
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from prometheus_client import Counter, Histogram
from torch import Tensor

from schemas.weights import ChunkRef, SliceRef, TensorSpec, WeightChunk, WeightManifest
from topics.bus import Reader, Writer
from topics.catalog import CHUNKS, MANIFESTS
from topics.settings import BusSettings
from workers.weights import codec
from workers.weights.config import WeightsConfig
from workers.weights.layout import CHUNK_BYTES, NO_BASE, Box, WholeDigest, cut, digest_of, whole, whole_digest
from workers.weights.manifests import manifest_key
from workers.weights.ownership import owned
from workers.weights.signing import private_key, sign
from workers.weights.tensors import TORCH_DTYPES, Matrix, spec_of, take, words_of

PUBLISHED_BYTES = Counter("rose_weights_published_bytes_total", "Payload bytes of the chunks that were published.")
DENSE_BYTES = Counter("rose_weights_dense_bytes_total", "Bytes of the weights that the published chunks stand for.")
PUBLISH_SECONDS = Histogram(
    "rose_weights_publish_seconds",
    "From the first tensor of a version to the storing of its last chunk.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
)


@dataclass(slots=True)
class _Part:
    """One version of what this publisher owns."""

    words: dict[str, Matrix] = field(default_factory=dict)
    """A copy of the owned part of each tensor."""
    boxes: dict[str, Box] = field(default_factory=dict)
    specs: dict[str, TensorSpec] = field(default_factory=dict)
    digests: dict[tuple[str, Box], bytes] = field(default_factory=dict)


class WeightPublisher:
    """Publishes versions of one model. Not for several threads."""

    def __init__(
        self,
        settings: BusSettings,
        model_id: str,
        *,
        dtype: torch.dtype | None = None,
        anchor_every: int = 20,
        column_parts: int = 1,
        key: Ed25519PrivateKey | None = None,
    ) -> None:
        """Raises TopicMissing or BusError.

        `dtype`: what floating-point weights are rounded to on the wire; None is as they are. `column_parts`: see
        `layout.cut`. `key` signs the manifests.
        """
        self.model_id = model_id
        self._dtype = dtype
        self._anchor_every = anchor_every
        self._column_parts = column_parts
        self._key = key
        reader = Reader(settings, "rose-weights", group="weights")
        try:
            self._partitions = reader.partitions(CHUNKS)
        finally:
            reader.close()
        self._writer = Writer(settings, f"rose-weights-{model_id}")
        self._base: _Part | None = None
        self._base_version = -1
        self._chain_bytes = self._chain_versions = 0
        self._written = self._written_chunks = 0

    def publish(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> WeightManifest:
        """Store a version and commit it: it is whole on the log when this returns. One process owns all tensors.

        Names are Hugging Face's. The tensors must not change meanwhile. Raises BusError, RecordError for a model of
        more slices than a manifest holds, or LayoutError for an element type that cannot travel.
        """
        manifest = self.store(named_tensors, version, step=version, published_at=time.time())
        self.commit(manifest)
        return manifest

    def commit(self, manifest: WeightManifest) -> None:
        """Put a manifest of what was stored on the log. Raises BusError."""
        self._writer.write(MANIFESTS, manifest, key=manifest_key(manifest))
        self._writer.flush()

    def digest(self, named_tensors: Iterable[tuple[str, Tensor]]) -> bytes:
        """What the manifest of a version made of these tensors, by one process, says as its digest."""
        digest = WholeDigest()
        for name, tensor in named_tensors:
            words = words_of(self._wired(tensor))
            for box in cut(whole(tensor.shape), column_parts=self._column_parts):
                digest.add(name, box, digest_of(take(words, box).data))
        return digest.digest()

    def store(
        self, named_tensors: Iterable[tuple[str, Tensor]], version: int, *, step: int, published_at: float
    ) -> WeightManifest:
        """Store a version's chunks; return the manifest that would commit them (see `merge` for several ranks).

        Whoever does not commit it must throw the publisher away: its next version builds on this one. Raises as
        `publish` does.
        """
        started = perf_counter()
        now = self._part_of(named_tensors)
        dense_bytes = sum(words.nbytes for words in now.words.values())
        base = self._base if self._may_build_on_base(now, dense_bytes) else None
        before = self._written
        pending = [
            (number, name, box, list(self._store_slice(name, box, now, base, version)))
            for number, name in enumerate(now.specs)
            if name in now.words
            for box in cut(now.boxes[name], column_parts=self._column_parts)
        ]
        self._writer.flush()
        slices = tuple(
            _slice_ref(
                number, box, now.digests[name, box], NO_BASE if base is None else base.digests[name, box], chunks
            )
            for number, name, box, chunks in pending
        )
        sent = self._written - before
        self._chain_versions, self._chain_bytes = (
            (0, 0) if base is None else (self._chain_versions + 1, self._chain_bytes + sent)
        )
        manifest = WeightManifest(
            model_id=self.model_id,
            version=version,
            base_version=None if base is None else self._base_version,
            step=step,
            tensors=tuple(now.specs.values()),
            slices=slices,
            digest=NO_BASE,
            published_at=published_at,
        )
        self._base, self._base_version = now, version
        DENSE_BYTES.inc(dense_bytes)
        PUBLISHED_BYTES.inc(sent)
        PUBLISH_SECONDS.observe(perf_counter() - started)
        return merge([manifest], self._key)

    def _part_of(self, named_tensors: Iterable[tuple[str, Tensor]]) -> _Part:
        """A copy of what this process owns, with the digest of every slice."""
        part = _Part()
        for name, tensor in named_tensors:
            wired = self._wired(tensor)
            part.specs[name] = spec_of(name, wired)
            local = owned(wired)
            if local is None:
                continue
            part.boxes[name], shard = local
            part.words[name] = words_of(shard).copy()
            for box in cut(part.boxes[name], column_parts=self._column_parts):
                part.digests[name, box] = digest_of(_within(part, name, box).data)
        return part

    def _wired(self, tensor: Tensor) -> Tensor:
        return tensor.detach() if self._dtype is None else tensor.detach().to(self._dtype)

    def _may_build_on_base(self, now: _Part, dense_bytes: int) -> bool:
        base = self._base
        same = base is not None and base.specs == now.specs and base.boxes == now.boxes
        return same and self._chain_versions < self._anchor_every and self._chain_bytes < dense_bytes

    def _store_slice(self, name: str, box: Box, now: _Part, base: _Part | None, version: int) -> Iterator["_Stored"]:
        """Hand the chunks of a slice to the writer; where they lie is known after its flush."""
        new = _within(now, name, box)
        if base is None:
            payload = codec.dense(new)
        elif base.digests[name, box] == now.digests[name, box]:
            return
        else:
            payload = codec.encode(_within(base, name, box), new, now.specs[name].dtype)
        for part, start in enumerate(range(0, len(payload), CHUNK_BYTES)):
            chunk = WeightChunk(
                model_id=self.model_id,
                version=version,
                tensor=name,
                part=part,
                payload=payload[start : start + CHUNK_BYTES],
            )
            stored = _Stored(len(chunk.payload), digest_of(chunk.payload))
            place = self._written_chunks % self._partitions  # evenly, so that a receiver fetches from all at once
            self._written_chunks += 1
            self._written += stored.size
            self._writer.write(CHUNKS, chunk, key=name, partition=place, on_delivery=stored.at)
            self._writer.poll()
            yield stored


@dataclass(slots=True)
class _Stored:
    """A chunk on its way."""

    size: int
    digest: bytes
    partition: int = -1
    offset: int = -1

    def at(self, partition: int, offset: int) -> None:
        self.partition, self.offset = partition, offset

    def ref(self) -> ChunkRef:
        return ChunkRef(partition=self.partition, offset=self.offset, bytes=self.size, digest=self.digest)


def _slice_ref(number: int, box: Box, digest: bytes, base_digest: bytes, chunks: Sequence[_Stored]) -> SliceRef:
    return SliceRef(
        tensor=number,
        row_start=box.row_start,
        rows=box.rows,
        column_start=box.column_start,
        columns=box.columns,
        digest=digest,
        base_digest=base_digest,
        chunks=tuple(chunk.ref() for chunk in chunks),
    )


def _within(part: _Part, name: str, box: Box) -> Matrix:
    """The words of a slice, out of the owned part of its tensor."""
    own = part.boxes[name]
    at = Box(box.row_start - own.row_start, box.rows, box.column_start - own.column_start, box.columns)
    return take(part.words[name], at)


def merge(parts: Sequence[WeightManifest], key: Ed25519PrivateKey | None = None) -> WeightManifest:
    """One manifest of those that the ranks' `store` returned for the same version, signed if there is a key."""
    slices = sorted(
        (piece for part in parts for piece in part.slices),
        key=lambda piece: (piece.tensor, piece.row_start, piece.column_start),
    )
    manifest = msgspec.structs.replace(parts[0], slices=tuple(slices), signature=b"")
    manifest = msgspec.structs.replace(manifest, digest=whole_digest(manifest))
    return manifest if key is None else sign(manifest, key)


def publisher_of(settings: BusSettings, model_id: str, config: WeightsConfig) -> WeightPublisher:
    """The publisher that a configuration describes. Raises UsageError for a broken key file; TopicMissing, BusError."""
    return WeightPublisher(
        settings,
        model_id,
        dtype=TORCH_DTYPES[config.dtype] if config.dtype else None,
        anchor_every=config.anchor_every,
        column_parts=config.column_parts,
        key=private_key(config.signing_key) if config.signing_key else None,
    )
