"""The store of large anchors: stored bytes are read at their offset, and no other file is opened or deleted."""

from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import NoReturn

import fsspec
import msgspec
import numpy as np
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given
from hypothesis import strategies as st

from rose.schemas.errors import RecordError, UsageError
from rose.schemas.weights import ChunkRef, WeightChunk, WeightManifest
from rose.schemas.wire import decode, encode
from rose.workers.weights.checks import check_manifest
from rose.workers.weights.chunk_stores import AnchorStore, StoreError
from rose.workers.weights.layout import LayoutError
from rose.workers.weights.publish import merge_manifests
from tests.support.weights_fixtures import RUN, MemoryChunkSink, Tensors, random_tensors

OPEN = Event()


def some_tensors() -> Tensors:
    return random_tensors({"a": (8, 3), "b": (5,), "c": (2, 2)}, torch.float32, np.random.default_rng(0))


def put(
    store: AnchorStore, payloads: Sequence[bytes], *, version: int = 1, model: str = "m", run: str = RUN
) -> tuple[str, list[ChunkRef]]:
    """Store a file with these chunks; return its name and references."""
    sink = store.create(model, run, version)
    stored = [
        sink.put(WeightChunk(model_id=model, version=version, tensor="t", part=part, payload=payload))
        for part, payload in enumerate(payloads)
    ]
    sink.close()
    return sink.files[0], [each.ref() for each in stored]


@pytest.fixture
def store(tmp_path: Path) -> AnchorStore:
    return AnchorStore(str(tmp_path / "anchors"))


@given(st.lists(st.lists(st.binary(min_size=1, max_size=64), min_size=1, max_size=5), min_size=1, max_size=3))
def test_stored_bytes_are_read_at_their_offset(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[bytes]]
) -> None:
    store = AnchorStore(tmp_path_factory.mktemp("store").as_uri())
    written = [put(store, payloads) for payloads in files]
    refs = [
        msgspec.structs.replace(ref, partition=number) for number, (_, of_file) in enumerate(written) for ref in of_file
    ]
    read = dict(store.fetch([name for name, _ in written], refs, OPEN))
    assert [read[ref] for ref in refs] == [payload for payloads in files for payload in payloads]


def test_missing_file_yields_nothing(store: AnchorStore) -> None:
    name, refs = put(store, [b"abc"])
    there = msgspec.structs.replace(refs[0], partition=1)
    nowhere = msgspec.structs.replace(refs[0], partition=7)
    assert list(store.fetch(["anchor-m.9.gone", name], [*refs, there, nowhere], OPEN)) == [(there, b"abc")]


def test_truncated_file_yields_the_remainder(store: AnchorStore, tmp_path: Path) -> None:
    name, refs = put(store, [b"abc", b"def"])
    (tmp_path / "anchors" / name).write_bytes(b"abcd")
    assert [payload for _, payload in store.fetch([name], refs, OPEN)] == [b"abc", b"d"]


def test_fetch_ends_when_stopped(store: AnchorStore) -> None:
    name, refs = put(store, [b"abc"])
    stop = Event()
    stop.set()
    assert list(store.fetch([name], refs, stop)) == []


def test_only_named_files_are_deleted(store: AnchorStore, tmp_path: Path) -> None:
    """Files of a run with the same name on another broker stay too."""
    old, other, twin = (put(store, [b"x"], run=run)[0] for run in (RUN, "other.:run", RUN))
    assert len({name.split(".")[1] for name in (old, other, twin)}) == 2, "a file's name tells runs apart"
    store.delete([old, "anchor-m.0.gone"])
    assert {file.name for file in (tmp_path / "anchors").iterdir()} == {other, twin}


def test_file_name_of_the_longest_ids_is_valid_in_a_manifest(store: AnchorStore) -> None:
    name, _ = put(store, [b"x"], model="m" * 128, run="r" * 128, version=2**53)
    manifest = msgspec.structs.replace(MemoryChunkSink().store(some_tensors(), 1), files=(name,))
    assert decode(WeightManifest, encode(manifest)) == manifest


class Broken(LocalFileSystem):  # type: ignore[misc]
    """A driver that raises an exception other than OSError, like cloud drivers."""

    class Denied(Exception):
        pass

    def open(self, *_: object, **__: object) -> NoReturn:
        raise self.Denied("access denied")

    def rm_file(self, path: str) -> NoReturn:
        raise self.Denied("access denied")


def test_any_driver_exception_is_a_store_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the store takes the address for its own path
    fsspec.register_implementation("broken", Broken, clobber=True)
    store = AnchorStore(f"broken://{tmp_path}")
    ref = ChunkRef(partition=0, offset=0, bytes=1, digest=bytes(16))
    for action in (
        lambda: store.create("m", RUN, 1),
        lambda: store.delete(["anchor-m"]),
        lambda: list(store.fetch(["anchor-m"], [ref], OPEN)),
    ):
        with pytest.raises(StoreError, match="access denied"):
            action()


def test_unreadable_or_unwritable_store_is_reported_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be opened"):
        AnchorStore("nosuch://bucket/folder")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="cannot be written"):
        AnchorStore(str(tmp_path / "file")).create("m", RUN, 1)


@pytest.mark.parametrize("name", ["../anchor-m", "anchor-/etc/passwd", "/anchor-m", "notes", "anchor-m\n", "anchor-"])
def test_manifest_cannot_name_a_path_outside_the_store(name: str) -> None:
    manifest = MemoryChunkSink().store(some_tensors(), 1)
    forged = msgspec.msgpack.encode(msgspec.structs.replace(manifest, files=(name,)))
    with pytest.raises(RecordError, match="files"):
        decode(WeightManifest, forged)


def test_files_of_ranks_are_renumbered_when_parts_are_merged() -> None:
    parts = halves()
    merged = merge_manifests(parts)
    assert merged.files == ("anchor-m.1.a", "anchor-m.1.b")
    check_manifest(merged, {spec.name: spec.shape for spec in merged.tensors})
    owner = {piece.digest: number for number, part in enumerate(parts) for piece in part.slices}
    assert all(chunk.partition == owner[piece.digest] for piece in merged.slices for chunk in piece.chunks)


def test_parts_of_different_versions_or_locations_are_not_merged() -> None:
    one, other = halves()
    for wrong in (  # of another version, on another base, on the log
        msgspec.structs.replace(other, version=2),
        msgspec.structs.replace(other, base_version=0),
        msgspec.structs.replace(other, files=()),
    ):
        with pytest.raises(LayoutError):
            merge_manifests([one, wrong])


def halves() -> list[WeightManifest]:
    """Return the parts that two ranks have stored, each in its own file."""
    whole = MemoryChunkSink().store(some_tensors(), 1)
    return [
        msgspec.structs.replace(
            whole,
            files=(file,),
            slices=tuple(
                msgspec.structs.replace(
                    piece,
                    chunks=tuple(
                        msgspec.structs.replace(chunk, partition=0, offset=number * 1000 + place)
                        for place, chunk in enumerate(piece.chunks)
                    ),
                )
                for number, piece in enumerate(whole.slices)
                if number % 2 == rank
            ),
        )
        for rank, file in enumerate(("anchor-m.1.a", "anchor-m.1.b"))
    ]
