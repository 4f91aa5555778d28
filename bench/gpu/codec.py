"""Measure the collection of changes on a GPU, compared with the codec's loops on one core."""

import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.gpu.card import Card, card_of
from bench.gpu.report import Report, require
from rose.workers.weights import codec
from rose.workers.weights.codec import FORMATS, Format

UPDATE = 3e-7
"""Standard deviation of an update. It changes about one percent of bfloat16 weights with a standard deviation of
0.02."""

SLICE = 1 << 20
"""Elements of a slice, as in `rose.workers.weights.layout`."""

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
Words = torch.Tensor
"""Flat words: int16 or int32 views of the bits of weights."""

INTEGERS = {2: torch.int16, 4: torch.int32}


def collect_changes(report: Report) -> None:
    """F: decides whether `weights.encode_on_gpu` may be the default.

    The product's kernels collect the changes of several slices, for each element type: of an update, and of any bit
    patterns. The range coder stays on the host. Rows: gigabytes of dense words per second, with the copy of the changes
    to the host, and the same of one core; the first call, which compiles; bytes of changes over dense bytes.
    """
    card, kernels = card_of(report), require("rose.workers.weights.codec.triton_kernels")
    wrong = 0
    for dtype in DTYPES:
        wrong += _compare(report, kernels, dtype, "update", *_update(card, dtype))
        wrong += _compare(report, kernels, dtype, "any bits", *_any_bits(card, dtype))
    report.check("slices_collected_wrongly", wrong, "slices", 0, "rose.workers.weights.codec.collect on one core")


def _compare(report: Report, kernels: Any, dtype: str, kind: str, old: Words, new: Words) -> int:
    """Collect the changes on the GPU and on one core; return the number of slices with other changes."""
    form = FORMATS[dtype]
    sizes = [min(SLICE, len(old) - start) for start in range(0, len(old), SLICE)]
    on_gpu = partial(kernels.collect, old, new, sizes, form)
    found, first_seconds = _timed(on_gpu)
    seconds = min(_timed(on_gpu)[1] for _ in range(3))
    _on_one_core(old[:8], new[:8], [8], form)  # compiles
    right, core_seconds = _timed(partial(_on_one_core, old.cpu(), new.cpu(), sizes, form))
    gigabytes = new.nbytes / 1e9
    report.row(
        dtype=dtype,
        kind=kind,
        events=sum(len(one.steps) for one in found),
        heavy=sum(len(one.heavy_steps) for one in found),
        gpu_gb_s=gigabytes / seconds,
        one_core_gb_s=gigabytes / core_seconds,
        first_seconds=first_seconds,
        changes_over_dense=sum(getattr(one, each.name).nbytes for one in found for each in fields(one)) / new.nbytes,
    )
    return sum(not one.equals(other) for one, other in zip(found, right, strict=True))


def _update(card: Card, dtype: str) -> tuple[Words, Words]:
    """Return the bits of weights before and after a small update."""
    generator = torch.Generator(card.device).manual_seed(1)
    count = card.size(64 * SLICE + 1_000, 9_000)
    weights = torch.randn(count, generator=generator, device=card.device) * 0.02
    update = torch.randn(count, generator=generator, device=card.device) * UPDATE
    old, new = weights.to(DTYPES[dtype]), (weights + update).to(DTYPES[dtype])
    return old.view(INTEGERS[old.itemsize]), new.view(INTEGERS[new.itemsize])


def _any_bits(card: Card, dtype: str) -> tuple[Words, Words]:
    """Return words of any bit patterns, NaNs and both zeros included; a tenth changes to any other bits."""
    random = np.random.default_rng(2)
    word = FORMATS[dtype].word
    count = card.size(4 * SLICE + 77, 9_000)
    old, other = (random.integers(0, np.iinfo(word).max, count, dtype=word, endpoint=True) for _ in range(2))
    new = np.where(random.random(count) < 0.1, other, old)
    integers = np.dtype(f"int{8 * old.itemsize}")
    words = [torch.from_numpy(each.view(integers)).to(card.device) for each in (old, new)]
    return words[0], words[1]


def _on_one_core(old: Words, new: Words, sizes: list[int], form: Format) -> list[codec.Changes]:
    olds, news = (np.split(words.cpu().numpy().view(form.word), np.cumsum(sizes)[:-1]) for words in (old, new))
    return [codec.collect(*pair, form) for pair in zip(olds, news, strict=True)]


def _timed(function: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    value = function()
    return value, time.perf_counter() - began
