"""Paths of the generated pages, and the parts that all pages share."""

from collections.abc import Iterable, Sequence
from enum import Enum
from os.path import relpath
from pathlib import PurePosixPath

COMMAND = "python -m rose.pipeline.observability"
"""The command that writes all generated pages and dashboards."""

GENERATED = f"`{COMMAND}` writes this page. A test compares it with the code."


class Page(Enum):
    """The generated pages; the value is the path in a checkout."""

    METRICS = "docs/reference/metrics.md"
    CLI = "docs/reference/cli.md"
    CONFIGURATION = "docs/reference/configuration.md"
    TOPICS = "docs/reference/topics.md"
    LOG_EVENTS = "docs/reference/log-events.md"


TITLES = {
    Page.CLI: "Command line",
    Page.CONFIGURATION: "Configuration",
    Page.TOPICS: "Topics",
    Page.METRICS: "Metrics",
    Page.LOG_EVENTS: "Log events",
}


def page(which: Page, introduction: str, sections: Iterable[str]) -> str:
    """Return a page: title, introduction, sections, and links to the other generated pages."""
    folder = PurePosixPath(which.value).parent
    links = (f"[{title}]({relpath(other.value, folder)})" for other, title in TITLES.items() if other is not which)
    return "\n".join(
        (f"# {TITLES[which]}\n", f"{introduction}\n", f"{GENERATED}\n", *sections, f"**Next:** {' · '.join(links)}\n")
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; a bar inside a cell is escaped."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def code(text: str) -> str:
    """Return the text as inline code; empty text stays empty."""
    return f"`{text}`" if text else ""
