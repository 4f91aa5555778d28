"""The results of simulations on a terminal: the arms of a scenario side by side, and the checks."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from rose.pipeline.simulation.results import ROSE, ArmFigures, Check, ScenarioResult
from rose.pipeline.terminal import escape_control_chars

NONE = "-"


def print_result(console: Console, result: ScenarioResult) -> None:
    """Print the arms of a scenario."""
    about = f": {result.about}" if result.about else ""
    console.print()
    _print(console, f"{result.name}, seed {result.seed}{about}")
    console.print(_rollouts(result), highlight=False, markup=False)
    if any(figures.users is not None for figures in result.arms.values()):
        console.print(_users(result), highlight=False, markup=False)


def print_checks(console: Console, found: Sequence[Check]) -> None:
    """Print the checks, one a line."""
    for check in found:
        relation = "at least" if check.direction == "min" else "at most"
        verdict = "met" if check.met else "MISSED"
        bound = f"{relation} {check.bound:g}: {verdict}"
        details = ", ".join(f"{name} {value:.2f}" for name, value in check.details.items())
        _print(console, f"{check.name:8} {check.value:8.3f} {check.unit} ({bound}), against {check.against}; {details}")


def _rollouts(result: ScenarioResult) -> Table:
    """Return the table of training steps and turns; `x` columns are `rose` over the arm."""
    names = ("arm", "step s", "rollout s", "trained/h", "x throughput", "x rollout", "x paper")
    table = _table(*names, "wait p50 s", "wait p99 s", "reused", "lent GPU h", "an answer")
    for arm, figures in result.arms.items():
        over = result.over.get(arm)
        paper = None if over is None else over.paper
        at_rollout = over is not None and over.paper_figure == "rollout"
        table.add_row(
            escape_control_chars(arm),
            f"{figures.step_seconds:,.1f}",
            f"{figures.rollout_seconds:,.1f}",
            f"{figures.trajectories_per_hour:,.0f}",
            _ratio(None if over is None else over.throughput),
            _ratio(None if over is None else over.rollout),
            _ratio(paper) + (" (rollout)" if paper is not None and at_rollout else ""),
            f"{figures.wait_p50:.2f}",
            f"{figures.wait_p99:.2f}",
            f"{figures.reused_share:.1%}",
            f"{figures.lent_gpu_hours:,.2f}",
            _answer_cost(figures),
        )
    return table


def _answer_cost(figures: ArmFigures) -> str:
    """Return what a correct answer costs: in the currency of the prices, or in GPU time without prices."""
    if figures.cost_per_answer is not None:
        return f"{figures.cost_per_answer:,.4f} {figures.currency}"
    hours = figures.gpu_hours_per_answer
    return "-" if hours is None else f"{60 * hours:,.2f} GPU min"


def _users(result: ScenarioResult) -> Table:
    """Return the table of serving; `x` columns are relative to serving alone, for the paper's ROSE in row `rose`."""
    names = ("arm", "requests", "kept", "TTFT p50 ms", "p99 ms", "x alone", "x paper")
    table = _table(*names, "TPOT p50 ms", "p99 ms", "x alone", "x paper", "cuts")
    for arm, figures in result.arms.items():
        if figures.users is not None:
            table.add_row(escape_control_chars(arm), *_user_columns(result, arm, figures))
    return table


def _user_columns(result: ScenarioResult, arm: str, figures: ArmFigures) -> list[str]:
    users, paper = figures.users, result.paper if arm == ROSE else {}
    if users is None:
        return []
    return [
        f"{users.requests:,}",
        f"{users.kept:.2%}",
        f"{1000 * users.ttft_p50:.1f}",
        f"{1000 * users.ttft_p99:.1f}",
        _ratio(figures.ttft_of_alone),
        _ratio(paper.get("ttft_p99")),
        f"{1000 * users.tpot_p50:.1f}",
        f"{1000 * users.tpot_p99:.1f}",
        _ratio(figures.tpot_of_alone),
        _ratio(paper.get("tpot_p99")),
        f"{figures.cuts:,}",
    ]


def _table(first: str, *names: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(first)
    for name in names:
        table.add_column(name, justify="right")
    return table


def _print(console: Console, line: str) -> None:
    console.print(escape_control_chars(line), highlight=False, markup=False, soft_wrap=True)


def _ratio(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"
