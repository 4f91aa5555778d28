"""Versions whose changes a GPU collects: the payloads of the CPU, whatever was collected, failed or came out wrong.

The tensors lie on the CPU. `make test-triton` runs these tests with the kernels in Triton's interpreter; otherwise a
fake stands in for the kernels.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from rose.workers.weights import codec, layout
from rose.workers.weights.encoding import encode_slices, wrongly_collected
from rose.workers.weights.gpu_changes import ChangeCollector
from rose.workers.weights.layout import digest_of, slices_of, whole
from rose.workers.weights.tensors import TORCH_DTYPES, Snapshot, snapshot_of
from tests.support.fake_triton_kernels import KERNELS, failing_collect, fake_collect, forgetful_collect, use_kernels
from tests.support.weights_fixtures import Tensors, changed, part, random_tensors, shards_of

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EXAMPLES = settings(max_examples=15 if INTERPRETED else 100, deadline=None)  # the interpreter is slow
SHAPES = st.dictionaries(
    st.sampled_from("abc"), st.lists(st.integers(0, 12), max_size=3).map(tuple), min_size=1, max_size=3
)
DTYPE = st.sampled_from(sorted(TORCH_DTYPES))
SEED = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True, scope="module")
def _kernels_and_small_slices() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "SLICE_ELEMENTS", 16)
        if not INTERPRETED:
            use_kernels(patch, fake_collect)
        yield


def snapshot(tensors: Tensors, collector: ChangeCollector | None, *, column_parts: int = 1) -> Snapshot:
    return snapshot_of(tensors.items(), dtype=None, column_parts=column_parts, collector=collector)


def payloads(now: Snapshot, base: Snapshot) -> list[bytes | None]:
    return list(encode_slices(now, base, list(now.digests)))


@EXAMPLES
@given(SHAPES, DTYPE, SEED, st.integers(1, 3), st.data())
def test_payloads_are_those_of_the_cpu_whichever_snapshots_are_published(
    shapes: dict[str, tuple[int, ...]], dtype: str, seed: int, parts: int, data: st.DataObject
) -> None:
    random = np.random.default_rng(seed)
    collector = ChangeCollector(device_type="cpu")
    tensors = random_tensors(shapes, TORCH_DTYPES[dtype], random)
    base = snapshot(tensors, collector, column_parts=parts)
    before_was_published = True
    for _ in range(data.draw(st.integers(1, 5))):
        tensors = changed(tensors, data.draw(st.sampled_from([0.0, 0.05, 1.0])), random)
        now, plain = (snapshot(tensors, each, column_parts=parts) for each in (collector, None))
        assert (now.digests, plain.changes) == (plain.digests, {})
        assert now.changes.keys() == now.digests.keys()
        if before_was_published:
            assert all(found.base_digest == base.digests[place] for place, found in now.changes.items())
        assert payloads(now, base) == payloads(plain, base)
        assert wrongly_collected(now, base, data.draw(st.integers(0, 100))) == ""
        before_was_published = data.draw(st.booleans())
        base = now if before_was_published else base
    assert not collector.stopped


@EXAMPLES
@given(DTYPE, SEED, st.integers(1, 5))
def test_each_rank_collects_the_changes_of_its_own_rows(dtype: str, seed: int, ranks: int) -> None:
    random = np.random.default_rng(seed)
    old = random_tensors({"w": (11, 7)}, TORCH_DTYPES[dtype], random)
    new = changed(old, 0.5, random)
    for own in filter(lambda box: box.elements, shards_of(whole((11, 7)), ranks)):
        collector = ChangeCollector(device_type="cpu")
        for tensor in (old["w"], new["w"]):
            digests = {box: digest_of(part(tensor, box).data) for box in slices_of(own)}
            rows = tensor[own.row_start : own.row_start + own.rows]
            found = collector.collect("w", rows, own, digests, dtype)
        for box, collected in found.items():
            words = part(old["w"], box), part(new["w"], box)
            assert collected.base_digest == digest_of(words[0].data)
            assert codec.encode_changes(collected.changes, words[1]) == codec.encode(*words, dtype)
        assert list(found) == list(slices_of(own))


def test_tensor_that_is_not_contiguous_is_collected_in_the_order_of_its_rows() -> None:
    random = np.random.default_rng(1)
    old = random_tensors({"w": (8, 6)}, torch.bfloat16, random)
    new = changed(old, 0.5, random)
    collector = ChangeCollector(device_type="cpu")
    base, now = (
        snapshot({"w": each["w"].t().contiguous().t(), "row": each["w"][:, 3]}, collector) for each in (old, new)
    )
    assert now.changes
    assert wrongly_collected(now, base, 0) == ""
    assert payloads(now, base) == payloads(snapshot({"w": new["w"], "row": new["w"][:, 3]}, None), base)


def test_tensor_with_another_shape_or_element_type_begins_anew() -> None:
    random, collector = np.random.default_rng(2), ChangeCollector(device_type="cpu")
    for shape, dtype in (((8, 6), torch.bfloat16), ((8, 7), torch.bfloat16), ((8, 7), torch.float32)):
        old = random_tensors({"w": shape}, dtype, random)
        assert snapshot(old, collector).changes == {}
        assert snapshot(changed(old, 0.5, random), collector).changes
    assert not collector.stopped


def two_snapshots(collector: ChangeCollector) -> tuple[Snapshot, Snapshot]:
    random = np.random.default_rng(3)
    old = random_tensors({"a": (8, 8), "b": (5,)}, torch.bfloat16, random)
    return snapshot(old, collector), snapshot(changed(old, 1.0, random), collector)


def test_wrong_changes_are_found_in_any_version(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch, forgetful_collect)
    base, now = two_snapshots(ChangeCollector(device_type="cpu"))
    assert {wrongly_collected(now, base, version) for version in range(5)} == {"a", "b"}


@pytest.mark.parametrize("field", ["positions", "exponents", "heavy_exponents", "steps"])
def test_changes_that_cannot_be_encoded_are_found_in_every_slice_of_a_version(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoding them would write outside of an array."""
    monkeypatch.setattr(layout, "SLICE_ELEMENTS", 8_192)
    random, collector = np.random.default_rng(4), ChangeCollector(device_type="cpu")
    old = random_tensors({"a": (256, 64), "b": (8, 8)}, torch.bfloat16, random)
    base, now = snapshot(old, collector), snapshot(changed(old, 0.01, random), collector)
    places = [place for place in now.changes if len(getattr(now.changes[place].changes, field)) > 1]
    assert places
    for place in places:
        right = now.changes[place]
        values = getattr(right.changes, field)
        unknown = np.flatnonzero(right.changes.codes == 0).astype(values.dtype)
        wrong = values[::-1].copy() if field == "positions" else np.resize(unknown, len(values))
        if field == "steps":
            wrong = np.zeros_like(values)
        now.changes[place] = replace(right, changes=replace(right.changes, **{field: wrong}))
        assert {wrongly_collected(now, base, version) for version in range(5)} == {place[0]}
        now.changes[place] = right
    assert wrongly_collected(now, base, 0) == ""


def test_position_beyond_the_slice_is_found() -> None:
    old = np.zeros(64, dtype=np.uint16)
    right = codec.collect(old, old, codec.FORMATS["bfloat16"])
    codes = right.codes.copy()
    codes[0] = 1
    far = replace(
        right,
        codes=codes,
        positions=np.array([2**41], dtype=np.uint64),
        exponents=np.zeros(1, dtype=np.uint8),
        steps=np.ones(1, dtype=np.int64),
    )
    assert right.is_encodable(len(old)) and not far.is_encodable(len(old))


def test_failing_kernel_stops_the_collection_and_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch, failing_collect)
    collector = ChangeCollector(device_type="cpu")
    with capture_logs() as logs:
        base, now = two_snapshots(collector)
        snapshot({}, collector)
    assert collector.stopped and now.changes == {}
    assert [(entry["event"], entry["reason"]) for entry in logs] == [
        ("gpu_encoding_stopped", "RuntimeError: no C compiler")
    ]
    assert [payload for payload in payloads(now, base) if payload is not None]


def test_tensors_in_host_memory_are_not_collected_and_triton_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, KERNELS, None)  # an import would raise
    monkeypatch.delattr(codec, "triton_kernels", raising=False)
    collector = ChangeCollector()
    _, now = two_snapshots(collector)
    assert now.changes == {} and not collector.stopped
