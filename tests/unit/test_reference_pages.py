"""The generated pages of the documentation match the code."""

import ast
import dataclasses
from pathlib import Path

import pytest

from rose.pipeline.config.settings import SHARED, section_types
from rose.pipeline.observability.log_events import MEANINGS, PACKAGES, Meaning, UnclearLogEvent, events_in, log_events
from rose.pipeline.observability.reference import bounds_of, cli_page, configuration_page, topics_page
from rose.topics.catalog import RECORD_TOPICS
from rose.workers.executor.config import ExecutorConfig
from rose.workers.lender.config import MemoryConfig

ROOT = Path(__file__).parents[2]

KNOWN = {"turn_failed": Meaning("A turn failed."), "turn_ended": Meaning("A turn ended.", more_fields=("seconds",))}


def test_every_log_call_of_the_product_is_found() -> None:
    logging = [
        node
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("debug", "info", "warning", "critical")
    ]
    found = [event for event in log_events() if event.level != "error"]
    assert {event.name for event in found} <= set(MEANINGS)
    assert len(found) >= len(logging) > 50, "a call may log one of two events"


def test_meanings_are_sorted_sentences() -> None:
    assert list(MEANINGS) == sorted(MEANINGS)
    for meaning in MEANINGS.values():
        assert meaning.sentence.endswith(".") and meaning.action.endswith("."), meaning


def test_meaning_of_an_event_that_is_never_logged_is_refused() -> None:
    with pytest.raises(UnclearLogEvent, match="moon_fell"):
        log_events(MEANINGS | {"moon_fell": Meaning("The moon fell.")})


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ('log.info("turn_won")', "write its meaning"),
        ('log.info("a turn failed")', "write its meaning"),
        ('log.info(f"turn_{how}")', "no literal"),
        ("self._log.error(reason)", "no literal"),
        ('log.info("turn_failed", Reason=1)', "snake_case"),
    ],
)
def test_unclear_log_call_is_refused(call: str, problem: str) -> None:
    with pytest.raises(UnclearLogEvent, match=problem):
        list(events_in(call, "workers/trainer/loop.py", KNOWN))


def test_log_event_has_the_fields_of_its_call_and_of_its_logger() -> None:
    source = """
log = structlog.get_logger("x").bind(worker=1)
log.warning("turn_failed" if bad else "turn_ended", turn=1, **more)
self._log.exception("turn_failed", reason=1)
LOG.info("rose: turn_ended seconds=%.2f reason=%s", 1, 2)
"""
    found = list(events_in(source, "pipeline/routing/x.py", KNOWN))
    assert [(each.name, each.level, each.fields, each.role) for each in found] == [
        ("turn_failed", "warning", ("worker", "turn"), "Router"),
        ("turn_ended", "warning", ("worker", "turn", "seconds"), "Router"),
        ("turn_failed", "error", ("worker", "reason", "exception"), "Router"),
        ("turn_ended", "info", ("seconds", "reason"), "Router"),
    ]


def test_configuration_page_has_every_key_with_a_meaning() -> None:
    rows = [line.split(" | ") for line in configuration_page().splitlines() if line.startswith("| `")]
    keys = {row[0].removeprefix("| ").strip("`") for row in rows}
    for section, declared_by in section_types().items():
        for field in dataclasses.fields(declared_by):
            path = f"{section}.{field.name}"
            assert path in SHARED or any(key == path or key.startswith(f"{path}.") for key in keys), path
    assert [row[0] for row in rows if not row[-1].rstrip("| ").endswith(".")] == []


def test_documented_bounds_are_the_checked_bounds() -> None:
    assert bounds_of(ExecutorConfig)["heartbeat_seconds"] == "0.01 to 0.2"
    assert bounds_of(MemoryConfig) == {"headroom": "0 to 1", "quiet_seconds": "0.001 to 31622400"}


def test_topics_page_has_every_topic_with_producers_and_consumers() -> None:
    page = topics_page()
    for topic in RECORD_TOPICS:
        [row] = [line for line in page.splitlines() if line.startswith(f"| `{topic.name}` | `")][:1]
        assert "|  |" not in row, row


def test_cli_page_has_commands_and_options() -> None:
    page = cli_page()
    for text in ("### rose demo", "### rose topics acl", "### rose dlq retry", "`--lend/--no-lend`", "`-X KEY=VALUE`"):
        assert text in page
