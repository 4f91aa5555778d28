"""Encodes the slices of a version against the version before.

Keeps true
- A payload is the same whether the changes of its slice were collected on a GPU or on the host. Of each version one
  changed slice of each element type is collected in both ways, before any of the version's chunks is written.
"""

from collections.abc import Generator, Sequence
from functools import partial

from rose.workers.weights import codec
from rose.workers.weights.layout import Box
from rose.workers.weights.slice_threads import map_slices
from rose.workers.weights.tensors import Snapshot

Place = tuple[str, Box]
"""A slice: the name of its tensor and its box."""


def encode_slices(now: Snapshot, base: Snapshot | None, places: Sequence[Place]) -> Generator[bytes | None, None, None]:
    """Yield the payload of each slice; None if the slice did not change. `base`: None for an anchor."""
    return map_slices(partial(_encode, now, base), places)


def wrongly_collected(now: Snapshot, base: Snapshot, version: int) -> str:
    """Return the name of a tensor whose collected changes are not those of its words; empty if none was found.

    All changes are checked for what cannot be encoded. `version` chooses the slices that are collected again, among the
    slices that changed.
    """
    places: dict[str, list[Place]] = {}
    for place, collected in now.changes.items():
        if not collected.changes.is_encodable(place[1].elements):
            return place[0]
        if collected.base_digest == base.digests[place] != now.digests[place]:
            places.setdefault(now.specs[place[0]].dtype, []).append(place)
    for dtype, of_type in places.items():
        place = of_type[version % len(of_type)]
        changes = codec.collect(base.within(*place), now.within(*place), codec.FORMATS[dtype])
        if not changes.equals(now.changes[place].changes):
            return place[0]
    return ""


def _encode(now: Snapshot, base: Snapshot | None, place: Place) -> bytes | None:
    if base is None:
        return codec.dense(now.within(*place))
    if base.digests[place] == now.digests[place]:
        return None
    collected = now.changes.get(place)
    if collected is not None and collected.base_digest == base.digests[place]:
        return codec.encode_changes(collected.changes, now.within(*place))
    return codec.encode(base.within(*place), now.within(*place), now.specs[place[0]].dtype)
