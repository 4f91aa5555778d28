"""A Triton kernel that scatters a delta into the words of bfloat16 weights.

Words are int16 views of the weights' bits; positions are int64, as a policy has more words than int32 counts.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _scatter(words, positions, values, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    position = tl.load(positions + at, mask=inside, other=0)
    value = tl.load(values + at, mask=inside, other=0)
    tl.store(words + position, value, mask=inside)


def scatter(words: Tensor, positions: Tensor, values: Tensor) -> None:
    """Write `values` (int16 [n]) at `positions` (int64 [n], without repeats) of flat `words`."""
    _scatter[(triton.cdiv(len(positions), 1024),)](words, positions, values, len(positions), BLOCK=1024)
