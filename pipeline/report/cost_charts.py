"""Charts of the cost of a run: by what the work became, and of one correct answer in each step.

Keeps true
- The charts show the cost if there are prices, otherwise the device time; the bars have all of it.
- A step without a correct answer has no mark: its cost for each correct answer is not a number.
"""

from itertools import accumulate

import plotly.graph_objects as go

from rose.pipeline.accounting.cost import CostLine, CostReport, Fate, StepCost
from rose.pipeline.accounting.prices import HOUR_SECONDS, DeviceClass
from rose.pipeline.report.charts import AMBER, BLUE, GREY, INK, ROSE, TEAL, styled_figure

CLASSES = (
    (DeviceClass.DEDICATED, "dedicated", BLUE),
    (DeviceClass.BORROWED, "borrowed", ROSE),
    (DeviceClass.TRAINER, "trainer", AMBER),
)

FATES = {
    Fate.CORRECT: "trained, correct",
    Fate.TRAINED: "trained, not correct",
    Fate.FILTERED: "filtered",
    Fate.STALE: "stale",
    Fate.SUPERSEDED: "superseded",
    Fate.SURPLUS: "surplus",
    Fate.INFRA_FAILED: "infrastructure failed",
    Fate.EVALUATED: "evaluated",
    Fate.IN_FLIGHT: "in flight",
    Fate.LOST: "lost attempts",
    Fate.IDLE: "idle",
    Fate.TRAINING: "trainer trains",
    Fate.WAITING: "trainer waits",
}
"""Names of the fates, in the order of the chart."""


def cost_by_fate(cost: CostReport) -> go.Figure | None:
    """Return the bars of what the work became, by class of device; None if nothing was used."""
    if not cost.device_seconds:
        return None
    unit = cost.currency or "device hours"
    fates = [fate for fate in FATES if any(line.fate == fate.value for line in cost.lines)][::-1]
    figure = styled_figure(height=90 + 30 * len(fates))
    for device_class, name, colour in CLASSES:
        own = [line for line in cost.lines if line.device_class == device_class.value]
        if not own:
            continue
        figure.add_bar(
            y=[FATES[fate] for fate in fates],
            x=[sum(_amount(line) for line in own if line.fate == fate.value) for fate in fates],
            orientation="h",
            name=name,
            marker={"color": colour},
            hovertemplate="%{y}: %{x:.4g} " + unit + f"<extra>{name}</extra>",
        )
    figure.update_layout(barmode="stack", bargap=0.25, margin={"l": 150})
    figure.update_xaxes(title_text=unit)
    return figure


def cost_per_correct(cost: CostReport) -> go.Figure | None:
    """Return the cost of a correct answer by step, of the step alone and of all steps so far; None without one."""
    steps = [step for step in cost.steps if step.step is not None]
    if not any(step.correct for step in steps):
        return None
    amounts, correct = [_amount(step) for step in steps], [step.correct for step in steps]
    so_far = zip(accumulate(amounts), accumulate(correct), strict=True)
    scale, unit = (1.0, cost.currency) if cost.currency else (HOUR_SECONDS, "device seconds")
    figure = styled_figure(height=320)
    for name, values, line in (
        ("of the step", list(zip(amounts, correct, strict=True)), {"color": GREY, "width": 1.5}),
        ("of all steps so far", list(so_far), {"color": TEAL, "width": 2.5}),
    ):
        figure.add_scatter(
            x=[step.step for step in steps],
            y=[scale * amount / answers if answers else None for amount, answers in values],
            customdata=[answers for _, answers in values],
            mode="lines+markers",
            line=line,
            marker={"size": 5},
            name=name,
            hovertemplate="step %{x}: %{y:.4g} " + unit + " for each of %{customdata} correct answers<extra></extra>",
        )
    figure.update_yaxes(title_text=f"{unit} for each correct answer", rangemode="tozero", title_font_color=INK)
    figure.update_xaxes(title_text="optimizer step", tickformat="d", dtick=max(1, round(len(steps) / 12)))
    return figure


def _amount(part: CostLine | StepCost) -> float:
    """Return the cost, or the device hours without prices."""
    return part.device_seconds / HOUR_SECONDS if part.cost is None else part.cost
