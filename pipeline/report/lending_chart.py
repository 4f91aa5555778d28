"""Chart of lending: requests of serving's users and their latencies against the budgets, and the lent work.

Keeps true: the chart uses the rows of `moments.jsonl` only; nothing is smoothed and no outlier is cut off.
"""

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from rose.pipeline.report.charts import AMBER, BLUE, INK, MUTED, ROSE, TEAL, styled
from rose.pipeline.report.lending import LatencyBudgets, LendingSecond

HEIGHTS = (0.15, 0.25, 0.25, 0.35)
"""Relative heights of the panels."""

CAPTIONS = (
    ("What serving’s users got", "tokens a second", BLUE),
    ("How long they waited for a first token", "ms: median and slowest of each second", TEAL),
    ("How long for each further token", "ms", TEAL),
    ("What rollouts got from the same engine meanwhile", "tokens a second", ROSE),
)
"""Caption, unit and colour of each panel."""

WAIT, LATE = "#9dc9c1", AMBER
"""Colours of a second's slowest request: within its budget, and above it."""

HEADROOM = 1.18
"""Upper end of a latency axis, relative to the highest value."""


def lending_chart(rows: Sequence[LendingSecond], promised: LatencyBudgets) -> go.Figure | None:
    """Return the chart, four panels over one time axis; None without rows."""
    if not rows:
        return None
    seconds = [row.at - rows[0].at for row in rows]
    figure = make_subplots(rows=4, cols=1, shared_xaxes=True, row_heights=HEIGHTS, vertical_spacing=0.085)
    styled(figure, height=720)
    figure.add_trace(_area(seconds, [row.served_tokens for row in rows], BLUE, "%{y:.0f} tokens to users"), 1, 1)
    _latency(figure, 2, seconds, [(row.ttft, row.ttft_most) for row in rows], promised.ttft)
    _latency(figure, 3, seconds, [(row.tpot, row.tpot_most) for row in rows], promised.tpot)
    figure.add_trace(_area(seconds, [row.lent_tokens for row in rows], ROSE, "%{y:.0f} tokens lent"), 4, 1)
    _marks(figure, rows, seconds)
    for number, (caption, unit, colour) in enumerate(CAPTIONS, 1):
        figure.add_annotation(
            text=f"<b>{caption}</b>  <span style='color:{MUTED}'>{unit}</span>",
            font={"size": 13, "color": colour},
            x=0,
            y=1,
            xref="x domain" if number == 1 else f"x{number} domain",
            yref="y domain" if number == 1 else f"y{number} domain",
            xanchor="left",
            yanchor="bottom",
            yshift=3,
            showarrow=False,
        )
        figure.update_yaxes(rangemode="tozero", nticks=4, row=number, col=1)
    figure.update_xaxes(range=[0, seconds[-1] + 1])
    figure.update_xaxes(title_text="seconds", row=4, col=1)
    figure.update_layout(showlegend=False, hovermode="x unified", bargap=0, margin={"l": 56, "r": 20, "t": 34, "b": 48})
    return figure


def _area(seconds: Sequence[int], values: Sequence[float], colour: str, label: str) -> go.Bar:
    return go.Bar(
        x=seconds,
        y=values,
        width=1,
        offset=0,
        marker={"color": colour, "line": {"width": 0}},
        hovertemplate=label + "<extra></extra>",
    )


def _latency(
    figure: go.Figure,
    number: int,
    seconds: Sequence[int],
    waits: Sequence[tuple[float | None, float | None]],
    budget: float,
) -> None:
    """Draw a bar from the median to the slowest request of each second, with the budget as a line; times in seconds."""
    there = [
        (at, 1000 * median, 1000 * most)
        for at, (median, most) in zip(seconds, waits, strict=True)
        if median is not None and most is not None
    ]
    moments, medians, slowest = ([each[part] for each in there] for part in range(3))
    figure.add_bar(
        x=moments,
        base=medians,
        y=[most - median for _, median, most in there],
        marker={"color": [LATE if most > 1000 * budget else WAIT for most in slowest], "line": {"width": 0}},
        width=0.9,
        offset=0,
        customdata=slowest,
        hovertemplate="slowest %{customdata:.1f} ms<extra></extra>",
        row=number,
        col=1,
    )
    figure.add_scatter(
        x=[at + 0.45 for at in moments],
        y=medians,
        mode="markers",
        marker={"size": 3, "color": TEAL},
        hovertemplate="median %{y:.1f} ms<extra></extra>",
        row=number,
        col=1,
    )
    figure.add_hline(y=1000 * budget, line={"color": INK, "width": 1.3, "dash": "dash"}, row=number, col=1)
    figure.add_annotation(
        text=f"<b>promised: {1000 * budget:g} ms</b>",
        font={"size": 12, "color": INK},
        x=1,
        xref=f"x{number} domain",
        xanchor="right",
        y=1000 * budget,
        yref=f"y{number}",
        yanchor="bottom",
        yshift=1,
        bgcolor="rgba(255,255,255,0.85)",
        showarrow=False,
    )
    figure.update_yaxes(range=[0, HEADROOM * max([1000 * budget, *slowest])], row=number, col=1)


def _marks(figure: go.Figure, rows: Sequence[LendingSecond], seconds: Sequence[int]) -> None:
    """Draw freezes as bands, and cuts as triangles above the lent tokens."""
    for begin, end in _runs([at for at, row in zip(seconds, rows, strict=True) if row.frozen]):
        figure.add_vrect(x0=begin, x1=end + 1, fillcolor=INK, opacity=0.12, line_width=0, row=4, col=1)
    cut = [(at, row) for at, row in zip(seconds, rows, strict=True) if row.cuts]
    if cut:
        top = max(row.lent_tokens for row in rows)
        figure.add_trace(
            go.Scatter(
                x=[at for at, _ in cut],
                y=[top] * len(cut),
                mode="markers",
                marker={"symbol": "triangle-down", "size": 9, "color": INK},
                customdata=[row.cuts for _, row in cut],
                hovertemplate="cut %{customdata} times<extra></extra>",
            ),
            4,
            1,
        )


def _runs(seconds: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and last second of each unbroken run of seconds."""
    runs: list[tuple[int, int]] = []
    for second in seconds:
        if runs and runs[-1][1] == second - 1:
            runs[-1] = runs[-1][0], second
        else:
            runs.append((second, second))
    return runs
