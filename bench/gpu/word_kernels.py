"""Triton kernels on the words of bfloat16 weights: the scatter of a delta, and the first passes of the weight codec.

All words are int16 views of the weights' bits; positions are int64, as a policy has more words than int32 counts.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


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


@triton.jit
def _load(words, at, count):  # type: ignore[no-untyped-def]
    return tl.load(words + at, mask=at < count, other=0).to(tl.int32) & 0xFFFF


@triton.jit  # type: ignore[untyped-decorator]
def _count(old, new, changed, count, SHIFT: tl.constexpr, MASK: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    before, after = _load(old, at, count), _load(new, at, count)
    exponent = tl.where(before != after, (before >> SHIFT) & MASK, 256)  # past the end both are 0
    bins = tl.arange(0, 512)
    found = tl.histogram(exponent, 512)
    tl.atomic_add(changed + bins, found.to(tl.int64), mask=(bins < 256) & (found > 0))


def count_changed(old: Tensor, new: Tensor, shift: int, mask: int) -> Tensor:
    """Count the changed words of each exponent, int64 [256]."""
    changed = torch.zeros(256, dtype=torch.int64, device=old.device)
    _count[(triton.cdiv(len(old), BLOCK),)](
        old, new, changed, len(old), SHIFT=shift, MASK=mask, BLOCK=BLOCK, num_warps=8
    )
    return changed


@triton.jit  # type: ignore[untyped-decorator]
def _sums(  # type: ignore[no-untyped-def]
    old, new, table, events, heavies, hazards, count,
    SHIFT: tl.constexpr, MASK: tl.constexpr, HEAVY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    before, after = _load(old, at, count), _load(new, at, count)
    hazard = tl.load(table + ((before >> SHIFT) & MASK), mask=inside, other=0)
    light = hazard < HEAVY
    tl.store(events + block, tl.sum((light & (before != after)).to(tl.int64), 0))
    tl.store(heavies + block, tl.sum((hazard >= HEAVY).to(tl.int64), 0))
    tl.store(hazards + block, tl.sum(tl.where(light & (before == after), hazard, 0), 0))


@triton.jit  # type: ignore[untyped-decorator]
def _ordered(word, TOP: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.where((word & TOP) != 0, (TOP - 1) - (word & (TOP - 1)), word | TOP)


@triton.jit  # type: ignore[untyped-decorator]
def _extract(  # type: ignore[no-untyped-def]
    old, new, table, events, heavies, hazards,
    places, widths, exponents, steps, heavy_exponents, heavy_steps, count,
    SHIFT: tl.constexpr, MASK: tl.constexpr, HEAVY: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    before, after = _load(old, at, count), _load(new, at, count)
    exponent = (before >> SHIFT) & MASK
    hazard = tl.load(table + exponent, mask=inside, other=0)
    is_heavy = hazard >= HEAVY
    is_event = (hazard < HEAVY) & (before != after)
    step = ((_ordered(after, TOP) - _ordered(before, TOP) + TOP) & (2 * TOP - 1)) - TOP
    event = is_event.to(tl.int64)
    to = tl.load(events + block) + tl.cumsum(event, 0) - event
    passed = tl.where(is_event | is_heavy, 0, hazard)
    tl.store(places + to, tl.load(hazards + block) + tl.cumsum(passed, 0), mask=is_event)
    tl.store(widths + to, hazard, mask=is_event)
    tl.store(exponents + to, exponent, mask=is_event)
    tl.store(steps + to, step, mask=is_event)
    heavy = is_heavy.to(tl.int64)
    to = tl.load(heavies + block) + tl.cumsum(heavy, 0) - heavy
    tl.store(heavy_exponents + to, exponent, mask=is_heavy)
    tl.store(heavy_steps + to, step, mask=is_heavy)


def extract(old: Tensor, new: Tensor, table: Tensor, *, shift: int, mask: int, heavy: int) -> dict[str, Tensor]:
    """Collect the events and heavy elements of bfloat16 words as `rose.workers.weights.codec.kernels.extract` does.

    `table`: the hazard of each exponent, int64 [256]; `heavy` and above marks heavy exponents. All results are int64.
    """
    count, blocks = len(old), triton.cdiv(len(old), BLOCK)
    form: dict[str, Any] = {"SHIFT": shift, "MASK": mask, "HEAVY": heavy, "BLOCK": BLOCK, "num_warps": 8}
    sums = torch.empty(3, blocks, dtype=torch.int64, device=old.device)
    _sums[(blocks,)](old, new, table, *sums, count, **form)
    ends = sums.cumsum(1)
    starts = ends - sums
    events, heavies, _ = ends[:, -1].tolist()
    found = {name: sums.new_empty(events) for name in ("places", "widths", "exponents", "steps")}
    found |= {name: sums.new_empty(heavies) for name in ("heavy_exponents", "heavy_steps")}
    _extract[(blocks,)](old, new, table, *starts, *found.values(), count, TOP=0x8000, **form)
    places = found.pop("places")
    return {"gaps": places.diff(prepend=places.new_zeros(1)), **found}
