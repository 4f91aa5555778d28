"""The published copy of a policy: values that no engine could serve are refused before publication."""

import pytest
import torch

from rose.workers.weights.tensors import NotFinite, Snapshot, snapshot_of


def copied(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Snapshot:
    return snapshot_of([("sound", torch.ones(4)), ("w", tensor)], dtype=dtype, column_parts=2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_non_finite_value_is_not_published(own: torch.dtype, dtype: torch.dtype | None, value: float) -> None:
    tensor = torch.zeros(3, 5, dtype=own)
    tensor[2, 4] = value
    with pytest.raises(NotFinite, match="w holds a value that is not finite"):
        copied(tensor, dtype)


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.float16, 65_520.0), (torch.float16, -1e5), (torch.bfloat16, 3.4e38)]
)
def test_value_too_large_for_the_published_type_is_refused_with_the_setting(dtype: torch.dtype, value: float) -> None:
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(NotFinite, match=rf"w holds .*, which {name} does not: set weights\.dtype and executor\.dtype"):
        copied(torch.tensor([[1.0, value]]), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_extreme_values_of_each_type_are_published(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    ends = torch.tensor([limits.max, limits.min, limits.tiny, -0.0, limits.smallest_normal / 2], dtype=dtype)
    assert copied(ends).words["w"].size == 5
    assert copied(ends.float(), dtype).words["w"].size == 5
    assert copied(torch.empty(0, 4, dtype=dtype)).words["w"].size == 0
