"""The reference of the configuration, from the fields of its sections and their docstrings."""

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from rose.pipeline.config.field_docs import class_docstring, field_docs
from rose.pipeline.config.load import SHARED, as_toml, section_types
from rose.pipeline.observability.reference.pages import Page, code, page, table

GROUPS = {
    "All roles": ("broker", "topics", "model", "metrics", "tracing"),
    "Environment worker": ("environment",),
    "Router": ("router",),
    "Control app": ("control",),
    "Executor": ("executor",),
    "Lender": ("lender", "endpoint"),
    "Trainer": ("trainer", "weights"),
    "Runs on one machine": ("run", "tasks", "serving", "users"),
}
"""Sections by the role that reads them; every section is in one group."""

COLUMNS = ("key", "type", "default", "bounds", "unit", "meaning")

UNITS = ("seconds", "bytes", "tokens", "turns", "versions", "characters")
"""Endings of keys that name a unit."""

PACKAGE = Path(__file__).parents[3]
"""The folder of the package `rose`; defaults inside it are files that come with ROSE."""

SENTENCE = re.compile(r"(?P<name>\w+) must be (from )?(?P<bounds>[^:]+)(:.*)?")
"""An error message of a section, with the bounds of one field."""

NAMES = {str: "text", int: "integer", float: "number", bool: "boolean", Path: "path", Any: "value"}
"""Names of types in TOML's terms."""

INTRODUCTION = """A run is configured by one TOML file (`--config`), by variables `ROSE_SECTION__KEY` and by
`--set SECTION.KEY=VALUE`. A flag overrides a variable, and a variable overrides the file. `rose
config` prints the resolved configuration with the origin of every value; an unknown key or an
invalid value is refused with one sentence.

A key that is not in this page but follows another key is set by that key:""" + (
    "; ".join(f"{code(key)} from {' and '.join(map(code, sources))}" for key, sources in SHARED.items()) + "."
)


def as_markdown() -> str:
    """Return the page of the configuration. Raises ValueError if a section is not in exactly one group."""
    grouped = [section for sections in GROUPS.values() for section in sections]
    if sorted(grouped) != sorted(section_types()):
        raise ValueError("configuration.GROUPS does not have every section of the configuration once")
    parts = []
    for role, sections in GROUPS.items():
        parts.append(f"## {role}\n")
        parts += [_section(section) for section in sections]
    return page(Page.CONFIGURATION, INTRODUCTION, parts)


def _section(section: str) -> str:
    declared_by = section_types()[section]
    summary = " ".join(class_docstring(declared_by).split())
    return f"### [{section}]\n\n{summary}\n\n{table(COLUMNS, _rows(section, declared_by))}"


def _rows(path: str, declared_by: type) -> Iterator[list[str]]:
    """Yield the rows of a section. The fields of a nested dataclass are rows of their own."""
    sentences, hints, bounds = field_docs(declared_by), get_type_hints(declared_by), bounds_of(declared_by)
    for field in dataclasses.fields(declared_by):
        key, kind = f"{path}.{field.name}", hints[field.name]
        if key in SHARED:
            continue
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            yield from _rows(key, kind)
            continue
        unit = next((each for each in UNITS if field.name.endswith(each)), "")
        yield [code(key), _type(kind), _default(field), bounds.get(field.name, ""), unit, sentences.get(field.name, "")]


def _type(kind: Any) -> str:
    arguments = get_args(kind)
    match get_origin(kind):
        case None if isinstance(kind, type) and issubclass(kind, Enum):
            return " or ".join(code(str(member.value)) for member in kind)
        case None:
            return NAMES[kind]
        case origin if origin is UnionType:
            return " or ".join(_type(each) for each in arguments if each is not type(None))
        case origin if origin is dict:
            return f"table of {_type(arguments[1])}"
        case _:
            return f"list of {_type(arguments[0])}"


def _default(field: "dataclasses.Field[Any]") -> str:
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if value is None:
        return ""
    if isinstance(value, Path) and value.is_relative_to(PACKAGE):
        return code(f"rose/{value.relative_to(PACKAGE).as_posix()}")
    return code(as_toml(value))


def bounds_of(declared_by: type) -> dict[str, str]:
    """Return the bounds that a section checks, by field, from the source of the class.

    The bounds are in dictionaries of two forms: by name, as for `check_bounds`, and by sentence "NAME must be BOUNDS".
    """
    module, names = sys.modules[declared_by.__module__], [field.name for field in dataclasses.fields(declared_by)]
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(declared_by)))):
        if not isinstance(node, ast.Dict):
            continue
        for key, value in zip(node.keys, node.values, strict=True):
            text = _text(key, module)
            sentence = SENTENCE.fullmatch(text)
            if text in names and isinstance(value, ast.Tuple):
                least, most = (_number(each, module) for each in value.elts)
                found[text] = f"{least} to {most}"
            elif sentence is not None and sentence["name"] in names:
                found[sentence["name"]] = sentence["bounds"]
    return found


def _text(node: ast.expr | None, module: Any) -> str:
    """Return a string literal, in which names stand for constants of the module; anything else is empty."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.FormattedValue(value=ast.Name(id=name), format_spec=None | ast.JoinedStr() as spec):
            return format(getattr(module, name), "" if spec is None else _text(spec, module))
        case ast.FormattedValue(
            value=ast.Call(
                func=ast.Attribute(value=ast.Constant(value=str(comma)), attr="join"), args=[ast.Name(id=name)]
            )
        ):
            return comma.join(getattr(module, name))
        case ast.JoinedStr(values=parts):
            return "".join(_text(part, module) for part in parts)
    return ""


def _number(node: ast.expr, module: Any) -> str:
    """Return a bound: a literal, or the value of a constant of the module."""
    value = getattr(module, node.id) if isinstance(node, ast.Name) else ast.literal_eval(node)
    return str(int(value)) if value == int(value) else f"{value:g}"
