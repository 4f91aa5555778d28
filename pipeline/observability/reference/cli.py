"""The reference of the command line, from the parser of `rose`."""

from collections.abc import Iterator
from typing import Any

import typer

from rose.pipeline.cli.main import app
from rose.pipeline.config.options import PANEL
from rose.pipeline.observability.reference.pages import Page, code, page, table

INTRODUCTION = f"""The command `rose` runs every role, and looks at runs. `rose COMMAND --help` prints the same
texts. The exit status is 0 for success, 1 for a failure or a finding, 2 for a usage error.

All commands except `keys`, `health` and `topics prompt-schema` take the options of the section
[{PANEL}](#{{anchor}})."""


def as_markdown() -> str:
    """Return the page of the command line."""
    root = typer.main.get_command(app)
    commands = list(_commands("rose", root))
    panels = dict.fromkeys(panel for _, panel, _ in commands)
    sections = [_common(commands), _overview(commands)]
    for panel in panels:
        sections.append(f"## {panel}\n")
        sections += [_section(name, command) for name, each, command in commands if each == panel]
    return page(Page.CLI, INTRODUCTION.format(anchor=PANEL.lower().replace(" ", "-")), sections)


def _commands(name: str, group: Any, panel: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield name, panel and parser of every command below a group."""
    for own_name, command in group.commands.items():
        own_panel = panel or command.rich_help_panel
        if hasattr(command, "commands"):
            yield from _commands(f"{name} {own_name}", command, own_panel)
        else:
            yield f"{name} {own_name}", own_panel, command


def _common(commands: list[tuple[str, str, Any]]) -> str:
    shared = {each.name: each for _, _, command in commands for each in command.params if _is_common(each)}
    return f"## {PANEL}\n\n{_parameters(list(shared.values()))}"


def _overview(commands: list[tuple[str, str, Any]]) -> str:
    rows = [[f"[`{name}`](#{name.replace(' ', '-')})", command.help] for name, _, command in commands]
    return f"## Commands\n\n{table(('command', 'what it does'), rows)}"


def _section(name: str, command: Any) -> str:
    own = [each for each in command.params if not _is_common(each) and not each.hidden]
    usage = [
        _shown(each) if each.required else f"[{_shown(each)}]" for each in own if each.param_type_name == "argument"
    ]
    line = " ".join((name, "[OPTIONS]", *usage))
    return f"### {name}\n\n{command.help}\n\n    {line}\n" + (f"\n{_parameters(own)}" if own else "")


def _is_common(parameter: Any) -> bool:
    return getattr(parameter, "rich_help_panel", None) == PANEL


def _parameters(parameters: list[Any]) -> str:
    rows = [[code(_shown(each)), _default(each), each.help or ""] for each in parameters]
    return table(("option or argument", "default", "meaning"), rows)


def _shown(parameter: Any) -> str:
    """How a parameter is written: names and placeholder."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    names = "/".join((*parameter.opts, *parameter.secondary_opts))
    return names if parameter.is_flag else f"{names} {parameter.metavar or 'VALUE'}"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if parameter.default in (None, False, ""):
        return ""
    if parameter.default is True:
        return code(parameter.opts[0])
    return code(str(parameter.default))
