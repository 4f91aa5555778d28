"""The wire contract of a release: topics, keys, headers and the type of each field, from AsyncAPI.

Readers of a log and writers of prompts rely on the contract, so it holds in every later release.
"""

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from rose.pipeline.asyncapi import asyncapi
from rose.pipeline.config.load import load
from rose.pipeline.config.options import Common
from rose.schemas.limits import MAX_INFO_BYTES, MAX_NESTING
from rose.schemas.wire import RECORDS
from rose.topics.catalog import CATALOG, Topic

TEXT = frozenset({"description", "summary"})

SAME = frozenset({"title", "type", "format", "pattern", "default", "$ref"})
"""Keywords that must not change. A field with its default is left out on the wire, so another default would change
existing records. Fields of arrays are identified by their titles."""

LEAST = frozenset({"minimum", "exclusiveMinimum", "minLength", "minItems"})

MOST = frozenset({"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"})

Schema = dict[str, Any]


def contract() -> Schema:
    """Return the contract of this code as JSON values."""
    document = asyncapi(load(Common()))
    components = document["components"]
    promised = {
        "topics": {
            topic.name: {"messages": sorted(document["channels"][topic.name]["messages"]), "keys": keys_of(topic)}
            for topic in CATALOG
        },
        "messages": {
            name: {
                "record": message["name"].partition("/")[0],
                "content": message["contentType"],
                "headers": sorted(message["headers"]["properties"]),
            }
            for name, message in components["messages"].items()
        },
        "limits": {"nested": MAX_NESTING, "info bytes": MAX_INFO_BYTES},
        "bytes": {record.__name__: record.MAX_BYTES for record in RECORDS},
        "schemas": {name: _bare(schema) for name, schema in components["schemas"].items()},
    }
    as_json: Schema = json.loads(msgspec.json.encode(promised))
    return as_json


def keys_of(topic: Topic) -> list[str]:
    """Return every form that a key may have, of records and of marks."""
    before, _, rest = topic.key.partition("[")
    inside, _, after = rest.partition("]")
    choices = ["", *inside.split("|")] if inside else [""]
    return [*(f"{before}{choice}{after}" for choice in choices), *topic.marker_keys]


def broken(shipped: Schema, now: Schema) -> list[str]:
    """Return every violation of the old contract, one line each."""
    found: list[str] = []
    for name, topic in shipped["topics"].items():
        other = now["topics"].get(name, {"messages": [], "keys": []})
        found += [f"topic {name} does not hold {gone}" for gone in set(topic["messages"]) - set(other["messages"])]
        found += _other_keys(topic["keys"], other["keys"], name)
    for name, message in shipped["messages"].items():
        other = now["messages"].get(name, {})
        found += [f"{name}: another {what}" for what in ("record", "content") if message[what] != other.get(what)]
        found += [f"{name}: no header {header}" for header in set(message["headers"]) - set(other.get("headers", ()))]
    found += [f"fewer {name}" for name, most in shipped["limits"].items() if now["limits"].get(name, 0) < most]
    found += [f"{name}: fewer bytes" for name, most in shipped["bytes"].items() if now["bytes"].get(name, 0) < most]
    for name, schema in shipped["schemas"].items():
        found += _narrower(schema, now["schemas"].get(name), name)
    return found


def _other_keys(old: list[str], new: list[str], at: str) -> Iterator[str]:
    """Whether key forms differ: readers of several forms skip a new form, and a single form is read as before."""
    if gone := set(old) - set(new):
        yield f"topic {at}: no key {sorted(gone)} any more"
    elif len(old) == 1 < len(new):
        yield f"topic {at}: other keys than {old[0]}"


def _narrower(old: Any, new: Any, at: str) -> Iterator[str]:
    """Whether `new` refuses or reinterprets values that `old` accepts."""
    if new is None:
        yield f"{at} is gone"
        return
    for key in sorted(old.keys() | new.keys()):
        was, is_now = old.get(key), new.get(key)
        if key in SAME | LEAST | MOST:
            if _breaks(key, old, new):
                yield f"{at}: {key} was {was}, is {is_now}"
        elif key == "required" and (more := set(is_now or ()) - set(was or ())):
            yield f"{at}: {sorted(more)} may not be left out any more"
        elif key == "enum" and (gone := set(was or ()) - set(is_now or ())):
            yield f"{at}: no {sorted(gone)} any more"
        elif key not in ("required", "enum"):
            yield from _narrower_inside(key, was, is_now, at)


def _breaks(key: str, old: Schema, new: Schema) -> bool:
    """Whether a keyword without a schema accepts less than before."""
    was, is_now = old.get(key), new.get(key)
    if key in SAME:
        return (key in old, repr(was)) != (key in new, repr(is_now))  # True is 1
    if was is None or is_now is None:
        return is_now is not None
    return bool(is_now > was if key in LEAST else is_now < was)


def _narrower_inside(key: str, was: Any, is_now: Any, at: str) -> Iterator[str]:
    """Compare the keywords that contain schemas."""
    if was is None:
        yield f"{at}: {key} is new"
    elif key == "properties":
        for name, schema in was.items():
            yield from _narrower(schema, (is_now or {}).get(name), f"{at}.{name}")
    elif key in ("items", "allOf") and isinstance(was, list):
        for number, schema in enumerate(was):
            yield from _narrower(schema, dict(enumerate(is_now or [])).get(number), f"{at}[{number}]")
    elif key == "anyOf":
        for schema in was:
            if all(list(_narrower(schema, other, at)) for other in is_now or ()):
                yield f"{at}: none of {key} is {json.dumps(schema)} any more"
    elif key in ("items", "propertyNames", "additionalProperties"):
        yield from _narrower(was, is_now, f"{at}[]")
    else:
        yield f"{at}: whether {key} has become narrower is not known here"


def _bare(schema: Any) -> Any:
    """Return the schema without text for people."""
    if isinstance(schema, list):
        return [_bare(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _bare(each) for name, each in value.items()} if key == "properties" else _bare(value)
        for key, value in schema.items()
        if key not in TEXT
    }
