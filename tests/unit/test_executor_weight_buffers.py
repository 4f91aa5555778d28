"""Versions in shared memory: read tensors equal the written tensors, after any earlier content."""

import os

import torch
from hypothesis import given
from hypothesis import strategies as st

from rose.workers.executor.ipc.engine_client import ALIGNMENT, StagedTensors, write_tensors

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)
VERSIONS = st.dictionaries(st.text(min_size=1, max_size=4), st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1)


@given(st.lists(VERSIONS, min_size=1, max_size=4))
def test_staged_tensors_equal_the_written_tensors(
    versions: list[dict[str, tuple[tuple[int, ...], torch.dtype]]],
) -> None:
    buffer = os.memfd_create("test")
    for version in versions:
        tensors = {name: torch.randn(shape).to(dtype) for name, (shape, dtype) in version.items()}
        layout = write_tensors(buffer, tensors)
        assert all(laid.offset % ALIGNMENT == 0 for laid in layout)
        there = dict(StagedTensors(buffer, layout))
        assert there.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert there[name].dtype == tensor.dtype and torch.equal(there[name], tensor)
    os.close(buffer)


def test_overwritten_weight_buffer_changes_the_tensors_of_its_reader() -> None:
    """The engine therefore has two buffers: nothing is copied on the way."""
    buffer = os.memfd_create("test")
    ((_, first),) = StagedTensors(buffer, write_tensors(buffer, {"w": torch.zeros(3)}))
    write_tensors(buffer, {"w": torch.ones(3)})
    assert torch.equal(first, torch.ones(3))
    os.close(buffer)
