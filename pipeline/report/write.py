"""Writes the report of a run: `summary.json`, `report.html`, and the main figures on the terminal."""

from pathlib import Path
from time import time

import msgspec
from rich.console import Console
from rich.table import Table

from rose.pipeline.audit import audit_log
from rose.pipeline.config.load import RESOLVED, Config, without_secrets
from rose.pipeline.report.history import read_history
from rose.pipeline.report.lending_statistics import LatencyBudgets, seconds_of_lending, summarise_lending
from rose.pipeline.report.summary import RunMetadata, Summary, summarise
from rose.schemas.errors import UsageError
from rose.topics.settings import BusSettings
from rose.workers.loadgen.requests import read_request_log
from rose.workers.trainer.step_log import read_step_log

SUMMARY, REPORT, MOMENTS = "summary.json", "report.html", "moments.jsonl"
"""Names of files in a run's folder."""


def write_report(config: Config, settings: BusSettings, facts: RunMetadata) -> Summary:
    """Compute the figures from the log and write the files of the report. Raises TopicMissing or BusError."""
    from rose.pipeline.report.page import report_html

    history, promise = read_history(settings), config.settings.lender.promise
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
        lending=summarise_lending(history, served, rows, promised),
    )
    folder = config.run_folder
    if rows:
        (folder / MOMENTS).write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    (folder / SUMMARY).write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    configuration = without_secrets((folder / RESOLVED).read_text(encoding="utf-8"))
    steps = read_step_log(folder)
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
    table.add_row("turns", f"{summary.turns} applied, {summary.turns_per_second:.0f} a second")
    table.add_row("on the bus", f"{1000 * bus.p50:.1f} ms a turn (median), {1000 * bus.p99:.1f} ms (p99)")
    if cache.reusable_tokens:
        table.add_row("prefix cache", f"{cache.hit_tokens / cache.reusable_tokens:.1%} of the reusable tokens")
    table.add_row(
        "policy versions",
        f"{weights.versions}, {weights.bytes / 2**20:.1f} MiB; swap {1000 * weights.swap_seconds_p99:.1f} ms (p99)",
    )
    if (lent := summary.lending) is not None:
        failed = f", [red]{lent.failed} failed[/red]" if lent.failed else ""
        kept = f"{lent.requests} requests of users{failed}, {lent.kept:.1%} within the promise"
        table.add_row("serving", f"{kept}; engine busy {lent.busy:.0%} of the time")
        table.add_row("lent", f"{lent.turns} turns, {lent.share:.0%} of the sampled tokens; {lent.cuts} cuts")
    table.add_row("took", f"{summary.seconds:.0f} s on {summary.broker}")
    table.add_row("report", str(folder / REPORT))
    console.print(table, highlight=False, soft_wrap=True)
