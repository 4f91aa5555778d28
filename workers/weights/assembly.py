"""Assembles a version in host memory from an anchor's slices, or from an older version and its changed slices.

Keeps true
- A version is applied completely or not at all: decoded slices are kept aside until every slice has been verified.
- A slice is decoded against the bytes that the publisher used, or refused: the digests of base and result are checked.
- Every value of a version is finite.
- Memory is allocated only for the model's own tensors and for payloads whose sizes the manifest bounds.
- Slices are decoded on a few threads (`slice_threads.py`), with the results and the errors of one thread.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from rose.schemas.weights import ChunkRef, SliceRef, WeightChunk, WeightManifest
from rose.workers.weights import codec
from rose.workers.weights.checks import Refusal, VersionRefused, check_chunk
from rose.workers.weights.codec import CodecError
from rose.workers.weights.layout import Box, box_of, digest_of
from rose.workers.weights.slice_threads import map_slices
from rose.workers.weights.tensors import Matrix, bits_of, empty_tensor, finite, read_box, write_box

Fetch = Callable[[list[ChunkRef]], Iterable[tuple[ChunkRef, WeightChunk | bytes]]]
"""Yields each chunk with its reference, in any order. May raise VersionRefused."""


class ReceiverStopped(Exception):
    """The receiver is stopping; the fetched chunks are discarded."""


@dataclass(slots=True)
class Assembled:
    """One version, or the part of it that the receiver needs."""

    tensors: dict[str, Tensor]
    """Tensors of full shape. With a shard, only the elements of the needed slices are set."""
    digests: dict[tuple[str, Box], bytes] = field(default_factory=dict)
    """Digests of the slices, as the version's manifest cuts them."""
    version: int = -1

    def copy(self) -> "Assembled":
        """A copy that may be changed. Engines keep the tensors of the version that they serve."""
        return Assembled({name: tensor.clone() for name, tensor in self.tensors.items()}, self.digests, self.version)

    def words(self, name: str) -> Matrix:
        """The bits of a tensor, as a view of shape [rows, columns]."""
        return bits_of(self.tensors[name])


class Assembly:
    """Applies versions one after another to a copy of `start`.

    `start`: the version to build on; None begins with an anchor. `shard`: the part of each tensor that is needed; None
    means all. `threads`: see `map_slices`.
    """

    def __init__(self, start: Assembled | None, shard: Mapping[str, Box] | None, *, threads: int | None = None) -> None:
        self.done = start.copy() if start is not None else Assembled({})
        self._shard = shard
        self._threads = threads

    def add(self, manifest: WeightManifest, fetch: Fetch) -> None:
        """Fetch, decode and apply the version of a checked manifest.

        Raises VersionRefused and what `fetch` raises; `done` is unchanged then.
        """
        if manifest.base_version not in (None, self.done.version):
            raise VersionRefused(Refusal.WRONG_BASE, f"it builds on version {manifest.base_version}")
        base = self.done if manifest.base_version is not None else self._begin(manifest)
        names = [spec.name for spec in manifest.tensors]
        pieces = [(names[piece.tensor], piece) for piece in manifest.slices if self._parts_of_shard(piece, names)]
        changed = [(name, piece) for name, piece in pieces if piece.chunks]
        for name, piece in pieces:
            if manifest.base_version is not None:
                _check_base(base, name, piece)
        with (
            closing(_gather(changed, fetch, manifest)) as gathered,
            closing(map_slices(partial(_decode, base, manifest), gathered, threads=self._threads)) as results,
        ):
            decoded = dict(results)
        if len(decoded) < len(changed):
            raise VersionRefused(Refusal.MISSING_CHUNK, f"{len(changed) - len(decoded)} slices did not come whole")
        words = {name: base.words(name) for name in base.tensors}
        for (name, box), flat in decoded.items():
            write_box(words[name], box, flat)
        base.digests = {(name, box_of(piece)): piece.digest for name, piece in pieces}
        base.version = manifest.version
        self.done = base

    def _begin(self, manifest: WeightManifest) -> Assembled:
        specs = {spec.name: spec for spec in manifest.tensors if self._shard is None or spec.name in self._shard}
        return Assembled({name: empty_tensor(spec) for name, spec in specs.items()})

    def _parts_of_shard(self, piece: SliceRef, names: Sequence[str]) -> bool:
        if self._shard is None:
            return True
        box = self._shard.get(names[piece.tensor])
        return box is not None and box.intersects(box_of(piece))


def _check_base(base: Assembled, name: str, piece: SliceRef) -> None:
    box = box_of(piece)
    have = base.digests.get((name, box))
    if have is None:  # the slices were cut in another way before
        have = digest_of(read_box(base.words(name), box).data)
    if have != piece.base_digest:
        raise VersionRefused(Refusal.WRONG_BASE, f"{name} is not what version {base.version} was built on")


def _decode(
    base: Assembled, manifest: WeightManifest, gathered: tuple[str, SliceRef, bytes]
) -> tuple[tuple[str, Box], Matrix]:
    name, piece, payload = gathered
    old = read_box(base.words(name), box_of(piece))
    try:
        new = codec.decode(old, payload, manifest.tensors[piece.tensor].dtype)
    except CodecError as error:
        raise VersionRefused(Refusal.WRONG_RESULT, f"a slice of {name} does not decode: {error}") from None
    if digest_of(new.data) != piece.digest:
        raise VersionRefused(Refusal.WRONG_RESULT, f"a slice of {name} is not what was published")
    if not finite(new, manifest.tensors[piece.tensor].dtype):
        raise VersionRefused(Refusal.NOT_FINITE, f"{name} holds a value that is not finite")
    return (name, box_of(piece)), new


def _gather(
    pieces: list[tuple[str, SliceRef]], fetch: Fetch, manifest: WeightManifest
) -> Generator[tuple[str, SliceRef, bytes], None, None]:
    """Yields each slice with its payload, as soon as all its chunks have been fetched."""
    owner = {
        (chunk.partition, chunk.offset): (number, part)
        for number, (_, piece) in enumerate(pieces)
        for part, chunk in enumerate(piece.chunks)
    }
    parts: dict[int, dict[int, bytes]] = {}
    for ref, found in fetch([chunk for _, piece in pieces for chunk in piece.chunks]):
        number, part = owner[ref.partition, ref.offset]
        name, piece = pieces[number]
        have = parts.setdefault(number, {})
        have[part] = check_chunk(found, ref, manifest, tensor=name, part=part)
        if len(have) == len(piece.chunks):
            del parts[number]
            yield name, piece, b"".join(have[index] for index in range(len(have)))
