"""Records only grow: the wire contract of every release holds forever."""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.golden.contract import broken, contract
from tests.golden.release import PRESENT, RELEASES


@pytest.mark.parametrize("release", sorted(RELEASES.iterdir()), ids=lambda release: release.name)
def test_contract_of_every_release_holds(release: Path) -> None:
    assert not broken(json.loads((release / "contract.json").read_text()), contract())


def test_current_version_has_a_contract() -> None:
    assert PRESENT.is_dir(), "python -m tests.golden.release"


def fields(document: dict[str, Any], name: str = "TurnResult") -> dict[str, Any]:
    found: dict[str, Any] = document["schemas"][name]["properties"]
    return found


def keys(document: dict[str, Any], topic: str) -> list[str]:
    found: list[str] = document["topics"][topic]["keys"]
    return found


BREAKS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a topic is gone": lambda now: now["topics"].pop("rose.samples.completed.v1"),
    "another key": lambda now: keys(now, "rose.samples.completed.v1").__setitem__(0, "{group_id}:{index}"),
    "one more key where one was": lambda now: keys(now, "rose.samples.completed.v1").append("{group_id}:{index}"),
    "one key of several is gone": lambda now: keys(now, "rose.capacity.grants.v1").remove("{worker}/drain"),
    "a mark is gone": lambda now: keys(now, "rose.turns.dispatched.v1").remove("router"),
    "a header is gone": lambda now: now["messages"]["DeadLetter"]["headers"].remove("rose-letter-reason"),
    "a record is gone": lambda now: now["schemas"].pop("Sample"),
    "a field is gone": lambda now: fields(now).pop("tokens"),
    "a field may not be left out": lambda now: now["schemas"]["TurnResult"]["required"].append("tokens"),
    "another default": lambda now: fields(now)["tokens"].update(default="AA=="),
    "no default": lambda now: fields(now)["tokens"].pop("default"),
    "another type": lambda now: fields(now)["turn"].update(type="number"),
    "a lower bound": lambda now: fields(now)["turn"].update(exclusiveMaximum=511),
    "a bound where none was": lambda now: fields(now)["worker"]["anyOf"][0].update(maxLength=4),
    "a higher least": lambda now: fields(now)["turn"].update(minimum=1),
    "a value is gone": lambda now: now["schemas"]["TurnOutcome"]["enum"].remove("refused"),
    "null is refused": lambda now: fields(now)["worker"]["anyOf"].pop(),
    "what an index holds is gone": lambda now: now["schemas"]["WeightIndex"]["properties"].pop("slices"),
    "another record inside": lambda now: fields(now)["outcome"].update({"$ref": "#/components/schemas/Outcome"}),
    "a place moved": lambda now: now["schemas"]["TurnTimes"]["items"].reverse(),
    "a place is gone": lambda now: now["schemas"]["TurnTimes"]["items"].pop(),
    "another kind of default": lambda now: fields(now)["cached_tokens"].update(default=False),
    "fewer levels": lambda now: now["limits"].update(nested=4),
    "fewer bytes": lambda now: now["bytes"].update(Sample=1000),
    "a rule that is not known": lambda now: fields(now)["turn"].update(multipleOf=2),
}


@pytest.mark.parametrize("breaks", BREAKS.values(), ids=BREAKS.keys())
def test_contract_violation_is_detected(breaks: Callable[[dict[str, Any]], object]) -> None:
    now = contract()
    breaks(now)
    assert broken(contract(), now)


def schemas_within(schema: Any) -> Iterator[dict[str, Any]]:
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from schemas_within(inner)
    if isinstance(schema, dict) and "type" in schema:
        yield schema


def test_all_lists_and_texts_have_a_maximum_length() -> None:
    """A missing maximum cannot be added later. A list of fixed length is a struct, which grows at its end."""
    for schema in schemas_within(contract()["schemas"]):
        match schema["type"]:
            case "array":
                assert isinstance(schema["items"], list) or "maxItems" in schema, schema
            case "string":
                assert "maxLength" in schema or "pattern" in schema or "enum" in schema, schema


def test_added_fields_violate_no_contract() -> None:
    shipped, now = contract(), contract()
    fields(now)["from_the_future"] = {"type": "string", "default": ""}
    fields(now)["turn"].update(exclusiveMaximum=1024)
    now["schemas"]["TurnOutcome"]["enum"].append("postponed")
    now["schemas"]["TurnTimes"]["items"].append({"type": "number", "default": 0.0})
    now["schemas"]["New"] = copy.deepcopy(now["schemas"]["Part"])
    now["messages"]["Sample"]["headers"].append("from-the-future")
    now["topics"]["rose.new.v1"] = {"messages": ["Sample"], "keys": ["{group_id}"]}
    keys(now, "rose.capacity.grants.v1").append("{worker}/from-the-future")
    assert not broken(shipped, now)
