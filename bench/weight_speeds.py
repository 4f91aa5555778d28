"""Measures how fast an update is encoded and applied on one core, compared with other codecs and a copy of the words.

The unit is gigabytes (10^9 bytes) of dense words per second of processor time, over all slices of a whole model, one
after another. Every codec gets the same slices, and applying makes a new array, as for an engine. Codecs alternate,
PASSES times; the median counts. The machine should be otherwise idle.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from bench.check import Check, Section
from bench.delta_codecs import CODECS, OTHER_CODECS, OURS, Words, slices
from bench.weight_deltas import Version
from rose.schemas.errors import RoseError

PASSES = 5

LEAST = {"encode": 0.6, "apply": 1.2}
"""Least GB/s on one core, or OF_OTHER times the fastest other codec, if that is less."""
OF_OTHER = 4.0

COPY = "copy"

OLD, NEW = "update-old.safetensors", "update-new.safetensors"


def keep(folder: Path, old: Version, new: Version) -> None:
    """Keep an update for the speeds."""
    from safetensors.numpy import save_file

    for file, version in ((OLD, old), (NEW, new)):
        save_file(dict(version), folder / file)


def kept(folder: Path) -> tuple[Version, Version]:
    """Return the update that `keep` kept. Raises RoseError."""
    from safetensors.numpy import load_file

    if not (folder / NEW).exists():
        raise RoseError(f"no update in {folder} to time: run `python -m bench.weights --only sizes` first")
    return load_file(folder / OLD), load_file(folder / NEW)


def speeds(folder: Path) -> Section:
    """Measure speeds on the kept update."""
    pieces = list(slices(*kept(folder)))
    gigabytes = sum(new.nbytes for _, new in pieces) / 1e9
    payloads = {name: [codec.encode(old, new) for old, new in pieces] for name, codec in CODECS.items()}
    ways = {"encode": _encoders(pieces), "apply": _appliers(pieces, payloads)}
    rates = {way: _rates(passes, gigabytes) for way, passes in ways.items()}
    return Section(
        "speeds",
        rows=[
            {"codec": name, **{f"{way}_gb_s": found[name] for way, found in rates.items()}} for name in (*CODECS, COPY)
        ],
        checks=[_check(way, found) for way, found in rates.items()],
    )


Pieces = list[tuple[Words, Words]]
Pass = Callable[[], None]


def _encoders(pieces: Pieces) -> Mapping[str, Pass]:
    def encode_all(name: str) -> None:
        for old, new in pieces:
            CODECS[name].encode(old, new)

    return {name: lambda name=name: encode_all(name) for name in CODECS} | {COPY: lambda: _copy(pieces)}


def _appliers(pieces: Pieces, payloads: Mapping[str, list[bytes]]) -> Mapping[str, Pass]:
    def apply_all(name: str) -> None:
        for (old, _), payload in zip(pieces, payloads[name], strict=True):
            CODECS[name].decode(old, payload)

    return {name: lambda name=name: apply_all(name) for name in CODECS} | {COPY: lambda: _copy(pieces)}


def _copy(pieces: Pieces) -> None:
    for _, new in pieces:
        np.copy(new)


def _rates(passes: Mapping[str, Pass], gigabytes: float) -> dict[str, float]:
    """Return the GB/s of each pass: the median of alternating passes, without the first round, which compiles."""
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(1 + PASSES):
        for name, run in passes.items():
            started = time.process_time()
            run()
            seconds[name].append(time.process_time() - started)
    return {name: round(gigabytes / statistics.median(taken[1:]), 3) for name, taken in seconds.items()}


def _check(way: str, rates: Mapping[str, float]) -> Check:
    best = max(OTHER_CODECS, key=rates.__getitem__)
    return Check(
        name=way,
        value=rates[OURS],
        unit="GB/s",
        bound=round(min(LEAST[way], OF_OTHER * rates[best]), 3),
        direction="min",
        against=f"the less of {LEAST[way]} and {OF_OTHER:g} times the fastest other codec; dense bytes, one core",
        details={"best_peer": best, "best_peer_gb_s": rates[best], "copy_gb_s": rates[COPY]},
    )
