"""Pages of reports: one self-contained file from a template, figures and texts.

Keeps true
- A page includes the style, and plotly's script if it has figures. It loads nothing.
- Plotly and jinja2 are imported only when a page is made, plotly only for figures.
"""

from collections.abc import Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import plotly.graph_objects as go


def render_page(template: str, figures: "Mapping[str, go.Figure | None]", **values: Any) -> str:
    """Return a page as HTML.

    Args:
        template: Name of the template, a file of this package.
        figures: Figures by name; the template gets those that are not None as `pictures`.
        values: What else the template shows.
    """
    from jinja2 import Environment, StrictUndefined

    pictures, plotly = _pictures(figures) if figures else ({}, "")
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page.filters.update(number=number, duration=duration, milliseconds=milliseconds, size=size, percent=percent)
    folder = files("rose.pipeline.report")
    return page.from_string((folder / template).read_text(encoding="utf-8")).render(
        pictures=pictures,
        plotly=plotly,
        style=(folder / "style.css").read_text(encoding="utf-8"),
        **values,
    )


def _pictures(figures: "Mapping[str, go.Figure | None]") -> tuple[dict[str, str], str]:
    """Return the figures that are not None as HTML by name, and plotly's script."""
    from plotly.io import to_html
    from plotly.offline import get_plotlyjs

    pictures = {
        name: to_html(
            figure,
            full_html=False,
            include_plotlyjs=False,
            div_id=name,
            config={"displayModeBar": False, "responsive": True},
        )
        for name, figure in figures.items()
        if figure is not None
    }
    return pictures, get_plotlyjs()


def number(value: float) -> str:
    """Return a number with at most one decimal."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:,.1f}"


def duration(seconds: float) -> str:
    """Return a duration in minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def milliseconds(seconds: float) -> str:
    """Return a latency in milliseconds, or in seconds from one second on."""
    milliseconds = 1000 * seconds
    if milliseconds >= 1000:
        return f"{seconds:.2f} s"
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"


def size(value: int) -> str:
    """Return a number of bytes in MiB or GiB."""
    return f"{value / 2**20:,.1f} MiB" if value < 2**30 else f"{value / 2**30:,.2f} GiB"


def percent(share: float) -> str:
    """Return a share of 1 in percent."""
    return f"{100 * share:.1f} %"
