"""Where in a user's code an error was raised."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from rose.schemas.errors import leaves_of

_PATHS = sysconfig.get_paths()

INSTALLED = tuple({f"{_PATHS[name]}/" for name in ("purelib", "platlib")})
"""Folders of installed packages."""

LIBRARY = (*{f"{_PATHS[name]}/" for name in ("stdlib", "platstdlib")}, "<")
"""How file names of Python's own modules begin."""

CALLERS = tuple(
    str(Path(__file__).with_name(f"{name}.py")) for name in ("thread_runner", "runner_status", "runner_server", "main")
)
"""Files of ROSE from which environments are called."""


def raised_at(error: BaseException) -> str:
    """Return file, line and function of the innermost frame of the user's code.

    Without such a frame, the innermost frame of an installed package; empty text if there is neither. For a group of
    errors, the first error counts.
    """
    frames = list(_frames(leaves_of(error)[0])) or list(_frames(error))
    own = [(file, where) for file, where in frames if not file.startswith((*LIBRARY, *CALLERS))]
    users = [where for file, where in own if not file.startswith(INSTALLED)]
    installed = [where for file, where in frames if file.startswith(INSTALLED) and not file.startswith(CALLERS)]
    return (users or installed or [""])[-1]


def _frames(error: BaseException) -> Iterator[tuple[str, str]]:
    """The file of each frame, and the place in it, the innermost last."""
    at = error.__traceback__
    while at is not None:
        code = at.tb_frame.f_code
        place = f"{code.co_filename}, line {at.tb_lineno}, in {code.co_name}"
        yield code.co_filename, place.encode(errors="replace").decode()
        at = at.tb_next
