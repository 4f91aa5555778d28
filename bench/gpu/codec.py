"""Measure the first passes of the weight codec on a GPU, compared with the codec's loops on one core."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.gpu.card import Card, card_of
from bench.gpu.report import Report, require
from rose.workers.weights.codec import FORMATS, SAMPLING, kernels
from rose.workers.weights.codec.hazard import EXPONENTS, HEAVY, HEAVY_CODE, codes_of, table_of

UPDATE = 3e-6
"""Standard deviation of an update. It changes a few percent of bfloat16 weights with a standard deviation of 0.02."""

FORM = FORMATS["bfloat16"]
SHIFT, MASK = FORM.word(FORM.mantissa_bits), FORM.word(FORM.exponent_mask)

Words = NDArray[np.uint16]


def count_and_extract(report: Report) -> None:
    """F: decides whether a trainer on a GPU counts and collects the changes of a version there.

    The product's loops run on one core, where the range coder stays. Rows: gigabytes of dense words, old and new, per
    second, and the arrays that differ between the core and the GPU.
    """
    card, word_kernels = card_of(report), require("bench.gpu.word_kernels")
    old_words, new_words = _update(card)
    old, new = (each.cpu().numpy().view(np.uint16) for each in (old_words, new_words))
    gigabytes = (old.nbytes + new.nbytes) / 1e9
    changed, table, right = _on_one_core(report, old, new, gigabytes)

    held = torch.from_numpy(table.astype(np.int64)).to(card.device)
    form = {"shift": int(SHIFT), "mask": int(MASK)}
    count = partial(word_kernels.count_changed, old_words, new_words, **form)
    extract = partial(word_kernels.extract, old_words, new_words, held, **form, heavy=int(HEAVY))
    counted, extracted = count(), extract()
    report.row(
        where=card.device,
        count_gb_s=1000 * gigabytes / min(card.milliseconds(count, 5)),
        extract_gb_s=1000 * gigabytes / min(card.milliseconds(extract, 5)),
    )
    unequal = ["changed"] if not np.array_equal(counted.cpu().numpy(), changed) else []
    unequal += [name for name, array in right.items() if not np.array_equal(extracted[name].cpu().numpy(), array)]
    report.row(unequal=", ".join(unequal) or "none")
    report.check("codec_unequal_arrays", len(unequal), "arrays", 0, "rose.workers.weights.codec.kernels")


def _update(card: Card) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the old and the new words of an update, int16 views of bfloat16."""
    generator = torch.Generator(card.device).manual_seed(1)
    count = card.size(1 << 28, 9_000)
    weights = torch.randn(count, generator=generator, device=card.device) * 0.02
    update = torch.randn(count, generator=generator, device=card.device) * UPDATE
    return weights.bfloat16().view(torch.int16), (weights + update).bfloat16().view(torch.int16)


def _on_one_core(
    report: Report, old: Words, new: Words, gigabytes: float
) -> tuple[NDArray[np.int64], NDArray[Any], dict[str, NDArray[np.int64]]]:
    """Run the product's loops; return the changes by exponent, the hazards by exponent, and the collected arrays."""
    changed = np.zeros(EXPONENTS, dtype=np.int64)
    kernels.count_changed(old[:64], new[:64], SHIFT, MASK, changed.copy())  # compiles
    events, count_seconds = _timed(lambda: kernels.count_changed(old, new, SHIFT, MASK, changed))
    total = np.bincount((old[::SAMPLING] >> SHIFT) & MASK, minlength=EXPONENTS) * SAMPLING
    codes = codes_of(changed, np.maximum(total, changed))
    table = table_of(codes)
    most_heavies = len(old) if HEAVY_CODE in codes else 0
    made = {
        "gaps": np.empty(events, np.uint64),
        "widths": np.empty(events, np.uint32),
        "exponents": np.empty(events, np.uint8),
        "steps": np.empty(events, np.int64),
        "heavy_exponents": np.empty(most_heavies, np.uint8),
        "heavy_steps": np.empty(most_heavies, np.int64),
    }
    kernels.extract(old[:8], new[:8], SHIFT, MASK, FORM.top, table, *made.values())  # compiles
    (found, heavies), extract_seconds = _timed(
        lambda: kernels.extract(old, new, SHIFT, MASK, FORM.top, table, *made.values())
    )
    report.row(
        where="one core",
        changed_share=events / len(old),
        events=found,
        heavy=heavies,
        count_gb_s=gigabytes / count_seconds,
        extract_gb_s=gigabytes / extract_seconds,
    )
    used = {name: heavies if name.startswith("heavy") else found for name in made}
    return changed, table, {name: array[: used[name]].astype(np.int64) for name, array in made.items()}


def _timed(function: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    value = function()
    return value, time.perf_counter() - began
