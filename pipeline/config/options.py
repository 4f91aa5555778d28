"""The options that all commands share, declared once.

Keeps true: importing this module imports typer and little else.
"""

import ast
import inspect
import os
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

Function = TypeVar("Function", bound=Callable[..., Any])

PANEL = "Configuration and broker"
"""Heading of the common options in the help of a command."""

_option = partial(typer.Option, rich_help_panel=PANEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """The values of the common options. `overrides` are further values: (flag, `section.field`, value)."""

    config: Annotated[Path | None, _option("--config", metavar="FILE", help="Configuration file, TOML.")] = None
    run: Annotated[
        str | None, _option("--run", metavar="NAME", help="Use the configuration and the broker of this run.")
    ] = None
    settings: Annotated[
        list[str] | None,
        _option("--set", metavar="SECTION.KEY=VALUE", help="One setting; see `rose config`. Repeatable."),
    ] = None
    bootstrap_server: Annotated[
        str | None, _option("--bootstrap-server", metavar="HOST:PORT", help="Address of a running Kafka.")
    ] = None
    command_config: Annotated[
        Path | None, _option("--command-config", metavar="FILE", help="librdkafka settings, key=value lines.")
    ] = None
    properties: Annotated[
        list[str] | None, _option("-X", metavar="KEY=VALUE", help="One librdkafka setting. Repeatable.")
    ] = None
    namespace: Annotated[
        str | None,
        _option("--namespace", metavar="PREFIX", help="Prefix of every topic, group and id."),
    ] = None
    overrides: tuple[tuple[str, str, object], ...] = ()

    def with_overrides(self, **flags: tuple[str, object]) -> "Common":
        """Return a copy with a command's own flags, e.g. `with_overrides(seed=("run.seed", 3))`; None is left out."""
        more = tuple(
            (f"--{flag.replace('_', '-')}", path, str(value))
            for flag, (path, value) in flags.items()
            if value is not None
        )
        return replace(self, overrides=self.overrides + more)


def keep_docstring(function: Function) -> Function:
    """Set the function's docstring even if Python removes docstrings (-OO): the docstring is the text of `--help`."""
    if function.__doc__ is None:
        declared = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        assert isinstance(declared, ast.FunctionDef)
        function.__doc__ = ast.get_docstring(declared)
    return function


def with_common(command: Callable[..., None]) -> Callable[..., None]:
    """Give a typer command the options of `Common`; the command receives them as its parameter `common`."""
    hints = get_type_hints(Common, include_extras=True)
    options = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hints[field.name])
        for field in fields(Common)
        if field.name != "overrides"
    ]
    own = [parameter for parameter in inspect.signature(command).parameters.values() if parameter.name != "common"]

    @wraps(keep_docstring(command))
    def called(**given: Any) -> None:
        common = Common(**{option.name: given.pop(option.name) for option in options})
        command(**given, common=common)

    described: Any = called
    described.__signature__ = inspect.Signature(
        [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own] + options
    )
    described.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *options]}
    return called


def is_writable(file: Path) -> bool:
    """Return whether an option may name this file for output. Checked before the content is computed."""
    try:
        file = file.resolve()  # the folder of a link does not matter
        place = file if file.exists() else file.parent
        return file.parent.is_dir() and not file.is_dir() and os.access(place, os.W_OK)
    except (OSError, RuntimeError):  # an impossible name; a loop of links
        return False
