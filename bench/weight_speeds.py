"""Measures how fast an update is encoded and applied, compared with other codecs and a copy of the words.

The unit is gigabytes (10^9 bytes) of dense words per second, of processor time and of wall time, over all slices of a
whole model. The codecs compute one slice after another, on one core; the last row is ROSE's codec on as many threads as
there are cores. Every codec gets the same slices, and applying makes a new array, as for an engine. Codecs alternate,
PASSES times; the median counts. The machine should be otherwise idle.
"""

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.check import Check, Section
from bench.delta_codecs import CODECS, OTHER_CODECS, OURS, Words, slices
from bench.weight_deltas import Version
from rose.schemas.errors import RoseError
from rose.workers.weights.slice_threads import map_slices

PASSES = 5

LEAST = {"encode": 0.6, "apply": 1.2}
"""Least GB/s on one core, or OF_OTHER times the fastest other codec, if that is less."""
OF_OTHER = 4.0

COPY = "copy"

CORES = len(os.sched_getaffinity(0))

THREADED = f"{OURS}, {CORES} threads"

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
            {"codec": name}
            | {f"{way}_gb_s": found[name].processor for way, found in rates.items()}
            | {f"{way}_wall_gb_s": found[name].wall for way, found in rates.items()}
            for name in ways["apply"]
        ],
        checks=[_check(way, {name: rate.processor for name, rate in found.items()}) for way, found in rates.items()],
    )


@dataclass(frozen=True)
class Rate:
    """Dense gigabytes per second."""

    processor: float
    """Processor time of all threads."""
    wall: float


Pieces = list[tuple[Words, Words]]
Pass = Callable[[], None]


def _encoders(pieces: Pieces) -> Mapping[str, Pass]:
    def encode_all(name: str) -> None:
        for old, new in pieces:
            CODECS[name].encode(old, new)

    def encode_on_threads() -> None:
        deque(map_slices(lambda piece: CODECS[OURS].encode(*piece), pieces, threads=CORES), maxlen=0)

    return {name: lambda name=name: encode_all(name) for name in CODECS} | {
        COPY: lambda: _copy(pieces),
        THREADED: encode_on_threads,
    }


def _appliers(pieces: Pieces, payloads: Mapping[str, list[bytes]]) -> Mapping[str, Pass]:
    def apply_all(name: str) -> None:
        for (old, _), payload in zip(pieces, payloads[name], strict=True):
            CODECS[name].decode(old, payload)

    def apply_on_threads() -> None:
        work = zip((old for old, _ in pieces), payloads[OURS], strict=True)
        deque(map_slices(lambda piece: CODECS[OURS].decode(*piece), work, threads=CORES), maxlen=0)

    return {name: lambda name=name: apply_all(name) for name in CODECS} | {
        COPY: lambda: _copy(pieces),
        THREADED: apply_on_threads,
    }


def _copy(pieces: Pieces) -> None:
    for _, new in pieces:
        np.copy(new)


def _rates(passes: Mapping[str, Pass], gigabytes: float) -> dict[str, Rate]:
    """Return the rates of each pass: medians of alternating passes, without the first round, which compiles."""
    processor: dict[str, list[float]] = {name: [] for name in passes}
    wall: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(1 + PASSES):
        for name, run in passes.items():
            began, started = time.perf_counter(), time.process_time()
            run()
            processor[name].append(time.process_time() - started)
            wall[name].append(time.perf_counter() - began)
    return {name: Rate(_rate(gigabytes, processor[name]), _rate(gigabytes, wall[name])) for name in passes}


def _rate(gigabytes: float, seconds: list[float]) -> float:
    return round(gigabytes / statistics.median(seconds[1:]), 3)


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
