"""A group's attempts on a terminal: columns side by side, as many as the width allows, and as one offline page."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rose.pipeline.report.page import render_page
from rose.pipeline.samples.attempts import Attempt, AttemptTurn, GroupView, Passage
from rose.pipeline.terminal import escape_control_chars

COLUMN_CHARACTERS = 40
"""Least width of an attempt's column."""

LABEL_CHARACTERS = 10
"""Width of the column with the names of the rows."""


def print_group(view: GroupView, console: Console) -> None:
    """Print the attempts, in tables of as many as fit beside each other."""
    console.print(_text(f"{view.group_id}: {view.task}"))
    beside = max(1, (console.width - LABEL_CHARACTERS) // COLUMN_CHARACTERS)
    for first in range(0, len(view.attempts), beside):
        console.print()
        console.print(_table(view.attempts[first : first + beside]))
    if view.missing:
        console.print(_text(f"\nwithout a sample on the log: {', '.join(view.missing)}"))


def _table(attempts: tuple[Attempt, ...]) -> Table:
    table = Table(box=None, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("", style="dim", width=LABEL_CHARACTERS, no_wrap=True)
    for attempt in attempts:
        table.add_column(_text(attempt.trajectory_id), ratio=1, overflow="fold")
    for row, (name, _) in enumerate(attempts[0].facts):
        table.add_row(name, *(_text(attempt.facts[row][1]) for attempt in attempts))
    for number in range(max(len(attempt.turns) for attempt in attempts)):
        turns = [attempt.turns[number] if number < len(attempt.turns) else None for attempt in attempts]
        table.add_section()
        for name, cells in _turn_rows(number, turns):
            table.add_row(name, *cells)
    if any(attempt.rest.tokens for attempt in attempts):
        table.add_row("then reads", *(_shown(attempt.rest) for attempt in attempts))
    return table


def _turn_rows(number: int, turns: list[AttemptTurn | None]) -> Iterator[tuple[str, list[Text]]]:
    """Yield the rows of one turn: name, and a cell for each attempt, empty for one that had fewer turns."""
    yield "", [Text() for _ in turns]
    yield f"turn {number}", [_text("" if turn is None else turn.place) for turn in turns]
    yield "took", [_text("" if turn is None else turn.duration) for turn in turns]
    yield "serving", [_text("" if turn is None else turn.serving) for turn in turns]
    yield "reads", [Text() if turn is None else _shown(turn.observation) for turn in turns]
    yield "writes", [Text() if turn is None else _shown(turn.action, style="bold") for turn in turns]


def _shown(passage: Passage, style: str = "") -> Text:
    return _text(passage.shown, style)


def _text(content: str, style: str = "") -> Text:
    return Text(escape_control_chars(content), style=style)


def group_page(view: GroupView) -> str:
    """Return the attempts as one HTML page that loads nothing."""
    return render_page("group.html.j2", {}, group=view)
