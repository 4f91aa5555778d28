"""The first passes of the weight codec on a GPU."""

import time

import numpy as np
import torch

from bench.gpu.card import card_of
from bench.gpu.report import Report, Unavailable
from rose.workers.weights.codec import FORMATS, SAMPLING, kernels
from rose.workers.weights.codec.hazard import EXPONENTS, HEAVY, HEAVY_CODE, codes_of, table_of

UPDATE = 3e-6
"""Standard deviation of an update; of weights of 0.02 a few percent change in bfloat16."""


def count_and_extract(report: Report) -> None:
    """F: decides whether a trainer on a GPU counts and collects the changes of a version there.

    The product's loops run on one core; the range coder stays there. Measured are dense bytes (old and new) per second,
    and whether all arrays are equal.
    """
    card = card_of(report)
    try:
        from bench.gpu import word_kernels
    except ImportError as error:
        raise Unavailable(f"Triton is not installed ({error})") from error
    form = FORMATS["bfloat16"]
    shift, mask = form.word(form.mantissa_bits), form.word(form.exponent_mask)
    generator = torch.Generator(card.device).manual_seed(1)
    count = card.size(1 << 28, 9_000)
    weights = torch.randn(count, generator=generator, device=card.device) * 0.02
    update = torch.randn(count, generator=generator, device=card.device) * UPDATE
    old_words, new_words = (each.bfloat16().view(torch.int16) for each in (weights, weights + update))
    del weights, update
    old, new = (each.cpu().numpy().view(np.uint16) for each in (old_words, new_words))

    changed = np.zeros(EXPONENTS, dtype=np.int64)
    kernels.count_changed(old[:64], new[:64], shift, mask, changed.copy())  # compiles
    began = time.perf_counter()
    events = kernels.count_changed(old, new, shift, mask, changed)
    count_seconds = time.perf_counter() - began
    total = np.bincount((old[::SAMPLING] >> shift) & mask, minlength=EXPONENTS) * SAMPLING
    codes = codes_of(changed, np.maximum(total, changed))
    table = table_of(codes)
    heavy_most = len(old) if HEAVY_CODE in codes else 0
    made = {
        "gaps": np.empty(events, np.uint64),
        "widths": np.empty(events, np.uint32),
        "exponents": np.empty(events, np.uint8),
        "steps": np.empty(events, np.int64),
        "heavy_exponents": np.empty(heavy_most, np.uint8),
        "heavy_steps": np.empty(heavy_most, np.int64),
    }
    kernels.extract(old[:8], new[:8], shift, mask, form.top, table, *made.values())  # compiles
    began = time.perf_counter()
    found, heavies = kernels.extract(old, new, shift, mask, form.top, table, *made.values())
    extract_seconds = time.perf_counter() - began
    gigabytes = (old.nbytes + new.nbytes) / 1e9
    report.row(
        where="one core",
        changed_share=events / len(old),
        events=found,
        heavy=heavies,
        count_gb_s=gigabytes / count_seconds,
        extract_gb_s=gigabytes / extract_seconds,
    )

    held = torch.from_numpy(table.astype(np.int64)).to(card.device)

    def count_on_card() -> torch.Tensor:
        return word_kernels.count_changed(old_words, new_words, int(shift), int(mask))

    def extract_on_card() -> dict[str, torch.Tensor]:
        return word_kernels.extract(old_words, new_words, held, shift=int(shift), mask=int(mask), heavy=int(HEAVY))

    counted, extracted = count_on_card(), extract_on_card()
    count_ms, extract_ms = card.milliseconds(count_on_card, 5), card.milliseconds(extract_on_card, 5)
    report.row(
        where=card.device,
        count_gb_s=1000 * gigabytes / min(count_ms),
        extract_gb_s=1000 * gigabytes / min(extract_ms),
    )
    unequal = ["changed"] if not np.array_equal(counted.cpu().numpy(), changed) else []
    for name, array in made.items():
        right = array[: heavies if name.startswith("heavy") else found].astype(np.int64)
        if not np.array_equal(extracted[name].cpu().numpy(), right):
            unequal.append(name)
    report.row(unequal=", ".join(unequal) or "none")
    report.check("codec_unequal_arrays", len(unequal), "arrays", 0, "rose.workers.weights.codec.kernels")
