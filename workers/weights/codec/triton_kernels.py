"""Collects the changes of slices on a GPU, in Triton: the parallel part of encoding.

Keeps true
- The changes equal those of `codec.collect`, for every bit pattern: all arithmetic is on integers, and the hazard codes
  are computed by the same function on the host.
- Only counts and changes leave the GPU.

Importing this module needs Triton. With TRITON_INTERPRET=1, set before the import, the kernels run on CPU tensors.

The slices of a tensor lie one after another in a flat tensor of words: int16 or int32 views of the weights' bits. A
program of a kernel has one block of one slice. Words are widened to int64, where they are not negative; hazards and
counts are int64 too.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from rose.workers.weights.codec import SAMPLING, Changes, Format, codes_for
from rose.workers.weights.codec.hazard import EXPONENTS, HEAVY, table_of

BLOCK = 4096
"""Elements of a program."""

WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def _place(starts, blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Slice of this program, positions of its elements within the slice and within all words, and the slice's size."""
    program = tl.program_id(0)
    piece = program // blocks
    start = tl.load(starts + piece)
    size = tl.load(starts + piece + 1) - start
    within = (program % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return piece, within, start + within, size


@triton.jit  # type: ignore[untyped-decorator]
def _word(words, at, inside, TOP: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(words + at, mask=inside, other=0).to(tl.int64) & (2 * TOP - 1)


@triton.jit  # type: ignore[untyped-decorator]
def _ordered(word, TOP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The ordered integer of an element's bits, as `kernels.ordered`."""
    return tl.where((word & TOP) != 0, (TOP - 1) - (word & (TOP - 1)), word | TOP)


@triton.jit  # type: ignore[untyped-decorator]
def _add_histogram(counts, exponent, EXPONENTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add the numbers of the exponents below EXPONENTS."""
    found = tl.histogram(exponent.to(tl.int32), 2 * EXPONENTS)
    bins = tl.arange(0, 2 * EXPONENTS)
    tl.atomic_add(counts + bins, found.to(tl.int64), mask=(bins < EXPONENTS) & (found > 0))


@triton.jit  # type: ignore[untyped-decorator]
def _count(  # type: ignore[no-untyped-def]
    old, new, starts, blocks, changed, sampled,
    SHIFT: tl.constexpr, MASK: tl.constexpr, TOP: tl.constexpr,
    SAMPLING: tl.constexpr, EXPONENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    piece, within, at, size = _place(starts, blocks, BLOCK)
    inside = within < size
    before, after = _word(old, at, inside, TOP), _word(new, at, inside, TOP)
    exponent = (before >> SHIFT) & MASK
    _add_histogram(changed + piece * EXPONENTS, tl.where(before != after, exponent, EXPONENTS), EXPONENTS)
    is_sample = inside & (within % SAMPLING == 0)
    _add_histogram(sampled + piece * EXPONENTS, tl.where(is_sample, exponent, EXPONENTS), EXPONENTS)


@triton.jit  # type: ignore[untyped-decorator]
def _sort_block(  # type: ignore[no-untyped-def]
    old, new, starts, blocks, tables,
    SHIFT: tl.constexpr, MASK: tl.constexpr, TOP: tl.constexpr,
    HEAVY: tl.constexpr, EXPONENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Old and new words, exponents and hazards of this program's elements, and which are events, heavy or passed."""
    piece, within, at, size = _place(starts, blocks, BLOCK)
    inside = within < size
    before, after = _word(old, at, inside, TOP), _word(new, at, inside, TOP)
    exponent = (before >> SHIFT) & MASK
    hazard = tl.load(tables + piece * EXPONENTS + exponent, mask=inside, other=0)
    is_heavy = hazard >= HEAVY
    is_event = (hazard < HEAVY) & (before != after)
    passed = tl.where(is_event | is_heavy, 0, hazard)
    return before, after, exponent, is_event, is_heavy, passed


@triton.jit  # type: ignore[untyped-decorator]
def _sum(  # type: ignore[no-untyped-def]
    old, new, starts, blocks, tables, events, heavies, hazards,
    SHIFT: tl.constexpr, MASK: tl.constexpr, TOP: tl.constexpr,
    HEAVY: tl.constexpr, EXPONENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    _, _, _, is_event, is_heavy, passed = _sort_block(
        old, new, starts, blocks, tables, SHIFT, MASK, TOP, HEAVY, EXPONENTS, BLOCK
    )
    program = tl.program_id(0)
    tl.store(events + program, tl.sum(is_event.to(tl.int64), 0))
    tl.store(heavies + program, tl.sum(is_heavy.to(tl.int64), 0))
    tl.store(hazards + program, tl.sum(passed, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _extract(  # type: ignore[no-untyped-def]
    old, new, starts, blocks, tables, events, heavies, hazards,
    positions, exponents, steps, heavy_exponents, heavy_steps,
    SHIFT: tl.constexpr, MASK: tl.constexpr, TOP: tl.constexpr,
    HEAVY: tl.constexpr, EXPONENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    before, after, exponent, is_event, is_heavy, passed = _sort_block(
        old, new, starts, blocks, tables, SHIFT, MASK, TOP, HEAVY, EXPONENTS, BLOCK
    )
    program = tl.program_id(0)
    step = ((_ordered(after, TOP) - _ordered(before, TOP) + TOP) & (2 * TOP - 1)) - TOP
    event = is_event.to(tl.int64)
    to = tl.load(events + program) + tl.cumsum(event, 0) - event
    tl.store(positions + to, tl.load(hazards + program) + tl.cumsum(passed, 0), mask=is_event)
    tl.store(exponents + to, exponent.to(tl.uint8), mask=is_event)
    tl.store(steps + to, step.to(steps.dtype.element_ty), mask=is_event)
    heavy = is_heavy.to(tl.int64)
    to = tl.load(heavies + program) + tl.cumsum(heavy, 0) - heavy
    tl.store(heavy_exponents + to, exponent.to(tl.uint8), mask=is_heavy)
    tl.store(heavy_steps + to, step.to(steps.dtype.element_ty), mask=is_heavy)


def collect(old: Tensor, new: Tensor, sizes: Sequence[int], form: Format) -> list[Changes]:
    """The changes of each slice from `old` to `new`, on the host; steps have the type of the words.

    `old` and `new` are flat words on one device. `sizes`: the number of elements of each slice, at least 1.
    """
    device, pieces, blocks = old.device, len(sizes), triton.cdiv(max(sizes), BLOCK)
    starts = torch.from_numpy(np.cumsum([0, *sizes])).to(device)
    place = (old, new, starts, blocks)
    grid = (pieces * blocks,)
    shape: dict[str, Any] = {"SHIFT": form.mantissa_bits, "MASK": form.exponent_mask, "TOP": int(form.top)}
    shape |= {"EXPONENTS": EXPONENTS, "BLOCK": BLOCK, "num_warps": WARPS}
    with torch.cuda.device(device) if old.is_cuda else nullcontext():  # where Triton launches
        counts = torch.zeros(2, pieces, EXPONENTS, dtype=torch.int64, device=device)
        _count[grid](*place, *counts, SAMPLING=SAMPLING, **shape)
        changed, sampled = counts.cpu().numpy()
        codes = [codes_for(*counted) for counted in zip(changed, sampled, strict=True)]
        tables = torch.from_numpy(np.stack([table_of(each) for each in codes]).astype(np.int64)).to(device)
        shape["HEAVY"] = int(HEAVY)
        sums = torch.empty(3, pieces, blocks, dtype=torch.int64, device=device)
        _sum[grid](*place, tables, *sums, **shape)
        events, heavies = sums[:2].sum(2).tolist()
        found = [
            torch.empty(count, dtype=dtype, device=device)
            for count, dtype in (
                (sum(events), torch.int64),
                (sum(events), torch.uint8),
                (sum(events), old.dtype),
                (sum(heavies), torch.uint8),
                (sum(heavies), old.dtype),
            )
        ]
        # Numbers of events and heavy elements before each block of all slices; hazards before it within its slice.
        before = (*(_sum_before(counted.flatten()) for counted in sums[:2]), _sum_before(sums[2]))
        _extract[grid](*place, tables, *before, *found, **shape)
        arrays = _on_host(found)
    parts = [
        np.split(array, np.cumsum(counted[:-1]))
        for array, counted in zip(arrays, (events, events, events, heavies, heavies), strict=True)
    ]
    parts[0] = [positions.view(np.uint64) for positions in parts[0]]
    return [Changes(*fields) for fields in zip(codes, *parts, strict=True)]


def _sum_before(counted: Tensor) -> Tensor:
    """Sums of the values before each value, along the last axis."""
    return counted.cumsum(-1) - counted


def _on_host(tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
    """The tensors as arrays; those of a GPU are copied through pinned memory."""
    if not tensors[0].is_cuda:
        return [tensor.numpy() for tensor in tensors]
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    return [copy.numpy().copy() for copy in copies]  # torch reuses the pinned memory for the next tensor
