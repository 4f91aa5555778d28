"""JSON Schema of records, derived from their types, so that no record is described twice.

Keeps true
- Bounds, patterns and defaults are those of the types; descriptions are the docstrings under the fields.
- Only keywords that draft-07 and 2020-12 have in common are used, and `items` of draft-07 for structs that are arrays,
  which no record in JSON has. Other arrays of fixed length have no schema, because they could not grow at their end.
- Byte strings are `{"type": "string", "format": "binary"}` with lengths in bytes; in MessagePack they are `bin`.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
from msgspec import inspect as types

from rose.pipeline.config.field_docs import field_docs

Schema = dict[str, Any]

END_OF_TEXT = r"\Z"
"""End of text in Python's patterns; JSON Schema uses `$`."""


def definitions(records: Iterable[type], *, ref: Callable[[str], str]) -> dict[str, Schema]:
    """Return the schemas of these structs, and of all structs and enumerations inside them, by name.

    `ref` makes a reference from a name. Raises TypeError for a field type without a schema.
    """
    found: dict[str, Schema] = {}
    waiting: list[types.Type] = [types.type_info(record) for record in records]
    while waiting:
        kind = waiting.pop(0)
        if isinstance(kind, types.StructType | types.EnumType) and kind.cls.__name__ not in found:
            found[kind.cls.__name__] = _declared(kind, ref)
            if isinstance(kind, types.StructType):
                waiting += [field.type for field in kind.fields]
        waiting += _within(kind)
    return found


def _within(kind: types.Type) -> list[types.Type]:
    match kind:
        case types.Metadata():
            return [kind.type]
        case types.UnionType():
            return list(kind.types)
        case types.VarTupleType():
            return [kind.item_type]
        case types.DictType():
            return [kind.key_type, kind.value_type]
    return []


def _declared(kind: types.StructType | types.EnumType, ref: Callable[[str], str]) -> Schema:
    sentences = field_docs(kind.cls)
    named: Schema = {"title": kind.cls.__name__}
    if kind.cls.__doc__:
        named["description"] = " ".join(inspect.cleandoc(kind.cls.__doc__).split())
    if isinstance(kind, types.EnumType):
        members = " ".join(f"`{each.value}`: {sentences[each.name]}" for each in kind.cls if each.name in sentences)
        whole = " ".join(filter(None, (named.get("description"), members)))
        return named | ({"description": whole} if whole else {}) | {"enum": [each.value for each in kind.cls]}
    fields = {field.encode_name: _field(field, sentences.get(field.name, ""), ref) for field in kind.fields}
    required = [field.encode_name for field in kind.fields if field.required]
    if kind.array_like:
        places = [{"title": name, **schema} for name, schema in fields.items()]
        return named | {"type": "array", "items": places, "minItems": len(required)}
    return named | {"type": "object", "required": required, "properties": fields}


def _field(field: types.Field, sentence: str, ref: Callable[[str], str]) -> Schema:
    own = _schema(field.type, ref)
    schema: Schema = {}
    if text := " ".join(filter(None, (sentence, own.pop("description", "")))):
        schema["description"] = text
    for default in _default(field):
        schema["default"] = default
    if "$ref" in own and schema:  # keywords next to a reference are ignored
        return {"allOf": [own], **schema}
    return own | schema


def _default(field: types.Field) -> Iterator[Any]:
    """Yield the default of the field if it has one."""
    if field.default is not msgspec.NODEFAULT:
        yield msgspec.to_builtins(field.default)
    elif field.default_factory is not msgspec.NODEFAULT:
        yield msgspec.to_builtins(field.default_factory())


def _schema(kind: types.Type, ref: Callable[[str], str]) -> Schema:
    match kind:
        case types.Metadata(type=types.RawType(), extra={"record": str(name)}):
            return {"$ref": ref(name)}
        case types.Metadata():
            return _schema(kind.type, ref) | (kind.extra_json_schema or {})
        case types.IntType() | types.FloatType():
            named = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
            bounds = {word: getattr(kind, bound) for bound, word in named.items() if getattr(kind, bound) is not None}
            return {"type": "integer" if isinstance(kind, types.IntType) else "number", **bounds}
        case types.StrType():
            pattern = {} if kind.pattern is None else {"pattern": kind.pattern.replace(END_OF_TEXT, "$")}
            return {"type": "string", **pattern, **_length(kind, "Length")}
        case types.BytesType():
            return {"type": "string", "format": "binary", **_length(kind, "Length")}
        case types.BoolType():
            return {"type": "boolean"}
        case types.NoneType():
            return {"type": "null"}
        case types.AnyType():
            return {}
        case types.UnionType():
            return {"anyOf": [_schema(each, ref) for each in kind.types]}
        case types.VarTupleType():
            return {"type": "array", "items": _schema(kind.item_type, ref), **_length(kind, "Items")}
        case types.DictType():
            keys = _length(kind.key_type, "Length") if isinstance(kind.key_type, types.StrType) else {}
            values = _schema(kind.value_type, ref)
            names = ({"propertyNames": keys} if keys else {}) | ({"additionalProperties": values} if values else {})
            return {"type": "object", **names, **_length(kind, "Properties")}
        case types.StructType() | types.EnumType():
            return {"$ref": ref(kind.cls.__name__)}
    raise TypeError(f"a record has a field of {kind}, which has no schema here")


def _length(kind: Any, of: str) -> Schema:
    named = {f"min{of}": kind.min_length, f"max{of}": kind.max_length}
    return {word: bound for word, bound in named.items() if bound is not None}
