"""Bounds of settings, which the configuration and the roles check at the start.

Keeps true: imports the standard library alone, because `rose --help` shows some of these bounds.
"""

from collections.abc import Mapping
from urllib.parse import urlsplit

YEAR_SECONDS = 366 * 24 * 3600.0
"""No wait that is set is longer: what adds it to a clock's time meets no overflow."""

MAX_FINISH_SECONDS = 3600.0
"""Most time that turns of a drained worker may take to end."""

MAX_COUNT = 10**9
"""More than there is of anything that is counted in one process; sums and products of it stay whole."""

HIGHEST_PORT = 65_535


def check_bounds(config: object, bounds: Mapping[str, tuple[float, float]]) -> None:
    """Raise ValueError for the first of these fields that is not from its least value to its most: NaN never is."""
    for name, (minimum, maximum) in bounds.items():
        value = getattr(config, name)
        if not minimum <= value <= maximum:
            raise ValueError(f"{name} ({value}) must be from {minimum} to {maximum}")


def is_http_server(url: str) -> bool:
    """Whether the URL is `http://HOST[:PORT]`, or https, without a password: logs and reports show the URL."""
    if not url.isprintable() or " " in url:  # urlsplit passes over tabs and ends of lines
        return False
    try:
        place = urlsplit(url)
        (place.hostname or "").encode("idna")  # as a name lookup does: a label has 63 characters at most
        return (
            place.scheme in ("http", "https") and bool(place.hostname) and place.port != 0 and "@" not in place.netloc
        )
    except ValueError:  # a port or host that is none
        return False
