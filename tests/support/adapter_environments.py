"""Interpreters of the environments in which packages of adapters are installed apart from vLLM."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def python_of(extra: str) -> str:
    """Return the interpreter of an extra's environment; the test is skipped without it.

    `make test-adapters` makes it; the variable ROSE_<EXTRA>_PYTHON names another one.
    """
    found = os.environ.get(f"ROSE_{extra.upper()}_PYTHON") or str(ROOT / ".venv" / extra / "bin/python")
    if not Path(found).exists():
        pytest.skip(f"{found} does not exist: `make test-adapters` installs the extra {extra} there")
    return found
