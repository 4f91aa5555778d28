"""Measures the size of an update, compared with the entropy of the changes and with the codecs of other projects.

The floor of a tensor is the information in its changes, given the exponent of each old value, which the receiver knows.
For each exponent it is n * H(fraction changed) for the positions plus changed * H(step) for the values, as if the
receiver knew the tensor's own frequencies. Steps are steps of ordered integers, in which neighbouring floats differ by
1.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.check import Check, Section
from bench.delta_codecs import CODECS, OTHER_CODECS, OURS, Words, slices, tensors
from bench.weight_deltas import Version, updates
from bench.weight_speeds import keep
from rose.workers.weights.codec import DENSE

STEPS: Mapping[float, int] = {1e-6: 20, 1e-5: 5, 1e-4: 5}
"""Number of measured consecutive updates for each learning rate."""

KEPT = 1e-6
"""Learning rate whose last update is kept for the speeds."""

MOST_OF_FLOOR, LEAST_OF_PEER = 1.15, 1.8

EXPONENT_SHIFT, EXPONENT_MASK, SIGN = 7, 0xFF, 0x8000
"""Bit layout of bfloat16."""

BITS = 8


@dataclass
class Totals:
    """Sums over updates: weights, changed weights, bits of the floor, bytes by codec, ROSE's slices, dense slices."""

    weights: int = 0
    changed: int = 0
    floor_bits: float = 0.0
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CODECS, 0))
    slices: int = 0
    dense_slices: int = 0

    def add(self, other: "Totals") -> None:
        self.weights += other.weights
        self.changed += other.changed
        self.floor_bits += other.floor_bits
        self.slices += other.slices
        self.dense_slices += other.dense_slices
        for name, size in other.bytes.items():
            self.bytes[name] += size

    @property
    def of_floor(self) -> float:
        return BITS * self.bytes[OURS] / self.floor_bits

    @property
    def best_peer(self) -> str:
        return min(OTHER_CODECS, key=self.bytes.__getitem__)

    @property
    def of_best_peer(self) -> float:
        return self.bytes[self.best_peer] / self.bytes[OURS]

    @property
    def dense_bytes(self) -> int:
        return 2 * self.weights


def entropy_bits(counts: NDArray[np.int64]) -> float:
    """Return the bits of a whole sequence with these symbol counts, coded with its own frequencies."""
    present = counts[counts > 0].astype(np.float64)
    return float(present.sum() * np.log2(present.sum()) - (present * np.log2(present)).sum()) if len(present) else 0.0


def ordered(words: Words) -> NDArray[np.int32]:
    """Return words as integers in the order of their values."""
    wide = words.astype(np.int32)
    return np.where(wide & SIGN, SIGN - 1 - (wide & (SIGN - 1)), wide | SIGN)


def floor_bits(old: Words, new: Words) -> float:
    """Return the entropy of one tensor's changes, given the exponents of its old values."""
    exponents = (old >> EXPONENT_SHIFT) & EXPONENT_MASK
    changed = np.flatnonzero(old != new)
    steps = ordered(new[changed]) - ordered(old[changed])
    total = np.bincount(exponents, minlength=EXPONENT_MASK + 1)
    bits = 0.0
    changed_exponents = exponents[changed]
    for exponent in np.unique(changed_exponents):
        own = steps[changed_exponents == exponent]
        bits += entropy_bits(np.array([len(own), total[exponent] - len(own)]))
        bits += entropy_bits(np.unique(own, return_counts=True)[1])
    return bits


def measured(old: Version, new: Version) -> Totals:
    """Encode one update with every codec; each payload is decoded and compared."""
    totals = Totals()
    for before, after in tensors(old, new):
        totals.weights += len(before)
        totals.changed += int(np.count_nonzero(before != after))
        totals.floor_bits += floor_bits(before, after)
    for name, codec in CODECS.items():
        for before, after in slices(old, new) if name == OURS else tensors(old, new):
            payload = codec.encode(before, after)
            assert np.array_equal(codec.decode(before, payload), after), f"{name} is exact"
            totals.bytes[name] += len(payload)
            if name == OURS:
                totals.slices += 1
                totals.dense_slices += payload[0] == DENSE
    return totals


def sizes(folder: Path) -> Section:
    """Measure the sizes of real updates by learning rate. Keeps one update for the speeds."""
    section = Section("sizes")
    for learning_rate, steps in STEPS.items():
        taken, total = [], Totals()
        for old, new in updates(folder, learning_rate=learning_rate, steps=steps):
            taken.append(measured(old, new))
            total.add(taken[-1])
            print(f"learning rate {learning_rate:g}: update {len(taken)} of {steps}", file=sys.stderr)
        if learning_rate == KEPT:
            keep(folder, old, new)
        section.rows += [_row(learning_rate, name, size, total) for name, size in total.bytes.items()]
        section.rows.append(_row(learning_rate, "floor", total.floor_bits / BITS, total))
        section.checks += _checks(learning_rate, total, taken)
    return section


def _row(learning_rate: float, name: str, size: float, total: Totals) -> dict[str, float | str]:
    return {
        "learning_rate": f"{learning_rate:g}",
        "codec": name,
        "bits_per_changed": round(BITS * size / total.changed, 3),
        "dense_over": round(total.dense_bytes / size, 2),
        "of_floor": round(BITS * size / total.floor_bits, 3),
    }


def _checks(learning_rate: float, total: Totals, taken: list[Totals]) -> list[Check]:
    fractions = [update.changed / update.weights for update in taken]
    facts = {
        "updates": len(taken),
        "fraction_changed": round(total.changed / total.weights, 5),
        "fraction_by_update": [round(fraction, 5) for fraction in fractions],
        "bits_per_changed": round(BITS * total.bytes[OURS] / total.changed, 3),
        "dense_over": round(total.dense_bytes / total.bytes[OURS], 2),
    }
    return [
        Check(
            name=f"floor_ratio_{learning_rate:g}",
            value=round(total.of_floor, 4),
            unit="of floor",
            bound=MOST_OF_FLOOR,
            direction="max",
            against="entropy by tensor and old exponent of what changed, on the same updates",
            details=facts | {"by_update": [round(update.of_floor, 4) for update in taken]},
        ),
        Check(
            name=f"against_best_peer_{learning_rate:g}",
            value=round(total.of_best_peer, 4),
            unit="times smaller",
            bound=LEAST_OF_PEER,
            direction="min",
            against=f"the smallest of {', '.join(OTHER_CODECS)} on the same updates",
            details={"best_peer": total.best_peer, "by_update": [round(update.of_best_peer, 4) for update in taken]},
        ),
        Check(
            name=f"of_dense_{learning_rate:g}",
            value=round(100 * total.bytes[OURS] / total.dense_bytes, 3),
            unit="% of dense",
            bound=100.0,
            direction="max",
            against="the bfloat16 words themselves",
            details={"slices": total.slices, "dense_slices": total.dense_slices},
        ),
    ]
