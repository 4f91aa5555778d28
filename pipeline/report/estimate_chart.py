"""The chart of an estimate: how busy a fleet was, and what it would have lent."""

from collections.abc import Sequence
from datetime import datetime

import plotly.graph_objects as go

from rose.pipeline.report.charts import BLUE, ROSE, styled_figure


def shares_chart(points: Sequence[tuple[datetime, float, float]]) -> go.Figure | None:
    """Return the chart of points with time, recorded busy share and lent share; None without points."""
    if not points:
        return None
    figure = styled_figure(height=340)
    times = [point[0] for point in points]
    for place, name, colour in ((1, "users (recorded)", BLUE), (2, "lent (simulated)", ROSE)):
        figure.add_scatter(
            x=times,
            y=[point[place] for point in points],
            stackgroup="shares",
            mode="lines",
            line={"width": 0.5, "color": colour},
            name=name,
            hovertemplate="%{y:.1%}<extra>" + name + "</extra>",
        )
    figure.update_yaxes(tickformat=".0%", rangemode="tozero", title_text="share of the servers' time")
    return figure
