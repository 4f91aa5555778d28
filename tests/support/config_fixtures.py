"""A configuration from a text, and the sentence of its refusal."""

import os
from pathlib import Path

import pytest

from rose.pipeline.config.load import load
from rose.pipeline.config.options import Common
from rose.schemas.errors import UsageError


def forget_rose_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delete the variables that are settings of ROSE."""
    for name in list(os.environ):
        if name.startswith("ROSE_"):
            monkeypatch.delenv(name)


def in_file(folder: Path, text: str) -> Common:
    """Write a configuration file."""
    path = folder / "rose.toml"
    path.write_text(text)
    return Common(config=path)


def refusal(common: Common) -> str:
    """Return the sentence that refuses the configuration."""
    with pytest.raises(UsageError) as refused:
        load(common)
    assert "\n" not in str(refused.value)
    return str(refused.value)
