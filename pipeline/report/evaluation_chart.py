"""The chart of evaluations: avg@k and pass@k of the policy versions that were evaluated during training.

Keeps true: a version whose evaluation is incomplete has no mark; without any complete one there is no chart.
"""

from collections.abc import Sequence

import plotly.graph_objects as go

from rose.pipeline.report.charts import AMBER, BLUE, GREY, ROSE, TEAL, styled_figure
from rose.schemas.evaluations import EvaluationResult

PASS_COLOURS = (TEAL, AMBER, GREY)
"""Colours of pass@k for each further k, in rotation."""


def evaluation_curves(results: Sequence[EvaluationResult]) -> go.Figure | None:
    """Scores by policy version, one line for each score of each set, with the best version marked."""
    complete = [result for result in results if result.complete]
    if not complete:
        return None
    figure = styled_figure(height=340)
    names = list(dict.fromkeys(result.evaluation for result in complete))
    shares = False
    for name in names:
        own = [result for result in complete if result.evaluation == name]
        label = f"{name}, " if len(names) > 1 else ""
        judged = [result for result in own if result.success is not None]
        if not judged:
            _add_line(figure, f"{label}mean reward", [(result.version, result.reward) for result in own], BLUE)
            continue
        shares = True
        _add_line(
            figure,
            f"{label}avg@{judged[-1].samples}",
            [(result.version, result.success) for result in judged],
            BLUE,
        )
        ks = sorted({each.k for result in judged for each in result.pass_at if each.k > 1})
        for number, k in enumerate(ks):
            points = [(result.version, each.value) for result in judged for each in result.pass_at if each.k == k]
            _add_line(figure, f"{label}pass@{k}", points, PASS_COLOURS[number % len(PASS_COLOURS)])
        _mark_best(figure, judged)
    if shares:
        figure.update_yaxes(tickformat=".0%", range=[0, 1.02], title_text="solved")
    else:
        figure.update_yaxes(title_text="mean reward")
    figure.update_xaxes(title_text="policy version", tickformat="d")
    return figure


def _add_line(figure: go.Figure, name: str, points: Sequence[tuple[int, float | None]], colour: str) -> None:
    figure.add_scatter(
        x=[version for version, _ in points],
        y=[value for _, value in points],
        mode="lines+markers",
        line={"color": colour, "width": 2.5},
        marker={"size": 6},
        name=name,
        hovertemplate="version %{x}: %{y:.4g}<extra>" + name + "</extra>",
    )


def _mark_best(figure: go.Figure, results: Sequence[EvaluationResult]) -> None:
    best = next((result for result in results if result.version == results[-1].best_version), None)
    if best is not None:
        figure.add_scatter(
            x=[best.version],
            y=[best.success],
            mode="markers",
            marker={"size": 13, "color": ROSE, "symbol": "diamond", "line": {"color": "white", "width": 2}},
            name=f"best by {best.metric.value}",
            hovertemplate="best version %{x}<extra></extra>",
        )
