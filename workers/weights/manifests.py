"""Manifests on the log: version numbers, record key, signature, and the index of a large manifest.

Keeps true
- A number never stands for two policies: the next number is above every number on the log and every number used since.
- A run that goes back begins an epoch whose versions are newer than all earlier ones, including those that the log has
  lost.
- Only the newest version may be published again under its number.
- Only trusted manifests count. Without keys, a number too large to have been reached by counting does not count either.
- The signed bytes are the bytes that are written: a manifest is encoded once.
- What a run has on the log is read only from trusted manifests.
- A manifest that names files has its own record key, so compaction keeps it until its tombstone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rose.schemas.errors import RoseError
from rose.schemas.limits import MAX_RECORD_BYTES
from rose.schemas.weights import (
    MAX_INDEX_CHUNKS,
    MAX_SLICES,
    MAX_TENSORS,
    SIGNATURE_HEADER,
    ChunkRef,
    FirstChunk,
    SliceRef,
    TensorSpec,
    WeightChunk,
    WeightIndex,
    WeightManifest,
)
from rose.schemas.wire import EncodedRecord, encoded
from rose.topics.catalog import MANIFESTS
from rose.topics.log_reader import read_to_end
from rose.topics.queries import noop
from rose.topics.records import Envelope
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from rose.workers.weights.checks import Refusal, VersionRefused, check_chunk
from rose.workers.weights.chunk_stores import CHUNK_BYTES, ChunkSink, lowest_offsets, put_payload
from rose.workers.weights.layout import LayoutError

INLINE_BYTES = MAX_RECORD_BYTES // 2
"""Largest encoded manifest with its tensors and slices in the record itself, without `first`."""

INDEX_BYTES = MAX_INDEX_CHUNKS * CHUNK_BYTES
"""Largest size of an index."""

INDEX = ":index"
"""Tensor name of the chunks of an index."""

FetchIndex = Callable[[list[ChunkRef]], Iterable[tuple[ChunkRef, WeightChunk]]]
"""Yields each chunk with its reference, in any order. May raise VersionRefused."""

INDEX_BATCH = 1_000
"""Tensors or slices decoded in one call; other threads run between two calls."""

_decoder = msgspec.msgpack.Decoder(WeightIndex)
_tensors = msgspec.msgpack.Decoder(tuple[TensorSpec, ...]).decode
_slices = msgspec.msgpack.Decoder(tuple[SliceRef, ...]).decode


def check_layout(tensors: Sequence[TensorSpec], slices: int) -> None:
    """Raises LayoutError if receivers would refuse these tensors or this number of slices."""
    try:
        _check_readable(_tensors, tensors, MAX_TENSORS)
        if slices > MAX_SLICES:
            raise ValueError(f"{slices} slices, and {MAX_SLICES} are the most")
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise LayoutError(f"no receiver would take these tensors: {error}") from error


def write_index(manifest: WeightManifest, sink: ChunkSink) -> WeightManifest:
    """Return the manifest as it is written.

    A large manifest has its tensors and slices in an index, which is put into the sink here.

    Raises BusError, StoreError or LayoutError.
    """
    index = _index_of(manifest)
    bare = msgspec.structs.replace(manifest, tensors=(), slices=())
    if len(index) + len(msgspec.msgpack.encode(bare)) > INLINE_BYTES:
        stored = put_payload(sink, index, model_id=manifest.model_id, version=manifest.version, tensor=INDEX)
        sink.close()
        refs = tuple(chunk.ref() for chunk in stored)
        written = msgspec.structs.replace(bare, index=refs)
    else:
        written = manifest
    on_log = () if manifest.files else (chunk for piece in manifest.slices for chunk in piece.chunks)
    lowest = sorted(lowest_offsets(chain(on_log, written.index)).items())
    first = tuple(FirstChunk(partition=partition, offset=offset) for partition, offset in lowest)
    return msgspec.structs.replace(written, first=first)


def _index_of(manifest: WeightManifest) -> bytes:
    """The encoded tensors and slices. Raises LayoutError if receivers would refuse them."""
    try:
        index = msgspec.msgpack.encode(WeightIndex(tensors=manifest.tensors, slices=manifest.slices))
        if len(index) > INDEX_BYTES:
            raise ValueError(f"it takes {len(index)} bytes, and an index holds {INDEX_BYTES}")
        _check_readable(_tensors, manifest.tensors, MAX_TENSORS)
        _check_readable(_slices, manifest.slices, MAX_SLICES)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        what = f"no receiver would take what version {manifest.version} says of its tensors and slices"
        raise LayoutError(f"{what}: {error}") from error
    return index


def _check_readable(read: Callable[[bytes], object], values: Sequence[object], most: int) -> None:
    if len(values) > most:
        raise ValueError(f"there are {len(values)} of them, and {most} are the most")
    for at in range(0, len(values), INDEX_BATCH):
        read(msgspec.msgpack.encode(values[at : at + INDEX_BATCH]))


def read_index(manifest: WeightManifest, fetch: FetchIndex) -> WeightManifest:
    """The manifest with all its tensors and slices. Raises VersionRefused and what `fetch` raises."""
    if not manifest.index:
        return manifest
    part_at = {(ref.partition, ref.offset): part for part, ref in enumerate(manifest.index)}
    parts: dict[int, bytes] = {}
    for ref, found in fetch(list(manifest.index)):
        part = part_at[ref.partition, ref.offset]
        parts[part] = check_chunk(found, ref, manifest, tensor=INDEX, part=part)
    if len(parts) < len(manifest.index):
        raise VersionRefused(Refusal.MISSING_CHUNK, "its index did not come whole")
    try:
        index = _decoder.decode(b"".join(parts[part] for part in range(len(parts))))
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise VersionRefused(Refusal.WRONG_CHUNK, f"its index cannot be read: {error}") from None
    return msgspec.structs.replace(manifest, tensors=index.tensors, slices=index.slices)


MANIFEST_PARTITION = (MANIFESTS, 0)
"""All manifests are in one partition, so that versions have an order."""


def manifest_key(manifest: WeightManifest) -> str:
    """The record key of a manifest: run, version and first file.

    Runs that share the topic do not replace each other's manifests, and a run does not replace a manifest of the same
    version that names other files.
    """
    version = f"{run_keys(manifest.model_id, manifest.run)}{manifest.version}"
    return "/".join((version, *manifest.files[:1]))


def run_keys(model_id: str, run: str) -> str:
    """The prefix of the record keys of a run's manifests."""
    return f"{model_id}/{run}/"


@dataclass(frozen=True, slots=True)
class SignedManifest:
    """A manifest with its encoded bytes and its signature header."""

    encoded: EncodedRecord[WeightManifest]
    headers: Mapping[str, bytes]

    def write(self, writer: Writer) -> None:
        """Write the manifest with this writer, within its transaction if there is one."""
        writer.write(MANIFESTS, self.encoded, key=manifest_key(self.encoded.record), partition=0, headers=self.headers)


def sign_manifest(manifest: WeightManifest, key: Ed25519PrivateKey | None) -> SignedManifest:
    """Encode a manifest and sign the bytes; without a key it has no signature. Raises RecordError."""
    signed = encoded(manifest)
    return SignedManifest(signed, {} if key is None else {SIGNATURE_HEADER: key.sign(signed.wire)})


def read_manifests(settings: BusSettings, *, on_wait: Callable[[], None] = noop) -> Iterator[Envelope]:
    """All messages of the manifests topic, trusted or not.

    `on_wait`: see `read_to_end`. Raises TopicMissing or BusError.
    """
    yield from read_to_end(settings, {MANIFEST_PARTITION: 0}, client_id="rose-weights", on_wait=on_wait)


MAX_VERSION = 2**52
"""Manifests with larger numbers are ignored. Half of the range of numbers, so that a run never reaches the end of the
range."""


class VersionTaken(RoseError):
    """The version number stands for another policy."""

    def __init__(self, version: int, free: int) -> None:
        super().__init__(
            f"version {version} cannot be published: up to {free - 1} all numbers are taken on the log. Publish "
            f"version {free} or leave the number out; a run that goes back begins a new epoch (`begin_epoch`)"
        )


@dataclass(slots=True)
class VersionNumbers:
    """The numbering of one run, kept by its publisher."""

    newest: WeightManifest | None = None
    """The newest manifest of the run, from the log or published since, without its tensors and slices."""
    highest: int = -1
    """Highest number of all runs of the model."""
    epoch: int = 0
    """Epoch of the next version."""

    def learn(self, manifests: Iterable[WeightManifest], run: str) -> None:
        """Add manifests from the log, of all runs of the model with the same key."""
        for manifest in manifests:
            if manifest.version >= MAX_VERSION or manifest.epoch >= MAX_VERSION:
                continue
            self.highest = max(self.highest, manifest.version)
            if manifest.run == run and (self.newest is None or manifest.order >= self.newest.order):
                self.newest = manifest
        if self.newest is not None:
            self.epoch = max(self.epoch, self.newest.epoch)

    @property
    def next_version(self) -> int:
        """The lowest free number."""
        return self.highest + 1

    def begin_epoch(self, *, epoch: int = -1, version: int = -1) -> int:
        """Begin an epoch whose versions are newer than all earlier ones. Returns the lowest free number.

        `epoch` and `version`: those of the policy that the run resumes from, which the log may have lost; -1 if
        unknown.
        """
        self.epoch = max(epoch, -1 if self.newest is None else self.newest.epoch) + 1
        self.highest = max(self.highest, version)
        return self.next_version

    def take(self, manifest: WeightManifest) -> None:
        """Use the manifest's number. Raises VersionTaken if the number is not free."""
        self.check(manifest.version, manifest.digest)
        self.highest = max(self.highest, manifest.version)
        self.newest = msgspec.structs.replace(manifest, tensors=(), slices=())  # they are large

    def check(self, version: int, digest: bytes) -> None:
        """Check that a version number may be used.

        Raises VersionTaken unless the number is free, or is that of the newest version and the policy is the same.
        """
        newest = self.newest
        again = newest is not None and (newest.order, newest.digest) == ((self.epoch, version), digest)
        if version <= self.highest and not again:
            raise VersionTaken(version, self.next_version)
