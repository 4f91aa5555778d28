"""Released chunk payloads are readable forever: an index and slices of weights. Their encoding may change."""

from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest

from rose.schemas.weights import WeightChunk, WeightIndex
from rose.workers.weights.codec import DELTA, DENSE, decode
from rose.workers.weights.codec.hazard import HEAVY_CODE, STILL_CODE
from rose.workers.weights.manifests import read_index
from tests.golden.payloads import INDEX, Piece, payload_of, pieces
from tests.golden.release import RELEASES
from tests.support.weights_fixtures import MemoryChunkSink, bare

PIECES = list(pieces())


SHIPPED = sorted(RELEASES.glob("*/payloads/*"))


def test_every_golden_payload_is_read() -> None:
    assert {path.name for path in SHIPPED} <= {"index", *(piece.name for piece in PIECES)}


@pytest.mark.parametrize(
    "path", [path for path in SHIPPED if path.name != "index"], ids=lambda path: f"{path.parts[-3]}-{path.name}"
)
def test_slice_of_a_release_decodes_to_the_original_tensor(path: Path) -> None:
    (piece,) = [piece for piece in PIECES if piece.name == path.name]
    decoded = decode(piece.old, path.read_bytes(), piece.dtype)
    assert decoded.dtype == piece.new.dtype and np.array_equal(decoded, piece.new)


@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: piece.name)
def test_anchor_is_dense_and_a_delta_has_exponents_of_every_kind(piece: Piece) -> None:
    kind, *rest = payload_of(piece)
    if piece.name.endswith("anchor"):
        assert kind == DENSE
        return
    codes = rest[6 : 7 + rest[5]]
    assert kind == DELTA
    assert {STILL_CODE, HEAVY_CODE} < set(codes), "and light ones"


@pytest.mark.parametrize("path", [path for path in SHIPPED if path.name == "index"], ids=lambda path: path.parts[-3])
def test_index_of_a_release_decodes_to_the_original_index(path: Path) -> None:
    topic, wire = MemoryChunkSink(), path.read_bytes()
    refs = tuple(
        topic.put(WeightChunk(model_id="m", version=1, tensor=":index", part=part, payload=payload)).ref()
        for part, payload in enumerate((wire[:100], wire[100:]))
    )
    found = read_index(bare(1, index=refs), topic.fetch)
    assert WeightIndex(tensors=found.tensors, slices=found.slices) == INDEX


def test_unknown_index_fields_are_ignored() -> None:
    """Named structs grow by fields and positional structs at their end. Any MessagePack implementation reads
    the index."""
    values: dict[str, Any] = msgpack.unpackb(msgspec.msgpack.encode(INDEX))
    values["from_the_future"] = [1, {"deep": b"bytes"}]
    values["tensors"][0]["from_the_future"] = 1
    values["slices"][0].append("from the future")
    values["slices"][0][7][0].append(b"from the future")
    assert msgspec.msgpack.decode(msgpack.packb(values), type=WeightIndex) == INDEX
