"""Versions in shared memory: what is laid is what lies there, whatever lay there before."""

import os

import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.executor.slabs import ALIGNMENT, Lying, lay

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)
VERSIONS = st.dictionaries(st.text(min_size=1, max_size=4), st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1)


@given(st.lists(VERSIONS, min_size=1, max_size=4))
def test_what_is_laid_is_what_lies_there(versions: list[dict[str, tuple[tuple[int, ...], torch.dtype]]]) -> None:
    slab = os.memfd_create("test")
    for version in versions:
        tensors = {name: torch.randn(shape).to(dtype) for name, (shape, dtype) in version.items()}
        layout = lay(slab, tensors)
        assert all(laid.begin % ALIGNMENT == 0 for laid in layout)
        there = dict(Lying(slab, layout))
        assert there.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert there[name].dtype == tensor.dtype and torch.equal(there[name], tensor)
    os.close(slab)


def test_another_version_on_a_slab_is_seen_by_whoever_still_looks_at_it() -> None:
    """Hence two slabs: nothing is copied on the way."""
    slab = os.memfd_create("test")
    ((_, first),) = Lying(slab, lay(slab, {"w": torch.zeros(3)}))
    lay(slab, {"w": torch.ones(3)})
    assert torch.equal(first, torch.ones(3))
    os.close(slab)
