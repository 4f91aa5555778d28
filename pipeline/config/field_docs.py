"""Docstrings of fields and functions, read from their source, so that nothing is described twice."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

BASES = ("builtins", "enum", "msgspec")
"""Packages whose base classes declare no documented fields."""


@cache
def field_docs(declared_by: type) -> dict[str, str]:
    """Return, by field or member of a class, the string that follows its declaration, on one line."""
    sentences: dict[str, str] = {}
    for ancestor in reversed([each for each in declared_by.__mro__ if each.__module__.partition(".")[0] not in BASES]):
        body = _declaration(ancestor)
        for declaration, follower in zip(body.body, body.body[1:], strict=False):
            match declaration:
                case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                    pass
                case _:
                    continue
            if (
                isinstance(follower, ast.Expr)
                and isinstance(follower.value, ast.Constant)
                and isinstance(follower.value.value, str)
            ):
                sentences[name] = " ".join(inspect.cleandoc(follower.value.value).split())
    return sentences


def class_docstring(declared_by: type) -> str:
    """Return the docstring of a class, without indentation, also if Python removes docstrings (-OO); empty if none."""
    return ast.get_docstring(_declaration(declared_by)) or ""


@cache
def _declaration(declared_by: type) -> ast.ClassDef:
    [declared] = ast.parse(textwrap.dedent(inspect.getsource(declared_by))).body
    assert isinstance(declared, ast.ClassDef)
    return declared


def keep_docstring(function: Function) -> Function:
    """Set the function's docstring even if Python removes docstrings (-OO): the docstring is the text of `--help`."""
    if function.__doc__ is None:
        declared = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        assert isinstance(declared, ast.FunctionDef)
        function.__doc__ = ast.get_docstring(declared)
    return function
