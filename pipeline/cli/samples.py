"""`rose samples`: lists finished trajectories, shows the attempts of a group, and exports samples.

Keeps true: `rose --help` is fast: a command imports what it needs when it runs.
"""

from pathlib import Path
from typing import Annotated

import typer

from rose.pipeline.config.options import Common, with_common

samples = typer.Typer(help="List finished trajectories, compare those of a group, export them.", no_args_is_help=True)

Group = Annotated[str | None, typer.Option("--group", metavar="GROUP_ID", help="Only this group.")]
Outcomes = Annotated[
    list[str] | None,
    typer.Option("--outcome", metavar="NAME", help="Only this outcome, or `waiting` for none yet. Repeatable."),
]
Step = Annotated[int | None, typer.Option("--step", metavar="N", min=0, help="Only what this step settled.")]
Since = Annotated[
    str | None, typer.Option("--since", metavar="TIME", help="Only what ended from here on, e.g. 2026-01-31T12:00.")
]
Until = Annotated[str | None, typer.Option("--until", metavar="TIME", help="Only what ended up to here.")]
Limit = Annotated[int | None, typer.Option("--limit", metavar="N", min=1, help="At most this many lines.")]


@samples.command("list")
@with_common
def list_samples(
    common: Common,
    groups: Annotated[bool, typer.Option("--groups", help="One line a group instead of one a trajectory.")] = False,
    group: Group = None,
    outcome: Outcomes = None,
    step: Step = None,
    since: Since = None,
    until: Until = None,
    limit: Limit = None,
) -> None:
    """List finished trajectories, one a line: outcome, step, reward, versions, turns and tokens."""
    from rose.pipeline.cli.read_samples import filter_of, print_list

    print_list(common, filter_of(group, outcome, step, since, until), groups=groups, limit=limit)


@samples.command("show")
@with_common
def show_group(
    common: Common,
    group: Annotated[str, typer.Argument(metavar="GROUP_ID", help="Name of the group, as in `rose samples list`.")],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page that loads nothing instead.")
    ] = None,
) -> None:
    """Show the attempts of a group side by side: tokens by turn, advantage, reward, and where each turn ran."""
    from rose.pipeline.cli.read_samples import show_attempts

    show_attempts(common, group, html)


@samples.command("export")
@with_common
def export_samples(
    common: Common,
    target: Annotated[Path, typer.Argument(metavar="FILE", help="File to write; for `verl` a folder that is new.")],
    file_format: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="`jsonl`, `parquet`, `trl` or `verl`.")
    ] = "jsonl",
    group: Group = None,
    outcome: Outcomes = None,
    step: Step = None,
    since: Since = None,
    until: Until = None,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", min=1, help="At most this many rows.")] = None,
) -> None:
    """Write finished trajectories to a file: JSON lines, Parquet, or the rollout files of TRL and verl."""
    from rose.pipeline.cli.read_samples import export_to, filter_of

    export_to(common, target, file_format, filter_of(group, outcome, step, since, until), limit=limit)
