"""Writes the report of a run: `summary.json`, `report.html`, and the main figures on the terminal.

Keeps true
- `report.html` is one self-contained file, including plotly's script. The page loads nothing.
- Plotly and jinja2 are imported only when the page is made.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import time
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from rose.pipeline.accounting.cost import CostReport, cost_of
from rose.pipeline.accounting.prices import HOUR_SECONDS
from rose.pipeline.accounting.usage import UsageLedger
from rose.pipeline.audit import audit_log
from rose.pipeline.config.load import RESOLVED, Config, without_secrets
from rose.pipeline.report.history import RunHistory, read_history
from rose.pipeline.report.lending_statistics import (
    LatencyBudgets,
    LendingSecond,
    lending_sentence,
    seconds_of_lending,
    summarise_lending,
)
from rose.pipeline.report.length_bias import length_sentence
from rose.pipeline.report.page import number, percent, render_page
from rose.pipeline.report.summary import RunMetadata, Success, Summary, summarise
from rose.schemas.errors import UsageError
from rose.schemas.evaluations import EvaluationResult, Metric
from rose.topics.settings import BusSettings
from rose.workers.loadgen.requests import read_request_log
from rose.workers.trainer.metrics import read_step_log

SUMMARY, REPORT, MOMENTS = "summary.json", "report.html", "moments.jsonl"
"""Names of files in a run's folder."""


def write_report(config: Config, settings: BusSettings, facts: RunMetadata) -> Summary:
    """Compute the figures from the log and write the files of the report. Raises TopicMissing or BusError."""
    folder, usage = config.run_folder, UsageLedger()
    history, promise = read_history(settings, usage), config.settings.lender.promise
    steps = read_step_log(folder)
    served = read_request_log(config.run_folder)
    rows = seconds_of_lending(history, served, now=time())
    promised = LatencyBudgets(ttft=promise.ttft_seconds, tpot=promise.tpot_seconds)
    run = config.settings.run
    summary = summarise(
        history,
        audit_log(settings),
        facts,
        run=run.name,
        seed=run.seed,
        cost=cost_of(usage.usage(steps or None), config.settings.prices),
        lending=summarise_lending(history, served, rows, promised),
    )
    if rows:
        (folder / MOMENTS).write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    (folder / SUMMARY).write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    configuration = without_secrets((folder / RESOLVED).read_text(encoding="utf-8"))
    report = report_html(summary, history, configuration=configuration, steps=steps, rows=rows)
    (folder / REPORT).write_text(report, encoding="utf-8")
    return summary


def stored_metadata(folder: Path) -> RunMetadata:
    """Return the metadata from an earlier summary of the run. Raises UsageError if there is none."""
    try:
        return msgspec.json.decode((folder / SUMMARY).read_bytes(), type=RunMetadata)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{folder / SUMMARY} cannot be read, so nothing is known of that run: {error}") from None


def print_summary(console: Console, summary: Summary, folder: Path) -> None:
    """Print the most important figures and the path of the report."""
    terms = summary.trajectories
    cache, weights, bus = summary.prefix_cache, summary.weights, summary.bus_seconds
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    if summary.success.before is not None and summary.success.after is not None:
        solved = f"{summary.success.before:.3f} -> [bold]{summary.success.after:.3f}[/bold]"
        table.add_row("held-out success", f"{solved} on {summary.success.n} tasks at temperature 1")
    ends = ", ".join(
        f"{count} {name.replace('_', ' ')}" for name, count in terms.items() if name != "requested" and count
    )
    table.add_row(
        "trajectories", f"{terms['requested']} requested = {ends}; {summary.lost} lost, {summary.doubled} doubled"
    )
    if summary.lengths is not None:
        table.add_row("lengths", length_sentence(summary.lengths))
    table.add_row("turns", f"{summary.turns} applied, {summary.turns_per_second:.0f} a second")
    table.add_row("on the bus", f"{1000 * bus.p50:.1f} ms a turn (median), {1000 * bus.p99:.1f} ms (p99)")
    if cache.reusable_tokens:
        table.add_row("prefix cache", f"{cache.hit_tokens / cache.reusable_tokens:.1%} of the reusable tokens")
    table.add_row(
        "policy versions",
        f"{weights.versions}, {weights.bytes / 2**20:.1f} MiB; swap {1000 * weights.swap_seconds_p99:.1f} ms (p99)",
    )
    if summary.evaluations:
        table.add_row("evaluations", evaluations_sentence(summary.evaluations))
    if (lent := summary.lending) is not None:
        failed = f", [red]{lent.failed} failed[/red]" if lent.failed else ""
        kept = f"{lent.requests} requests of users{failed}, {lent.kept:.1%} within the promise"
        table.add_row("serving", f"{kept}; engine busy {lent.busy:.0%} of the time")
        table.add_row("lent", f"{lent.turns} turns, {lent.share:.0%} of the sampled tokens; {lent.cuts} cuts")
    table.add_row("cost", cost_sentence(summary.cost))
    table.add_row("took", f"{summary.seconds:.0f} s on {summary.broker}")
    table.add_row("report", str(folder / REPORT))
    console.print(table, highlight=False, soft_wrap=True)


class PageTexts(NamedTuple):
    """Sentences of the page that depend on what the page reports."""

    headline: str
    date: str
    users: str = "replayed from a trace of real users"
    """Where the requests of users come from."""


def report_html(
    summary: Summary,
    history: RunHistory,
    *,
    configuration: str,
    steps: Sequence[Mapping[str, Any]] = (),
    rows: Sequence[LendingSecond] = (),
    texts: PageTexts | None = None,
) -> str:
    """Return the report as HTML.

    `configuration` is the resolved TOML, `steps` are the lines of the trainer's `metrics.jsonl`, `rows` those of
    `moments.jsonl`. `texts` are by default those of a live run.
    """
    from rose.pipeline.report import charts, cost_charts, evaluation_chart

    if texts is None:
        started = datetime.fromtimestamp(summary.started_at, UTC)
        texts = PageTexts(headline(summary.success), started.strftime("%-d %B %Y, %H:%M UTC"))
    drawn = {
        "lending": charts.lending_chart(rows, summary.lending.promised) if summary.lending else None,
        "learning": charts.learning_curve(history, summary.success),
        "evaluations": evaluation_chart.evaluation_curves(summary.evaluations),
        "turns": charts.trajectory_turns(history),
        "occupancy": charts.occupancy(history),
        "timeline": charts.timeline(history),
        "latency": charts.latency(history),
        "cache": charts.prefix_cache(history),
        "steps": charts.step_seconds(steps),
        "cost_fates": cost_charts.cost_by_fate(summary.cost),
        "cost_steps": cost_charts.cost_per_correct(summary.cost),
    }
    return render_page(
        "report.html.j2",
        drawn,
        summary=summary,
        headline=texts.headline,
        law=conservation_sentence(summary),
        lengths=length_sentence(summary.lengths) if summary.lengths else None,
        lent=lending_sentence(summary.lending, users=texts.users) if summary.lending else None,
        evaluated=evaluations_sentence(summary.evaluations),
        priced=cost_sentence(summary.cost),
        uncounted=uncounted_sentence(summary.cost),
        configuration=configuration,
        date=texts.date,
    )


def headline(success: Success) -> str:
    """Return the held-out result of the run in one sentence."""
    match success:
        case Success(before=float(before), after=float(after)):
            return f"Held-out success went from {percent(before)} to {percent(after)} on {success.n} fixed tasks."
        case Success(after=float(after)):
            return f"Held-out success was {percent(after)} on {success.n} fixed tasks."
        case _:
            return "Held-out success was not measured."


def evaluations_sentence(results: Sequence[EvaluationResult]) -> str:
    """Return how many evaluations are complete, and the best one of each set, in sentences."""
    complete = [result for result in results if result.complete]
    sentences = [f"{len(complete)} of {len(results)} evaluations are complete."]
    newest = {(result.evaluation, result.set_digest): result for result in results}
    for result in newest.values():
        if result.best_score is not None:
            best = f"version {result.best_version} is the best ({_name_of(result)} {result.best_score:.4g})"
            sentences.append(f"{result.evaluation}: {best}.")
    return " ".join(sentences)


def _name_of(result: EvaluationResult) -> str:
    if result.metric is Metric.SUCCESS:
        return f"avg@{result.samples}"
    if result.metric is Metric.PASS and result.pass_at:
        return f"pass@{result.pass_at[-1].k}"
    return f"mean {result.metric.value}"


def conservation_sentence(summary: Summary) -> str:
    """Return the conservation law with its numbers in one sentence."""
    terms = summary.trajectories
    ends = ", ".join(
        f"{number(count)} {name.replace('_', ' ')}" for name, count in terms.items() if name != "requested" and count
    )
    verdict = "none was lost and none counted twice"
    if summary.lost or summary.doubled:
        verdict = f"{summary.lost} were lost and {summary.doubled} counted twice"
    return f"Of {number(terms['requested'])} requested trajectories, each has one end: {ends or 'none yet'}; {verdict}."


def cost_sentence(cost: CostReport) -> str:
    """Return what the run and a correct answer cost, in two sentences."""
    hours = f"{cost.device_seconds / HOUR_SECONDS:,.4g} device hours"
    whole = hours if cost.cost is None else f"{cost.cost:,.4g} {cost.currency} for {hours}"
    if cost.device_seconds_per_correct is None:
        return f"{whole}. No correct answer is known."
    seconds = f"{cost.device_seconds_per_correct:,.4g} device seconds"
    each = seconds if cost.cost_per_correct is None else f"{cost.cost_per_correct:,.4g} {cost.currency}"
    return f"{whole}. Correct answers: {cost.correct:,}, at {each} each."


def uncounted_sentence(cost: CostReport) -> str:
    """Return what the cost leaves out or assumes, in sentences; empty if there is nothing."""
    sentences = {
        f"Unknown: the time of {cost.unknown_attempts:,} attempts, whose executors were lost.": cost.unknown_attempts,
        f"Unknown: whether {cost.unjudged:,} of the answers are correct.": cost.unjudged,
        f"Assumed: one device for each of {cost.assumed_devices:,} executors without a heartbeat on the log.": (
            cost.assumed_devices
        ),
        "Unknown: the time of the trainer, which has no step log in this run's folder.": not cost.trainer_known,
    }
    return " ".join(sentence for sentence, holds in sentences.items() if holds)
