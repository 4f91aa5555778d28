"""The changes that Triton's kernels collect, in Triton's interpreter: equal to the codec's own, for any bits.

`make test-triton` installs Triton into a folder of its own and runs these tests.
"""

import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.workers.weights import codec
from rose.workers.weights.codec import FORMATS
from tests.unit.test_weights_codec import PAIRS, Words, pair_of, special_words

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("`make test-triton` runs these tests", allow_module_level=True)

from rose.workers.weights.codec import triton_kernels


def flat(words: list[Words]) -> torch.Tensor:
    joined = np.concatenate(words)
    return torch.from_numpy(joined.view(np.dtype(f"int{8 * joined.itemsize}")))


@settings(max_examples=100, deadline=None)
@given(st.lists(PAIRS, min_size=1, max_size=3), st.sampled_from(sorted(FORMATS)))
def test_changes_of_any_slices_equal_those_of_the_codec(drawn: list[dict[str, Any]], dtype: str) -> None:
    """Slices of other sizes and statistics lie side by side, as those of a tensor."""
    pairs = [pair_of(each | {"dtype": dtype, "size": each["size"] + 1}) for each in drawn]
    olds, news = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    found = triton_kernels.collect(flat(olds), flat(news), [len(old) for old in olds], FORMATS[dtype])
    assert len(found) == len(pairs)
    for changes, old, new in zip(found, olds, news, strict=True):
        assert changes.equals(codec.collect(old, new, FORMATS[dtype]))
        assert codec.encode_delta(changes) == codec.encode_delta(codec.collect(old, new, FORMATS[dtype]))


@pytest.mark.parametrize("dtype", sorted(FORMATS))
def test_every_float_class_changes_to_every_other_as_in_the_codec(dtype: str) -> None:
    words = np.array(special_words(dtype), dtype=FORMATS[dtype].word)
    old, new = np.repeat(words, len(words)), np.tile(words, len(words))
    (found,) = triton_kernels.collect(flat([old]), flat([new]), [len(old)], FORMATS[dtype])
    assert codec.encode_changes(found, new) == codec.encode(old, new, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_word_of_16_bits_changes_as_in_the_codec(dtype: str) -> None:
    """To the next word, and to the complement."""
    old = np.arange(1 << 16, dtype=np.uint16)
    for new in (old + np.uint16(1), ~old):
        (found,) = triton_kernels.collect(flat([old]), flat([new]), [len(old)], FORMATS[dtype])
        assert found.equals(codec.collect(old, new, FORMATS[dtype]))
