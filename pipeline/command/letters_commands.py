"""`rose letters`: look at dead letters, and send them back.

Keeps true, as `main.py` does: a command imports what it needs when it runs.
"""

from pathlib import Path
from typing import Annotated

import typer

from pipeline.command.options import Common, with_common

letters = typer.Typer(help="Dead letters: list and show them, send mended ones back.", no_args_is_help=True)

Place = Annotated[str, typer.Argument(metavar="PLACE", help="TOPIC/PARTITION/OFFSET, as `rose letters list` has it.")]


@letters.command("list")
@with_common
def letters_list(
    common: Common,
    topic: Annotated[str | None, typer.Option("--topic", metavar="TOPIC", help="Of this topic alone.")] = None,
) -> None:
    """Every dead letter in a line: its place, when, why, its key."""
    from pipeline.command.letters import list_letters

    list_letters(common, topic)


@letters.command("show")
@with_common
def letters_show(common: Common, place: Place) -> None:
    """One dead letter whole: headers, and what it holds."""
    from pipeline.command.letters import show_letter

    show_letter(common, place)


@letters.command("retry")
@with_common
def letters_retry(
    common: Common,
    place: Place,
    edit: Annotated[
        Path | None, typer.Option("--edit", metavar="FILE", help="Send what is in this file instead.")
    ] = None,
    field: Annotated[
        list[str] | None, typer.Option("--field", metavar="FIELD=VALUE", help="Set a field of it. Repeatable.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Even if it was sent back before.")] = False,
) -> None:
    """Send a dead letter back to its topic, mended or as it came."""
    from pipeline.command.letters import retry_letter

    retry_letter(common, place, edit, field, again=again)
