"""What lending gives and what it costs, over the dial: a picture of a run's sweep."""

from collections.abc import Mapping
from pathlib import Path

from plotly.subplots import make_subplots

from bench.coserving.results import Standing

PANELS = {
    "ttft_p99_ms": "TTFT p99 over serving alone",
    "tpot_p99_ms": "TPOT p99 over serving alone",
}


def draw(found: Mapping[str, Standing], file: Path) -> None:
    """Guest tokens a second against how far latencies were stretched, an arm a point; one HTML file."""
    lending = {name: each for name, each in found.items() if each.ratios and each.value("guest_tokens_per_second") > 0}
    figure = make_subplots(rows=1, cols=len(PANELS), shared_yaxes=True, horizontal_spacing=0.06)
    for column, (latency, title) in enumerate(PANELS.items(), start=1):
        figure.add_scatter(
            x=[each.ratios[latency].value for each in lending.values()],
            y=[each.value("guest_tokens_per_second") for each in lending.values()],
            text=list(lending),
            mode="markers+text",
            textposition="middle right",
            marker={"size": 11, "color": "#3b6fb6"},
            row=1,
            col=column,
        )
        figure.add_vline(x=1.0, line={"color": "#b8c2cc", "dash": "dot"}, row=1, col=column)
        figure.update_xaxes(title_text=title, ticksuffix="x", type="log", row=1, col=column)
    figure.update_yaxes(title_text="guest tokens a second", rangemode="tozero", col=1)
    figure.update_layout(template="plotly_white", showlegend=False, width=1100, height=440, margin={"t": 30})
    file.write_text(figure.to_html(include_plotlyjs=True))
