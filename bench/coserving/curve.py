"""Plots the gain and the cost of lending over the dial, from a run's sweep."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plotly.subplots import make_subplots

from bench.coserving.arms import ALONE
from bench.coserving.figures import Summary
from bench.coserving.results import Standing

TOKENS = "guest_tokens_per_second"

PANELS = {
    "ttft_p99_ms": "TTFT p99 over serving alone",
    "tpot_p99_ms": "TPOT p99 over serving alone",
}


def draw(found: Mapping[str, Standing], file: Path) -> None:
    """Plot guest tokens a second over the stretch of latencies, as one HTML file.

    Each arm is a point, and each of its windows a cross; the line is the throughput of a guest with the whole engine.
    The plot has no points if serving alone has no window.
    """
    lending = {name: each for name, each in found.items() if each.ratios and each.value(TOKENS) > 0}
    whole = [each.value(TOKENS) for each in found.values() if not each.requests]
    figure = make_subplots(rows=1, cols=len(PANELS), shared_yaxes=True, horizontal_spacing=0.06)
    for column, (latency, title) in enumerate(PANELS.items(), start=1):
        over = found[ALONE].value(latency) if lending else 1.0
        figure.add_scatter(
            x=[each.ratios[latency].value for each in lending.values()],
            y=[each.value(TOKENS) for each in lending.values()],
            error_x=_spread([each.summaries[latency] for each in lending.values()], over),
            error_y=_spread([each.summaries[TOKENS] for each in lending.values()], 1.0),
            text=list(lending),
            mode="markers+text",
            # Alternate positions keep names apart.
            textposition=[f"{('bottom', 'top')[place % 2]} right" for place in range(len(lending))],
            marker={"size": 11, "color": "#3b6fb6"},
            row=1,
            col=column,
        )
        figure.add_vline(x=1.0, line={"color": "#b8c2cc", "dash": "dot"}, row=1, col=column)
        for most in whole:
            figure.add_hline(y=most, line={"color": "#c9506b", "dash": "dash"}, row=1, col=column)
        figure.update_xaxes(title_text=title, ticksuffix="x", type="log", row=1, col=column)
    figure.update_yaxes(title_text="guest tokens a second", rangemode="tozero", col=1)
    figure.update_layout(template="plotly_white", showlegend=False, width=1100, height=440, margin={"t": 30})
    file.write_text(figure.to_html(include_plotlyjs=True, config={"displayModeBar": False}), encoding="utf-8")


def _spread(summaries: Sequence[Summary], over: float) -> dict[str, Any]:
    """Return the distances from the median to the highest and the lowest window, as a share of `over`."""
    return {
        "array": [(each.high - each.median) / over for each in summaries],
        "arrayminus": [(each.median - each.low) / over for each in summaries],
        "thickness": 1,
        "color": "#b8c2cc",
    }
