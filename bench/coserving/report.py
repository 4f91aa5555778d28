"""Prints a run as tables."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.check import Check
from bench.coserving.figures import Ratio, Summary
from bench.coserving.results import COMPARED, Standing

FIGURES = {
    "ttft_p50_ms": "TTFT p50, ms",
    "ttft_p99_ms": "TTFT p99, ms",
    "tpot_p50_ms": "TPOT p50, ms",
    "tpot_p99_ms": "TPOT p99, ms",
    "gap_p99_ms": "inter-token time p99, ms",
    "outside_p99_ms": "outside the scheduler p99, ms",
    "queue_p99_ms": "in its queue p99, ms",
    "waited_p99_ms": "sent to first scheduled p99, ms",
    "ttft_attainment": "TTFT budget kept",
    "tpot_attainment": "TPOT budget kept",
    "serving_tokens_per_second": "serving tokens/s",
    "guest_tokens_per_second": "guest tokens/s",
    "guest_step_ms": "a guest's step, ms",
    "guest_longest_ms": "its longest piece, ms",
    "guest_computed_ms": "its longest piece, ms of processor time",
    "busy": "serving busy",
    "prefix_hit_rate": "serving's prefix hits",
    "failed": "failed requests",
}
WIDE = 200
"""Number of columns without a terminal."""

SHARES = ("ttft_attainment", "tpot_attainment", "busy", "prefix_hit_rate")


def show(
    found: Mapping[str, Standing],
    peers: Mapping[str, Mapping[str, float]],
    checks: Sequence[Check],
    worst: Sequence[Mapping[str, Any]],
) -> None:
    """Print a run: figures, ratios to `alone` next to published ratios, the slowest requests, and checks."""
    console = Console()
    if not console.is_terminal:
        console.width = WIDE
    console.print(_figures(found))
    if any(standing.ratios for standing in found.values()):
        console.print(_ratios(found, peers))
    print("Latency of the slowest first tokens of each arm's worst window by part, in milliseconds:")
    for row in worst:
        print(_worst(row))
    for check in checks:
        print(check)


def _figures(found: Mapping[str, Standing]) -> Table:
    table = Table("", *found, title="median of the windows, lowest to highest")
    table.add_row("windows", *(str(standing.windows) for standing in found.values()))
    table.add_row("discarded", *(str(standing.thrown) for standing in found.values()))
    for figure, name in FIGURES.items():
        table.add_row(name, *(_range(figure, standing.summaries[figure]) for standing in found.values()))
    table.add_row("harvest", *(_number(standing.harvest, "{:.2f}") for standing in found.values()))
    return table


def _range(figure: str, value: Summary) -> str:
    form = "{:.1%}" if figure in SHARES else "{:,.0f}" if value.median >= 100 else "{:.3g}"
    low, high = form.format(value.low), form.format(value.high)
    middle = _number(value.median, form)
    return middle if low == high else f"{middle} ({low}-{high})"


def _ratios(found: Mapping[str, Standing], peers: Mapping[str, Mapping[str, float]]) -> Table:
    compared = {name: standing for name, standing in found.items() if standing.ratios}
    table = Table("", *compared, *peers, title="over serving alone")
    for figure in COMPARED:
        theirs = (_number(ratios.get(figure, math.nan), "{:.2f}x") for ratios in peers.values())
        table.add_row(FIGURES[figure], *(_ratio(each.ratios[figure]) for each in compared.values()), *theirs)
    return table


def _ratio(value: Ratio) -> str:
    shown = _number(value.value, "{:.2f}x")
    return shown if value.resolved or shown == "-" else f"{shown} unresolved"


def _worst(row: Mapping[str, Any]) -> str:
    return (
        "{arm}, round {round}, second {second:.1f}: first token after {ttft:,.0f} ms; late client {client:,.0f}, "
        "outside {outside:,.0f}, queue {queue:,.0f}, prefill {prefill:,.0f}; {prompt} prompt tokens, {cached} cached, "
        "{before_it} requests before it, {guest_tokens} guest tokens in this time"
    ).format_map(row)


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else form.format(value)
