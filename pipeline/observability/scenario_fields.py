"""The page of the fields of a scenario, generated from the classes that read one.

Keeps true: every field has a row, with the bounds that are checked when a scenario is read.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

from rose.pipeline.config.load import as_toml
from rose.pipeline.config.settings import class_docstring, field_docs
from rose.pipeline.observability.reference import Page, code, page, table
from rose.pipeline.simulation.scenario import Scenario

INTRODUCTION = """The fields of a scenario, a TOML file that [`rose simulate`](../guides/simulate.md) reads. A field
without a default must be given. Names say their unit: seconds, tokens, bytes or a share of 1.

Each table `[arms.NAME]` holds the fields that an arm replaces."""

COLUMNS = ("field", "type", "default", "meaning")


def scenario_fields_page() -> str:
    """Return the page."""
    return page(Page.SCENARIOS, INTRODUCTION, list(_sections("", inspect.type_info(Scenario))))


def _sections(place: str, shown: inspect.Type) -> Iterator[str]:
    """Yield the section of a part and those of the parts in it; `place` is its table in the file, such as [users]."""
    assert isinstance(shown, inspect.StructType)
    summary, sentences = " ".join(class_docstring(shown.cls).split()), field_docs(shown.cls)
    rows, inside = [], []
    for field in shown.fields:
        part, repeated = _part_of(field.type)
        if part is not None:
            name = f"{place.strip('[]')}.{field.name}".strip(".")
            inside.append((f"[[{name}]]" if repeated else f"[{name}]", part))
            if field.required:
                rows.append([code(name), "part", "", f"See [below](#{name.replace('.', '')})."])
        else:
            rows.append([code(field.name), _type(field.type), _default(field), sentences.get(field.name, "")])
    yield f"## {place or 'The file'}\n\n{summary}\n\n{table(COLUMNS, rows)}"
    for name, part in inside:
        yield from _sections(name, part)


def _part_of(kind: inspect.Type) -> tuple[inspect.StructType | None, bool]:
    """Return the part that a field holds, and whether the field holds several; None for a field of another type."""
    if isinstance(kind, inspect.UnionType):
        kind = next(each for each in kind.types if not isinstance(each, inspect.NoneType))
    repeated = isinstance(kind, inspect.VarTupleType)
    held = kind.item_type if isinstance(kind, inspect.VarTupleType) else kind
    return (held, repeated) if isinstance(held, inspect.StructType) else (None, repeated)


def _type(kind: inspect.Type) -> str:
    match kind:
        case inspect.UnionType(types=types):
            return _type(next(each for each in types if not isinstance(each, inspect.NoneType)))
        case inspect.LiteralType(values=values):
            return " or ".join(code(str(value)) for value in values)
        case inspect.IntType() | inspect.FloatType():
            name = "whole number" if isinstance(kind, inspect.IntType) else "number"
            return name + _bounds(kind)
        case inspect.BoolType():
            return "`true` or `false`"
        case inspect.StrType():
            return "text"
        case inspect.BoolType():
            return "`true` or `false`"
        case inspect.DictType(value_type=value):
            return f"table of {_type(value)}"
        case inspect.VarTupleType(item_type=item):
            return f"{_type(item)}, or a list"
        case _:
            raise TypeError(f"the page of scenarios does not know how to show {kind}")


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    bounds = ((", at least", kind.ge), (", more than", kind.gt), (", at most", kind.le), (", less than", kind.lt))
    return "".join(f"{relation} {bound:,g}" for relation, bound in bounds if bound is not None)


def _default(field: inspect.Field) -> str:
    value: Any = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    return "" if value is msgspec.NODEFAULT or value is None else code(as_toml(value))
