"""`rose environment`: runs an environment worker, or checks an environment of one's own.

Keeps true: `rose --help` is fast: a command imports what it needs when it runs.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from rose.pipeline.config.options import Common, keep_docstring, with_common
from rose.pipeline.terminal import print_line
from rose.schemas.errors import UsageError

MOST_NUMBER = 65_535
"""Largest number of a process of one kind."""

SEEDS = (0, 1, 2)
"""Tasks that are played where none is named."""

environment = typer.Typer(invoke_without_command=True)


@environment.callback()
@with_common
def run_worker(
    context: typer.Context,
    common: Common,
    number: Annotated[
        int,
        typer.Option("--number", metavar="N", min=0, max=MOST_NUMBER, help="Number of this environment worker."),
    ] = 0,
) -> None:
    """Run an environment worker, which opens groups, steps environments and requests turns."""
    if context.invoked_subcommand is None:
        from rose.pipeline.cli.roles import run_environment

        run_environment(common, number)


@environment.command("check")
@keep_docstring
def check(
    name: Annotated[str, typer.Argument(metavar="NAME", help="package.module:Class, or a built-in environment.")],
    arguments: Annotated[
        str, typer.Option("--arguments", metavar="JSON", help="Arguments of the tasks, as in a prompt.")
    ] = "{}",
    action: Annotated[
        list[str] | None,
        typer.Option("--action", metavar="TEXT", help="An action that the environment knows. Repeatable."),
    ] = None,
    seed: Annotated[
        list[int] | None,
        typer.Option("--seed", metavar="N", min=0, help="Seed of a task. Repeatable; default: 0, 1, 2."),
    ] = None,
    turns: Annotated[int, typer.Option("--turns", metavar="N", min=1, max=256, help="Most turns of a task.")] = 12,
    import_path: Annotated[
        list[Path] | None,
        typer.Option(
            "--import-path", metavar="FOLDER", help="Folder to import from. Repeatable; default: this folder."
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model", metavar="FOLDER", help="Tokenizer and chat template; default: one token a byte, ChatML."
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.1, max=86_400, help="Longest time of a call.")
    ] = 60.0,
) -> None:
    """Play an environment as a worker does, and name each rule that it breaks. Exit status 1 if there is any."""
    from tempfile import TemporaryDirectory

    from rose.workers.environments.byte_model import write_byte_model
    from rose.workers.environments.check import CheckPlan, check_environment

    given = _read_arguments(arguments)
    seeds = tuple(dict.fromkeys(seed or SEEDS))
    passed = True
    with _without_logs(), TemporaryDirectory(prefix="rose-check-") as folder:
        plan = CheckPlan(
            environment=name,
            model_folder=model or write_byte_model(Path(folder)),
            import_paths=tuple(import_path or [Path()]),
            seeds=seeds,
            arguments=given,
            actions=tuple(action or ()),
            turns=turns,
            timeout_seconds=timeout,
        )
        print_line(f"{name}: seeds {', '.join(map(str, seeds))}, up to {turns} turns each")
        for finding in check_environment(plan):
            passed &= finding.passed
            print_line(f"{'pass' if finding.passed else 'FAIL'}  {finding.check:<12} {finding.reason}")
    if not passed:
        raise typer.Exit(1)


def _read_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of `--arguments`. Raises UsageError."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--arguments is no JSON ({error}): write an object, such as '{{\"size\": 3}}'") from None
    if not isinstance(given, dict):
        raise UsageError("--arguments is no JSON object: write one, such as '{\"size\": 3}'")
    return given


@contextmanager
def _without_logs() -> Iterator[None]:
    """Print no log lines of this process: the findings say what its supervisor would log."""
    import structlog

    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)
