"""Placement of chunks on the log: over all partitions, as far as a manifest can name their start."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from rose.schemas.weights import MAX_CHUNK_PARTITIONS, ChunkRef
from rose.topics.writer import Writer
from rose.workers.weights.chunk_stores import LogChunkSink, lowest_offsets, put_payload
from rose.workers.weights.layout import NO_BASE


@pytest.mark.parametrize(("there", "used"), [(3, 3), (MAX_CHUNK_PARTITIONS + 5, MAX_CHUNK_PARTITIONS)])
def test_chunks_rotate_over_the_partitions_that_a_manifest_can_name(
    there: int, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.workers.weights.chunk_stores.CHUNK_BYTES", 1)
    places: list[int] = []

    def write(*_: Any, partition: int, **__: Any) -> None:
        places.append(partition)

    sink = LogChunkSink(cast(Writer, SimpleNamespace(write=write, flush=lambda: None)), there)
    put_payload(sink, bytes(MAX_CHUNK_PARTITIONS + 9), model_id="m", version=1, tensor="t")
    assert places == [number % used for number in range(MAX_CHUNK_PARTITIONS + 9)]


def test_lowest_offset_is_kept_per_partition() -> None:
    places = [(0, 7), (1, 3), (0, 5), (1, 9)]
    chunks = [ChunkRef(partition=at, offset=offset, bytes=1, digest=NO_BASE) for at, offset in places]
    assert lowest_offsets(chunks) == {0: 5, 1: 3}
