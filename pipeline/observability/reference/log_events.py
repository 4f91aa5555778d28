"""The reference of log events, from the syntax trees of the product code.

Keeps true
- Event, level and fields come from the call that logs; the meaning comes from `log_event_meanings`.
- Every event is a literal in snake_case, and so is every field.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rose.pipeline.observability.reference.log_event_meanings import MEANINGS, Meaning
from rose.pipeline.observability.reference.pages import Page, code, page, table

ROOT = Path(__file__).resolve().parents[3]
"""The folder that holds the packages: a checkout, or the installed package `rose`."""

PACKAGES = ("schemas", "topics", "workers", "pipeline")

EXECUTORS, TRAINER = "Executor and lender", "Trainer"

ROLES = (
    ("topics/", "Every role"),
    ("workers/environments/", "Environment worker"),
    ("pipeline/routing/", "Router"),
    ("pipeline/control/", "Control app"),
    ("workers/executor/", EXECUTORS),
    ("workers/weights/receive.py", EXECUTORS),
    ("workers/lender/endpoint/", "Lender of an endpoint"),
    ("workers/lender/sidecar.py", "Sidecar of a lending server"),
    ("workers/lender/observe.py", "Sidecar of a lending server"),
    ("workers/lender/watchdog.py", "Watchdog of a lending server"),
    ("workers/lender/", "Lending server"),
    ("workers/trainer/", TRAINER),
    ("workers/weights/", TRAINER),
    ("workers/loadgen/", "Load generator"),
)
"""Whose events the modules with a path of this beginning log, in the order of the page; the first that fits counts."""

LEVELS = {"debug": "debug", "info": "info", "warning": "warning", "error": "error", "exception": "error"}
"""Level by method of a logger."""

TRACEBACK = "exception"
"""The field in which structlog writes a traceback."""

EVENT = re.compile(r"[a-z][a-z0-9_]*")
SERVER_EVENT = re.compile(r"rose: ([a-z0-9_]+)((?: [a-z0-9_]+=%[.0-9]*[a-z])*)")
"""An event in the log of a vLLM server, whose logger is Python's own."""


class UnclearLogEvent(Exception):
    """A log call whose event or fields cannot be documented."""


@dataclass(frozen=True, slots=True)
class LogEvent:
    """A call that logs one event."""

    name: str
    level: str
    fields: tuple[str, ...]
    path: str
    """Module, relative to the folder of the packages."""

    @property
    def role(self) -> str:
        """The role whose log has the event. Raises UnclearLogEvent for a module of no role."""
        for beginning, role in ROLES:
            if self.path.startswith(beginning):
                return role
        raise UnclearLogEvent(f"{self.path} logs {self.name}: add the module to log_events.ROLES")


def log_events(meanings: Mapping[str, Meaning] = MEANINGS) -> list[LogEvent]:
    """Return every log call of the product code.

    Raises UnclearLogEvent for an event or field that is not snake_case, an event that is no literal, an event without a
    meaning and a meaning without an event.
    """
    found = [
        event
        for package in PACKAGES
        for file in sorted((ROOT / package).rglob("*.py"))
        for event in events_in(file.read_text(encoding="utf-8"), file.relative_to(ROOT).as_posix(), meanings)
    ]
    if unused := meanings.keys() - {event.name for event in found}:
        raise UnclearLogEvent(f"nothing logs {', '.join(sorted(unused))}: remove the meaning")
    return found


def events_in(source: str, path: str, meanings: Mapping[str, Meaning]) -> Iterator[LogEvent]:
    """Yield the log calls of one module. Raises UnclearLogEvent, as `log_events` does."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    bound = tuple(keyword.arg for call in calls if _is_bind(call) for keyword in call.keywords if keyword.arg)
    for call in calls:
        if not isinstance(call.func, ast.Attribute) or not _is_logger(call.func.value) or call.func.attr not in LEVELS:
            continue
        place, with_traceback = f"{path}:{call.lineno}", call.func.attr == "exception"
        for text in _literals(call, place):
            name, fields = text, bound
            if (server := SERVER_EVENT.fullmatch(text)) is not None:
                name, fields = server[1], tuple(field.partition("=")[0] for field in server[2].split())
            if name not in meanings:
                raise UnclearLogEvent(f"{place} logs {name}: write its meaning in log_event_meanings.MEANINGS")
            for keyword in call.keywords:
                fields += meanings[name].more_fields if keyword.arg is None else (keyword.arg,)
            if with_traceback and server is None:
                fields += (TRACEBACK,)
            if not all(EVENT.fullmatch(each.rstrip("*")) for each in (name, *fields)):
                raise UnclearLogEvent(f"{place} logs {name} with {', '.join(fields)}: name all in snake_case")
            yield LogEvent(name, LEVELS[call.func.attr], fields, path)


def _is_logger(value: ast.expr) -> bool:
    """Whether an expression is a logger: `log`, `LOG`, `self._log` or `structlog.get_logger(...)`."""
    match value:
        case ast.Name(id="log" | "LOG") | ast.Attribute(attr="_log"):
            return True
        case ast.Call(func=ast.Attribute(attr="get_logger")):
            return True
    return False


def _is_bind(call: ast.Call) -> bool:
    """Whether a call adds fields to all events of a logger."""
    return isinstance(call.func, ast.Attribute) and call.func.attr == "bind" and _is_logger(call.func.value)


def _literals(call: ast.Call, place: str) -> list[str]:
    """The events that a call may log. Raises UnclearLogEvent for an event that is no literal."""
    match call.args[:1]:
        case [ast.Constant(value=str(text))]:
            return [text]
        case [ast.IfExp(body=ast.Constant(value=str(one)), orelse=ast.Constant(value=str(other)))]:
            return [one, other]
    raise UnclearLogEvent(f"{place}: the event is no literal: name it, and write facts as fields")


def as_markdown() -> str:
    """Return the page of the log events: one table for each role. Raises UnclearLogEvent, as `log_events` does."""
    found = log_events()
    sections = []
    for role in dict.fromkeys(role for _, role in ROLES):
        own = [event for event in found if event.role == role]
        rows = [_row([event for event in own if event.name == name]) for name in sorted({each.name for each in own})]
        sections.append(f"## {role}\n\n{table(('event', 'level', 'fields', 'meaning', 'what to do'), rows)}")
    return page(Page.LOG_EVENTS, INTRODUCTION, sections)


def _row(same: list[LogEvent]) -> list[str]:
    """One row: the calls of one role that log the same event."""
    levels = ", ".join(dict.fromkeys(event.level for event in same))
    fields = ", ".join(code(field) for field in dict.fromkeys(field for event in same for field in event.fields))
    meaning = MEANINGS[same[0].name]
    return [code(same[0].name), levels, fields, meaning.sentence, meaning.action]


INTRODUCTION = """Every role logs to standard error, one event a line. On a terminal the lines are coloured. Everywhere
else a line has `key=value` pairs: `timestamp`, `level`, `event` and the fields of the event.

- An event is a stable `snake_case` name: search for `event=guest_hung`.
- The field `reason` holds a sentence for people; `exception` holds a traceback.
- A lending server logs in vLLM's own log, as `rose: EVENT field=value ... reason=SENTENCE`.
- An event with several levels is logged at several places; not every line has all fields of the table."""
