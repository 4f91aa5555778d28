"""Texts between a policy and its sandbox: what an action asks for, and what its observation says. Pure.

Keeps true: every text is an action; one without a block that can be run says so in its observation.

Example:
    ```bash
    ls | wc -l
    ```
"""

import re
from enum import Enum
from typing import NamedTuple

from rose.workers.environments.sandbox.process import CommandResult

BLOCK = re.compile(r"```(bash|sh|python|submit)\s(.*?)```", re.DOTALL)

MALFORMED = "Write one block that begins with ```bash, ```python or ```submit."

MAX_ACTION_CHARACTERS = 50_000
"""Longest block: it is an argument of a program."""


class Tool(Enum):
    """Program that runs a block."""

    SHELL = "shell"
    PYTHON = "python"
    SUBMIT = "submit"
    """The task ends."""


class Action(NamedTuple):
    """The first block of an action."""

    tool: Tool
    text: str


def parse_action(text: str) -> Action | str:
    """The action of a text, or why there is none."""
    found = BLOCK.search(text)
    if found is None:
        return MALFORMED
    if len(found[2]) > MAX_ACTION_CHARACTERS or "\0" in found[2]:
        return f"A block has at most {MAX_ACTION_CHARACTERS} characters, and no zero byte."
    tools = {"bash": Tool.SHELL, "sh": Tool.SHELL, "python": Tool.PYTHON, "submit": Tool.SUBMIT}
    return Action(tools[found[1]], found[2].encode(errors="replace").decode())


def observation_of(result: CommandResult, seconds: float) -> str:
    """The observation of a command. `seconds`: its time limit."""
    begin, cut, end = result.output.partition(b"\0")
    text = begin.decode(errors="replace")
    if cut and result.output_size > len(result.output):
        left_out = result.output_size - len(begin) - len(end)
        text += f"\n[{left_out} bytes left out]\n{end.decode(errors='replace')}"
    elif cut:
        text += "\N{REPLACEMENT CHARACTER}" + end.decode(errors="replace").replace("\0", "\N{REPLACEMENT CHARACTER}")
    lines = [text.rstrip("\n")] if text else []
    if result.ending == "time":
        lines.append(f"[ended after {seconds:g} s]")
    elif result.ending == "processes":
        lines.append("[ended: too many processes]")
    elif result.status:
        lines.append(f"[exit status {result.status}]")
    if result.processes:
        lines.append(f"[left running: {', '.join(result.processes)[:500]}]")
    return "\n".join(lines) or "[no output]"
