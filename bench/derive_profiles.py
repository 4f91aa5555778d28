"""Derive the shipped profiles of pipeline/simulation from measured tables of kernels.

    python -m bench.derive_profiles --tables FOLDER [--out FOLDER]

FOLDER holds NVIDIA aiconfigurator's tables for an H100 SXM with vLLM 0.24 (`*_gemm_perf.parquet`,
`*_context_attention_perf.parquet`, `*_generation_attention_perf.parquet`, `*_custom_allreduce_perf.parquet`) and its
measured `silicon_sample.csv`. Needs pyarrow.

Keeps true
- A kernel's time on a card without tables is the H100's time by the ratio of the two cards' roofline times.
- The host's constants are fitted on rows that were measured end to end, as `rose calibrate` fits them.
"""

import argparse
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bench.check import say
from rose.pipeline.simulation.calibration import calibrate, read_rows
from rose.pipeline.simulation.cost_model import PROFILES, Host, Profile, parse_profile, write_profile

TABLES = "measured on an H100 SXM with vLLM 0.24 (NVIDIA aiconfigurator 0.11, Apache-2.0)"

QWEN3_32B_ROWS = {
    "model_path": "Qwen/Qwen3-32B",
    "system": "h100_sxm",
    "backend": "vllm",
    "mode": "agg",
    "gemm_quant_mode": "",
}
"""The rows of `silicon_sample.csv` that the host's constants are fitted on; they are in bfloat16."""

LIFECYCLE = {
    "source": "wake: at most 5 s for a 32B with TP 4, whose rank has the bytes of an 8B (ROSE, arXiv 2605.06534); "
    "load: preparation of a rollout engine, 56.3 s for an 8B and 67.1 s for a 30B (PEARL, 2026), the longer one",
    "wake_seconds": 5.0,
    "load_seconds": 67.1,
}

TOLERANCE = 0.02
"""A point of a curve is left out if the line between its neighbours misses it by at most this share."""

MOST_TOKENS = 32_768
"""Tokens of the largest step of a curve."""

MOST_SEQUENCES = 1024
"""Requests of the largest step of a curve."""

UTILISATION = 0.9
"""Share of a card's memory that vLLM uses by default."""

OTHER_BYTES = 3_758_096_384
"""Memory of a rank for activations, CUDA graphs and CUDA itself, as aiconfigurator's h100_sxm.yaml has it."""

NCCL_BYTES = {1: 0, 2: 358_612_992, 4: 411_041_792, 8: 411_041_792}
"""Memory of a rank for NCCL, by tensor parallel size; from the same file."""

BLOCK_TOKENS = 16
"""Tokens of a KV block of vLLM by default."""

NETWORK_BYTES_PER_SECOND = 20e9 / 8
"""The link of 20 Gbit/s that ROSE's paper (arXiv 2605.06534) sends versions over."""


@dataclass(frozen=True)
class Card:
    """A card's data sheet."""

    name: str
    bytes_per_second: float
    flops: float
    """Dense bfloat16 operations a second."""
    memory_bytes: int
    nvlink_bytes_per_second: float
    """Both directions together."""


H100 = Card("H100", 3.35e12, 989e12, 80 << 30, 900e9)
CARDS = (
    H100,
    Card("H800", 3.35e12, 989e12, 80 << 30, 400e9),
    Card("H200", 4.8e12, 989e12, 141 << 30, 900e9),
    Card("H20", 4.0e12, 148e12, 96 << 30, 900e9),
)


@dataclass(frozen=True)
class Model:
    """The shape of a dense decoder with grouped-query attention, bfloat16, output layer of its own."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    feed_forward: int
    vocabulary: int
    head_size: int = 128

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * 2 * self.layers * self.kv_heads * self.head_size

    @property
    def weight_bytes(self) -> int:
        attention = (2 * self.heads + 2 * self.kv_heads) * self.head_size * self.hidden
        norms = 2 * self.hidden + 2 * self.head_size
        layer = attention + 3 * self.feed_forward * self.hidden + norms
        return 2 * (self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden)

    def linear_shapes(self, ranks: int) -> list[tuple[int, int]]:
        """Return (outputs, inputs) of a layer's four matrices on one of `ranks` ranks."""
        heads = self.heads * self.head_size // ranks
        kv = max(1, self.kv_heads // ranks) * self.head_size
        width = self.feed_forward // ranks
        return [(heads + 2 * kv, self.hidden), (self.hidden, heads), (2 * width, self.hidden), (self.hidden, width)]


QWEN3_8B = Model("Qwen/Qwen3-8B", 36, 32, 8, 4096, 12_288, 151_936)
QWEN3_32B = Model("Qwen/Qwen3-32B", 64, 64, 8, 5120, 25_600, 151_936)

Points = dict[int, float]
"""Seconds by a count."""


class Tables:
    """The measured tables, in seconds."""

    def __init__(self, folder: Path) -> None:
        self.gemm: dict[tuple[int, int], Points] = defaultdict(dict)
        """Seconds by tokens, for each (outputs, inputs) of a matrix."""
        self.decode: dict[tuple[int, int], dict[tuple[int, int], float]] = defaultdict(dict)
        """Seconds by (requests, context of each), for each (heads, KV heads)."""
        self.prefill: dict[tuple[int, int], Points] = defaultdict(dict)
        """Seconds by tokens of one prompt, for each (heads, KV heads)."""
        self.all_reduce: dict[int, Points] = defaultdict(dict)
        """Seconds by elements, for each number of ranks."""
        for row in _rows(folder, "gemm", gemm_dtype="bfloat16"):
            points = self.gemm[row["n"], row["k"]]
            points[row["m"]] = min(row["latency"] / 1e3, points.get(row["m"], math.inf))
        attention = {"head_dim": 128, "attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "window_size": 0}
        for row in _rows(folder, "generation_attention", **attention):
            shape = row["num_heads"], row["num_key_value_heads"]
            self.decode[shape][row["batch_size"], row["isl"] + row["step"]] = row["latency"] / 1e3
        for row in _rows(folder, "context_attention", **attention, batch_size=1, step=0):
            self.prefill[row["num_heads"], row["num_key_value_heads"]][row["isl"]] = row["latency"] / 1e3
        for row in _rows(folder, "custom_allreduce", backend="vllm_graph"):
            self.all_reduce[row["num_gpus"]][row["message_size"]] = row["latency"] / 1e3

    def linear(self, shape: tuple[int, int], card: Card) -> Points:
        """Return the seconds of a matrix by tokens. Without a table: those of the nearest shape, by size."""
        nearest = min(self.gemm, key=lambda known: sum(abs(math.log(a / b)) for a, b in zip(known, shape, strict=True)))
        share = shape[0] * shape[1] / (nearest[0] * nearest[1])
        return {
            tokens: seconds * share * _gemm_ratio(*shape, tokens, card)
            for tokens, seconds in self.gemm[nearest].items()
        }


def _rows(folder: Path, table: str, **wanted: Any) -> Iterable[dict[str, Any]]:
    (file,) = folder.glob(f"*{table}_perf.parquet")
    condition = True
    for column, value in wanted.items():
        equal = pc.field(column) == value
        condition = equal if condition is True else condition & equal
    rows: list[dict[str, Any]] = pq.read_table(file, filters=condition).to_pylist()
    return rows


def _gemm_ratio(outputs: int, inputs: int, tokens: int, card: Card) -> float:
    """Return the roofline seconds of a matrix on the card, over those on an H100."""
    moved = 2 * (outputs * inputs + tokens * (outputs + inputs))
    operations = 2 * outputs * inputs * tokens

    def roofline(card: Card) -> float:
        return max(moved / card.bytes_per_second, operations / card.flops)

    return roofline(card) / roofline(H100)


def _sum(curves: Iterable[tuple[float, Points]]) -> Points:
    """Return the weighted sum of curves, at the counts that all have."""
    curves = list(curves)
    counts = set.intersection(*(set(points) for _, points in curves))
    return {count: sum(weight * points[count] for weight, points in curves) for count in sorted(counts)}


def _curve(points: Points, source: str, most: int = MOST_TOKENS) -> dict[str, Any]:
    """Return a table of a profile: seconds that do not fall, with no more points than `TOLERANCE` asks for."""
    highest = 0.0
    rising = [(count, highest := max(highest, points[count])) for count in sorted(points) if count <= most]
    kept = _simplified(rising)
    return {"source": source, "counts": [count for count, _ in kept], "seconds": [seconds for _, seconds in kept]}


def _simplified(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the points that lines must join to pass within TOLERANCE of all (Ramer-Douglas-Peucker)."""
    (left, low), (right, high) = points[0], points[-1]

    def miss(point: tuple[int, float]) -> float:
        return abs(low + (high - low) * (point[0] - left) / (right - left) - point[1]) / point[1]

    worst = max(range(1, len(points) - 1), key=lambda place: miss(points[place]), default=0)
    if worst == 0 or miss(points[worst]) <= TOLERANCE:
        return [points[0], points[-1]]
    return _simplified(points[: worst + 1])[:-1] + _simplified(points[worst:])


def _decode_attention(table: dict[tuple[int, int], float], beside: float, most_tokens: int) -> tuple[Points, float]:
    """Return the fixed seconds of decode attention by requests, and the seconds of each context token.

    One figure a token for all numbers of requests, by least squares of the error relative to the layer's seconds,
    of which the linear layers have `beside`; over contexts from 128 tokens to what the KV cache holds.
    """
    groups: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
    for (requests, context), seconds in table.items():
        if 128 <= context <= 32_768 and requests * context <= most_tokens and requests <= 512:
            groups[requests].append((requests * context, seconds, (seconds + beside) ** -2))
    covered = spread = 0.0
    means = {}
    for requests, group in groups.items():
        weight = sum(w for _, _, w in group)
        tokens = sum(w * t for t, _, w in group) / weight
        mean = sum(w * s for _, s, w in group) / weight
        means[requests] = tokens, mean
        covered += sum(w * (t - tokens) * (s - mean) for t, s, w in group)
        spread += sum(w * (t - tokens) ** 2 for t, _, w in group)
    token_seconds = covered / spread
    return {
        requests: max(0.0, mean - token_seconds * tokens) for requests, (tokens, mean) in means.items()
    }, token_seconds


def _prefill_attention(points: Points, fixed: float, linear_token_seconds: float) -> tuple[float, float]:
    """Return the seconds a token and a pair of tokens of prefill attention, `fixed` seconds aside.

    By least squares of the error relative to the layer's seconds.
    """
    aa = ab = bb = ay = by = 0.0
    for tokens, seconds in points.items():
        weight = (seconds + tokens * linear_token_seconds + 10 * fixed) ** -2
        a, b, y = tokens, tokens * tokens / 2, seconds - fixed
        aa, ab, bb = aa + weight * a * a, ab + weight * a * b, bb + weight * b * b
        ay, by = ay + weight * a * y, by + weight * b * y
    determinant = aa * bb - ab * ab
    return (ay * bb - by * ab) / determinant, (by * aa - ay * ab) / determinant


def profile_of(tables: Tables, model: Model, card: Card, ranks: int, host: Host) -> Profile:
    """Return the profile of a model on a card."""
    shape = model.heads // ranks, max(1, model.kv_heads // ranks)
    layers = [(model.layers, tables.linear(each, card)) for each in model.linear_shapes(ranks)]
    on_h100 = _sum((model.layers, tables.linear(each, H100)) for each in model.linear_shapes(ranks))
    free = UTILISATION * card.memory_bytes - model.weight_bytes / ranks - OTHER_BYTES - NCCL_BYTES[ranks]
    kv_cache_tokens = int(free * ranks / model.kv_bytes_per_token) // BLOCK_TOKENS * BLOCK_TOKENS
    fixed, context = _decode_attention(tables.decode[shape], on_h100[16] / model.layers, kv_cache_tokens)
    slope = (on_h100[4096] - on_h100[1]) / 4096 / model.layers
    token, pair = _prefill_attention(tables.prefill[shape], fixed[1], slope)
    output = tables.linear((model.vocabulary // ranks, model.hidden), card)
    compute = model.layers * H100.flops / card.flops
    moved = model.layers * H100.bytes_per_second / card.bytes_per_second
    described = {
        "name": f"{model.name.partition('/')[2].lower()}-{card.name.lower()}-tp{ranks}",
        "model": model.name,
        "card": card.name,
        "tensor_parallel": ranks,
        "shape": {
            "source": f"computed from the config.json of {model.name}, bfloat16",
            "layers": model.layers,
            "kv_bytes_per_token": model.kv_bytes_per_token,
            "weight_bytes": model.weight_bytes,
        },
        "memory": {
            "source": f"computed: {UTILISATION} of {card.memory_bytes >> 30} GiB, less the weights, "
            f"{OTHER_BYTES / 1e9:.2f} GB for activations and CUDA, and {NCCL_BYTES[ranks] / 1e9:.2f} GB for NCCL "
            "(aiconfigurator 0.11, h100_sxm.yaml); vLLM's default block",
            "kv_cache_tokens": kv_cache_tokens,
            "block_tokens": BLOCK_TOKENS,
        },
        "host": msgspec.to_builtins(host),
        "linear": _curve(_sum(layers), _source("gemm_perf, bfloat16", card)),
        "output": _curve(output, _source("gemm_perf, bfloat16, of the nearest size", card), MOST_SEQUENCES),
        "decode_attention": {
            **_curve(
                {requests: model.layers * seconds for requests, seconds in fixed.items()},
                _source("generation_attention_perf, a line fitted to contexts from 128 tokens", card),
                MOST_SEQUENCES,
            ),
            "context_token_seconds": moved * context,
        },
        "prefill_attention": {
            "source": _source("context_attention_perf, a parabola fitted to prompts of up to 16,384 tokens", card),
            "token_seconds": compute * token,
            "pair_seconds": compute * pair,
        },
        "lifecycle": LIFECYCLE,
        "links": {
            "source": "network: ROSE's paper, arXiv 2605.06534; NVLink: data sheet, both directions",
            "network_bytes_per_second": NETWORK_BYTES_PER_SECOND,
            "nvlink_bytes_per_second": card.nvlink_bytes_per_second,
        },
    }
    if ranks > 1:
        described["all_reduce"] = _all_reduce(tables.all_reduce[ranks], model, card)
    return parse_profile(described, str(described["name"]))


def _all_reduce(points: Points, model: Model, card: Card) -> dict[str, Any]:
    """Return the table of two all-reduces a layer. What exceeds the smallest message's time scales with NVLink."""
    least = min(points.values())
    slower = H100.nvlink_bytes_per_second / card.nvlink_bytes_per_second
    by_tokens = {
        round(elements / model.hidden): 2 * model.layers * (least + (seconds - least) * slower)
        for elements, seconds in points.items()
        if elements >= model.hidden
    }
    source = f"{TABLES}: custom_allreduce_perf, CUDA graph, {model.hidden} elements a token"
    if slower != 1.0:
        source += f"; inferred: the time above that of the smallest message times {slower}, as NVLink is slower"
    return _curve(by_tokens, source)


def _source(table: str, card: Card) -> str:
    measured = f"{TABLES}: {table}"
    if (card.bytes_per_second, card.flops) == (H100.bytes_per_second, H100.flops):
        return measured
    return (
        f"inferred: {measured}, by the ratio of the cards' roofline times "
        f"({card.bytes_per_second / 1e12} TB/s and {card.flops / 1e12:.0f} TFLOPS of the data sheet)"
    )


def fitted_host(tables: Tables, folder: Path) -> Host:
    """Return the host's constants, fitted on the rows of Qwen3-32B in bfloat16 on H100 cards with vLLM."""
    nothing = Host(source="none", step_seconds=0.0, sequence_seconds=0.0)
    profiles = [profile_of(tables, QWEN3_32B, H100, ranks, nothing) for ranks in (2, 4, 8)]
    with (folder / "silicon_sample.csv").open(newline="", encoding="utf-8") as file:
        rows = read_rows(file, file.name, QWEN3_32B_ROWS)
    found = calibrate(profiles, rows)
    used = len(rows) - found.queued
    return Host(
        source=f"fitted on {used} rows of Qwen3-32B, vLLM 0.12, H100, TP 2 to 8 (aiconfigurator 0.11, "
        f"silicon_sample.csv); on rows that were not fitted, the median error is {found.held_out.median:.1%} and the "
        f"90th percentile {found.held_out.p90:.1%}",
        step_seconds=found.fit.step_seconds,
        sequence_seconds=found.fit.sequence_seconds,
    )


def main() -> None:
    """Write the profiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=PROFILES, metavar="FOLDER")
    arguments = parser.parse_args()
    tables = Tables(arguments.tables)
    host = fitted_host(tables, arguments.tables)
    for model, ranks in ((QWEN3_8B, 1), (QWEN3_8B, 2), (QWEN3_32B, 2), (QWEN3_32B, 4), (QWEN3_32B, 8)):
        for card in CARDS:
            profile = profile_of(tables, model, card, ranks, host)
            (arguments.out / f"{profile.name}.toml").write_text(write_profile(profile), encoding="utf-8")
            say(profile.name)


if __name__ == "__main__":
    main()
