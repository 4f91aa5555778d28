"""Docstrings of the product, field docstrings included, are sentences or noun phrases; ruff checks their form."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

FRAGMENT = re.compile(r"(As|By|For|Of|That|To|What|With)\b")
"""First words of a docstring that its reader must complete."""


def test_no_docstring_begins_as_a_fragment() -> None:
    fragments = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {node.value.value.strip()[:60]}"
        for package in ("schemas", "topics", "workers", "pipeline", "deploy")
        for file in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and FRAGMENT.match(node.value.value.strip())
    ]
    assert fragments == []
