"""`rose estimate`: what the servers of recordings would have lent, on the terminal, as JSON and as a page."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from rose.pipeline.cli.simulate import TABLE_WIDTH, Outputs, watch
from rose.pipeline.simulation.estimate import Assumptions, Estimate, estimate
from rose.pipeline.simulation.estimate_page import (
    assumptions,
    basis,
    estimate_page,
    headline,
    tiles,
    users,
    verdict,
)


def estimate_fleet(recordings: Sequence[Path], assumed: Assumptions, outputs: Outputs) -> None:
    """Simulate the recorded servers, print what they would have lent, and write the files that were asked for.

    Raises UsageError or Stalled.
    """
    outputs.check()
    found = estimate(recordings, assumed, watch)
    console = Console()
    print_estimate(console if console.is_terminal else Console(width=TABLE_WIDTH), found)
    if outputs.json is not None:
        outputs.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    if outputs.report is not None:
        outputs.report.write_text(estimate_page(found), encoding="utf-8")


def print_estimate(console: Console, found: Estimate) -> None:
    """Print the texts of the page."""
    console.print(f"{headline(found)}\n{basis(found)}", highlight=False, markup=False)
    for rows in (tiles(found), [("", "alone", "lending"), *users(found)], assumptions(found)):
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for row in rows:
            table.add_row(*row)
        console.print()
        console.print(table, highlight=False, markup=False)
    console.print(f"\n{verdict(found)}", highlight=False, markup=False)
