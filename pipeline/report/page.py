"""The report: one self-contained HTML file, including plotly's script. The page loads nothing."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from plotly.io import to_html
from plotly.offline import get_plotlyjs

from rose.pipeline.report import charts
from rose.pipeline.report.history import RunHistory
from rose.pipeline.report.lending_statistics import LendingSecond, lending_sentence
from rose.pipeline.report.summary import Success, Summary


def report_html(
    summary: Summary,
    history: RunHistory,
    *,
    configuration: str,
    steps: Sequence[Mapping[str, Any]] = (),
    rows: Sequence[LendingSecond] = (),
) -> str:
    """Return the report as HTML.

    `configuration` is the resolved TOML, `steps` are the lines of the trainer's `metrics.jsonl`, `rows` those of
    `moments.jsonl`.
    """
    drawn = {
        "lending": charts.lending_chart(rows, summary.lending.promised) if summary.lending else None,
        "learning": charts.learning_curve(history, summary.success),
        "turns": charts.trajectory_turns(history),
        "occupancy": charts.occupancy(history),
        "timeline": charts.timeline(history),
        "latency": charts.latency(history),
        "cache": charts.prefix_cache(history),
        "steps": charts.step_seconds(steps),
    }
    pictures = {
        name: to_html(
            figure,
            full_html=False,
            include_plotlyjs=False,
            div_id=name,
            config={"displayModeBar": False, "responsive": True},
        )
        for name, figure in drawn.items()
        if figure is not None
    }
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page.filters.update(number=_number, duration=_duration, milliseconds=_milliseconds, size=_size, percent=_percent)
    template = page.from_string((files("rose.pipeline.report") / "report.html.j2").read_text(encoding="utf-8"))
    return template.render(
        summary=summary,
        headline=headline(summary.success),
        law=conservation_sentence(summary),
        lent=lending_sentence(summary.lending) if summary.lending else None,
        pictures=pictures,
        configuration=configuration,
        plotly=get_plotlyjs(),
        date=datetime.fromtimestamp(summary.started_at, UTC).strftime("%-d %B %Y, %H:%M UTC"),
    )


def headline(success: Success) -> str:
    """Return the held-out result of the run in one sentence."""
    match success:
        case Success(before=float(before), after=float(after)):
            return f"Held-out success went from {_percent(before)} to {_percent(after)} on {success.n} fixed tasks."
        case Success(after=float(after)):
            return f"Held-out success was {_percent(after)} on {success.n} fixed tasks."
        case _:
            return "Held-out success was not measured."


def conservation_sentence(summary: Summary) -> str:
    """Return the conservation law with its numbers in one sentence."""
    terms = summary.trajectories
    ends = ", ".join(
        f"{_number(count)} {name.replace('_', ' ')}" for name, count in terms.items() if name != "requested" and count
    )
    verdict = "none was lost and none counted twice"
    if summary.lost or summary.doubled:
        verdict = f"{summary.lost} were lost and {summary.doubled} counted twice"
    return (
        f"Of {_number(terms['requested'])} requested trajectories, each has one end: {ends or 'none yet'}; {verdict}."
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:,.1f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _milliseconds(seconds: float) -> str:
    milliseconds = 1000 * seconds
    if milliseconds >= 1000:
        return f"{seconds:.2f} s"
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"


def _size(value: int) -> str:
    return f"{value / 2**20:,.1f} MiB" if value < 2**30 else f"{value / 2**30:,.2f} GiB"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
