"""Reads a TOML file, and reports where a file is invalid."""

import re
import tomllib
from pathlib import Path
from typing import Any

from rose.schemas.errors import UsageError

AT_LINE = re.compile(r"\(at line (\d+),")
"""Position in an error of tomllib; an error without position is at the end of the file."""

KEY = re.compile(r"""\s*(\[[^\]]*\]+|[\w.'"-]+(?=\s*=))""")
"""Start of a line that sets a key or begins a table."""


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of the file. Raises UsageError, which names the key before the first syntax error."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no TOML: {error}") from None
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        key = _key_before(str(error), text)
        raise UsageError(f"{path} is no TOML: {error}{f', at {key}' if key else ''}") from None


def _key_before(reason: str, text: str) -> str:
    """Return the key at the error without its value, which may be a password."""
    lines = text.rstrip().splitlines()
    at = AT_LINE.search(reason)
    before = lines[: int(at[1])] if at else lines
    return next((found[1] for line in reversed(before) if (found := KEY.match(line))), "")
