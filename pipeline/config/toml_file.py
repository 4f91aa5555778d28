"""A file in TOML that a person wrote, and where it is none."""

import re
import tomllib
from pathlib import Path
from typing import Any

from rose.schemas.errors import UsageError

AT_LINE = re.compile(r"\(at line (\d+),")
"""Where tomllib says that it is; else it is at the end."""

KEY = re.compile(r"""\s*(\[[^\]]*\]+|[\w.'"-]+(?=\s*=))""")
"""What a line begins with that sets a key, or begins a table."""


def read_toml(path: Path) -> dict[str, Any]:
    """What it says. Raises UsageError, which names the key at which the file is no TOML."""
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
    """The key at which it is, without what that is set to: it may be a password."""
    lines = text.rstrip().splitlines()
    at = AT_LINE.search(reason)
    before = lines[: int(at[1])] if at else lines
    return next((found[1] for line in reversed(before) if (found := KEY.match(line))), "")
