"""Parses a command line of `rose` without running the command."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

import typer

from rose.pipeline.cli.main import app
from rose.pipeline.config.load import Config, load
from rose.pipeline.config.options import Common


def parsed(arguments: Sequence[str]) -> tuple[str, dict[str, object]]:
    """Return the command and its arguments. Raises the error of the command line for unknown words."""
    command = typer.main.get_command(app)
    words, path = list(arguments), []
    context = command.make_context("rose", words, resilient_parsing=False)
    while hasattr(command, "resolve_command") and (rest := [*context._protected_args, *context.args]):
        name, found, words = command.resolve_command(context, rest)
        command = found
        path.append(str(name))
        context = command.make_context(str(name), words, parent=context)
    return " ".join(path), dict(context.params)


def configured(arguments: Sequence[str], environment: Mapping[str, str], toml: str, folder: Path) -> Config:
    """Return the configuration of the role of this command line. Raises UsageError."""
    _, given = parsed(arguments)
    common = {name: given.get(name) for name in ("config", "settings", "bootstrap_server", "namespace", "properties")}
    if common["config"] is not None:
        common["config"] = folder / "rose.toml"
        (folder / "rose.toml").write_text(toml)
    with patch.dict("os.environ", environment, clear=False):
        return load(Common(**common))  # type: ignore[arg-type]
