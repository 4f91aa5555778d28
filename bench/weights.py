"""Measures the savings and the cost of the weight transfer, on real updates of SmolLM2-135M if nothing else is said.

    python -m bench.weights --only sizes     bytes of real updates, compared with entropy and other codecs (minutes)
    python -m bench.weights --only speeds    encoding and applying the update that `sizes` kept, on one core and on all
    python -m bench.weights --only link      seconds to the last of four receivers over slow links (root; minutes)
    python -m bench.weights --only pause     how long vLLM pauses for a new version
    python -m bench.weights --only in_place  bytes written between two steps by a version in place (a random policy)

Without `--only` all sections run, in this order. `--json FILE` writes one object with `checks` and the tables; `-` is
standard output. The benchmark needs the packages of the extra `bench`; the model is fetched once (bench.weight_deltas).
"""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.check import Section, keep, options
from bench.weight_deltas import FOLDER, fetch
from bench.weight_in_place import in_place
from bench.weight_link import link
from bench.weight_pause import pause
from bench.weight_sizes import sizes
from bench.weight_speeds import speeds
from rose.schemas.errors import RoseError

SECTIONS: Mapping[str, Callable[[Path], Section]] = {
    "sizes": sizes,
    "speeds": speeds,
    "link": link,
    "pause": pause,
    "in_place": in_place,
}
"""Sections by name. Each gets the folder of the model and the update, and can run alone."""

MODEL_FREE = {"in_place"}
"""Sections that do without the folder."""


def table(section: Section) -> Table:
    """Return the rows of a section as a table for the terminal."""
    shown = Table(*section.rows[0], title=section.name)
    for row in section.rows:
        shown.add_row(*(value if isinstance(value, str) else f"{value:,g}" for value in row.values()))
    return shown


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", choices=SECTIONS, action="append", help="run this section; repeatable")
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"folder of model and update; {FOLDER} by default")
    arguments = parser.parse_args()
    names = arguments.only or list(SECTIONS)
    try:
        if not MODEL_FREE.issuperset(names):
            fetch(arguments.folder)
        found = [SECTIONS[name](arguments.folder) for name in names]
    except RoseError as error:
        sys.exit(str(error))
    result = {
        "cores": os.cpu_count(),
        "checks": [check for section in found for check in section.checks],
        "tables": {section.name: section.rows for section in found},
    }
    if keep(result, arguments.json):
        return
    for section in found:
        Console().print(table(section))
        for check in section.checks:
            print(check)


if __name__ == "__main__":
    main()
