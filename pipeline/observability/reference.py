"""The reference pages of the documentation, generated from the code: metrics, command line, configuration and topics.

Keeps true
- Name, type, labels and description of a metric come from its declaration. Every name contains its unit, in Prometheus'
  base units, and the name of a counter ends in `_total`.
- The page of the command line comes from the parser of `rose`, the page of the configuration from the fields of its
  sections and their docstrings, the page of the topics from the catalog and from the rights of the roles.
- Nothing is written down a second time. `log_events.py` has the page of the log events.
"""

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import typer
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric as Family

from rose.pipeline.cli.main import app
from rose.pipeline.config.load import as_toml
from rose.pipeline.config.options import PANEL
from rose.pipeline.config.settings import SHARED, class_docstring, field_docs, section_types
from rose.topics.acl import ROLES
from rose.topics.catalog import (
    DAY,
    DEAD_LETTERS,
    DEFAULT_RETENTION,
    HOUR,
    MINUTE,
    RECORD_TOPICS,
    Partitions,
    PartitionSetting,
    Topic,
)

COMMAND = "python -m rose.pipeline.observability"
"""The command that writes all generated pages and dashboards."""

GENERATED = f"`{COMMAND}` writes this page. A test compares it with the code."


class Page(Enum):
    """The generated pages, in the order of their links; the value is the title."""

    CLI = "Command line"
    CONFIGURATION = "Configuration"
    TOPICS = "Topics"
    METRICS = "Metrics"
    LOG_EVENTS = "Log events"
    SCENARIOS = "Scenarios"

    @property
    def file_name(self) -> str:
        """Name of the file in docs/reference/."""
        return f"{self.name.lower().replace('_', '-')}.md"


def page(which: Page, introduction: str, sections: Iterable[str]) -> str:
    """Return a page: title, introduction, sections, and links to the other generated pages."""
    links = (f"[{other.value}]({other.file_name})" for other in Page if other is not which)
    return "\n".join(
        (f"# {which.value}\n", f"{introduction}\n", f"{GENERATED}\n", *sections, f"**Next:** {' · '.join(links)}\n")
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; a bar inside a cell is escaped."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def code(text: str) -> str:
    """Return the text as inline code; empty text stays empty."""
    return f"`{text}`" if text else ""


CLI_INTRODUCTION = f"""The command `rose` runs every role, and looks at runs. `rose COMMAND --help` prints the same
texts. The exit status is 0 for success, 1 for a failure or a finding, 2 for a usage error.

All commands except `keys`, `calibrate`, `estimate`, `simulate`, `health`, `topics prompt-schema` and
`environment check` take the options of the section [{PANEL}](#{{anchor}})."""


def _summary(command: Any) -> str:
    """Return the first paragraph of a command's help, in one line: a table has no room for more."""
    return " ".join((command.help or "").partition("\n\n")[0].split())


def cli_page() -> str:
    """Return the page of the command line."""
    root = typer.main.get_command(app)
    commands = list(_commands("rose", root))
    panels = dict.fromkeys(panel for _, panel, _ in commands)
    shared = {each.name: each for _, _, command in commands for each in command.params if _is_common(each)}
    overview = [[f"[`{name}`](#{name.replace(' ', '-')})", _summary(command)] for name, _, command in commands]
    sections = [
        f"## {PANEL}\n\n{_parameters(list(shared.values()))}",
        f"## Commands\n\n{table(('command', 'what it does'), overview)}",
    ]
    for panel in panels:
        sections.append(f"## {panel}\n")
        sections += [_command_section(name, command) for name, each, command in commands if each == panel]
    return page(Page.CLI, CLI_INTRODUCTION.format(anchor=PANEL.lower().replace(" ", "-")), sections)


def _commands(name: str, group: Any, panel: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield name, panel and parser of every command below a group."""
    for own_name, command in group.commands.items():
        own_panel = panel or command.rich_help_panel
        if getattr(command, "invoke_without_command", False):
            yield f"{name} {own_name}", own_panel, command
        if hasattr(command, "commands"):
            yield from _commands(f"{name} {own_name}", command, own_panel)
        else:
            yield f"{name} {own_name}", own_panel, command


def _command_section(name: str, command: Any) -> str:
    own = [each for each in command.params if not _is_common(each) and not each.hidden]
    usage = [
        _parameter_text(each) if each.required else f"[{_parameter_text(each)}]"
        for each in own
        if each.param_type_name == "argument"
    ]
    line = " ".join((name, "[OPTIONS]", *usage))
    return f"### {name}\n\n{command.help}\n\n    {line}\n" + (f"\n{_parameters(own)}" if own else "")


def _is_common(parameter: Any) -> bool:
    return getattr(parameter, "rich_help_panel", None) == PANEL


def _parameters(parameters: list[Any]) -> str:
    rows = [[code(_parameter_text(each)), _option_default(each), each.help or ""] for each in parameters]
    return table(("option or argument", "default", "meaning"), rows)


def _parameter_text(parameter: Any) -> str:
    """Return a parameter as it is written: names and placeholder."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    names = "/".join((*parameter.opts, *parameter.secondary_opts))
    return names if parameter.is_flag else f"{names} {parameter.metavar or 'VALUE'}"


def _option_default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if parameter.default in (None, False, ""):
        return ""
    if parameter.default is True:
        return code(parameter.opts[0])
    return code(str(parameter.default))


GROUPS = {
    "All roles": ("broker", "topics", "model", "metrics", "tracing"),
    "Environment worker": ("environment",),
    "Router": ("router",),
    "Control app": ("control",),
    "Executor": ("executor",),
    "Lender": ("lender", "endpoint"),
    "Trainer": ("trainer", "weights"),
    "Evaluator": ("evaluation",),
    "Runs on one machine": ("run", "tasks", "serving", "users"),
    "Report": ("prices",),
}
"""Sections by the role that reads them; every section is in one group."""

COLUMNS = ("key", "type", "default", "bounds", "unit", "meaning")

UNIT_ENDINGS = ("seconds", "bytes", "tokens", "turns", "versions", "characters")
"""Endings of keys that name a unit."""

PACKAGE = Path(__file__).parents[2]
"""The folder of the package `rose`; defaults inside it are files that come with ROSE."""

SENTENCE = re.compile(r"(?P<name>\w+) must be (from )?(?P<bounds>[^:]+)(:.*)?")
"""An error message of a section, with the bounds of one field."""

NAMES = {str: "text", int: "integer", float: "number", bool: "boolean", Path: "path", Any: "value"}
"""Names of types in TOML's terms."""

CONFIG_INTRODUCTION = """A run is configured by one TOML file (`--config`), by variables `ROSE_SECTION__KEY` and by
`--set SECTION.KEY=VALUE`. A flag overrides a variable, and a variable overrides the file. `rose
config` prints the resolved configuration with the origin of every value; an unknown key or an
invalid value is refused with one sentence.

A key that is not in this page but follows another key is set by that key: """ + (
    "; ".join(f"{code(key)} from {' and '.join(map(code, sources))}" for key, sources in SHARED.items()) + "."
)


def configuration_page() -> str:
    """Return the page of the configuration. Raises ValueError if a section is not in exactly one group."""
    grouped = [section for sections in GROUPS.values() for section in sections]
    if sorted(grouped) != sorted(section_types()):
        raise ValueError("reference.GROUPS does not have every section of the configuration once")
    parts = []
    for role, sections in GROUPS.items():
        parts.append(f"## {role}\n")
        parts += [_config_section(section) for section in sections]
    return page(Page.CONFIGURATION, CONFIG_INTRODUCTION, parts)


def _config_section(section: str) -> str:
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
        unit = next((each for each in UNIT_ENDINGS if field.name.endswith(each)), "")
        yield [
            code(key),
            _type(kind),
            _field_default(field),
            bounds.get(field.name, ""),
            unit,
            sentences.get(field.name, ""),
        ]


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
            return "table" if arguments[1] is Any else f"table of {_type(arguments[1])}"
        case _:
            return f"list of {_type(arguments[0])}"


def _field_default(field: "dataclasses.Field[Any]") -> str:
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


TOPICS_INTRODUCTION = """ROSE has one topic for each kind of record. `rose topics create` creates the topics;
`rose topics check` compares a broker with this page. `broker.namespace` is put before every name.

The fields of the records are in [asyncapi.json](../asyncapi.json), which `rose topics asyncapi` prints.

- In a key, `{field}` is the value of that field, and `[a|b]` is one of these texts or none.
- The number of partitions is a setting of the section `topics`; the number in brackets is its default.
- Producers and consumers are the roles of `rose topics acl`. `executor` stands for lenders too, `view` for the commands
  that only read, and `operator` for the commands that change a run."""

DELETED = "until no reader needs the record"
"""Retention of topics from which time deletes nothing."""

PERIODS = ((DAY, "day"), (HOUR, "hour"), (MINUTE, "minute"))


def topics_page() -> str:
    """Return the page of the topics."""
    return page(Page.TOPICS, TOPICS_INTRODUCTION, (_records(), _settings(), _dead_letters()))


def _records() -> str:
    rows = [
        [code(topic.name), _record(topic), code(topic.key), _roles(topic, "writes"), _roles(topic, "reads")]
        for topic in RECORD_TOPICS
    ]
    return f"## Records\n\n{table(('topic', 'record', 'key', 'producers', 'consumers'), rows)}"


def _settings() -> str:
    rows = [
        [code(topic.name), _partitions(topic), code(topic.config["cleanup.policy"]), _retention(topic)]
        for topic in RECORD_TOPICS
    ]
    return f"## Settings\n\n{table(('topic', 'partitions', 'cleanup policy', 'retention'), rows)}"


def _dead_letters() -> str:
    first = DEAD_LETTERS[0]
    return (
        "## Dead letter queues\n\n"
        "Every topic `TOPIC` has a dead letter queue `TOPIC.dlq`. A dead letter is the message as it came, with the "
        "reason and the origin in headers. The settings of all dead letter queues are the same:\n\n"
        + table(
            ("key", "partitions", "cleanup policy", "retention"),
            [[code(first.key), _partitions(first), code(first.config["cleanup.policy"]), _retention(first)]],
        )
    )


def _record(topic: Topic) -> str:
    assert topic.record is not None, "only a dead letter queue has no record"
    summary = class_docstring(topic.record).partition("\n\n")[0]
    return f"{code(topic.record.__name__)}: {' '.join(summary.split())}"


def _roles(topic: Topic, use: str) -> str:
    return ", ".join(name for name, role in ROLES.items() if topic in getattr(role, use))


def _partitions(topic: Topic) -> str:
    setting = topic.partition_setting
    count = Partitions().count_of(setting)
    return str(count) if setting is PartitionSetting.ONE else f"{code(f'topics.{setting.value}')} ({count})"


def _retention(topic: Topic) -> str:
    config = topic.config_with(DEFAULT_RETENTION)
    milliseconds = int(config.get("retention.ms", "-1"))
    if "compact" in config["cleanup.policy"] and milliseconds < 0:
        return "the newest record of each key"
    if milliseconds < 0:
        return DELETED
    size, name = next((size, name) for size, name in PERIODS if milliseconds % size == 0)
    count = milliseconds // size
    return f"{count} {name}{'s' if count > 1 else ''}"


UNITS = ("seconds", "bytes", "ratio", "nats")
"""Units at the end of a metric's name, before `_total`. A metric without such an end is a count."""


@dataclass(frozen=True, slots=True)
class Source:
    """A module that declares metrics."""

    module: str
    role: str
    """The processes that export the metrics, except metrics in `roles`."""
    roles: tuple[tuple[str, str], ...] = ()
    """Pairs of a beginning of names and the processes that export metrics with such names."""


SOURCES = (
    Source("rose.topics.metrics", "every role"),
    Source("rose.pipeline.routing.metrics", "router"),
    Source("rose.pipeline.control.metrics", "control app"),
    Source("rose.workers.environments.metrics", "environment worker"),
    Source(
        "rose.workers.executor.metrics",
        "executor, lender",
        (("rose_lender_serving_requests", "lender, observed server"), ("rose_lender_", "lender")),
    ),
    Source("rose.workers.lender.observe", "observed server"),
    Source("rose.workers.weights.receive", "executor, lender"),
    Source("rose.workers.trainer.metrics", "trainer"),
    Source("rose.workers.weights.publish", "trainer"),
    Source("rose.workers.evaluator.metrics", "evaluator"),
)
"""All modules that declare metrics, in the order of the page."""


SERVERS = (
    ("vllm:time_to_first_token_seconds", "Time that users waited for their first token."),
    ("vllm:inter_token_latency_seconds", "Time that users waited for each further token."),
)
"""The metrics of a vLLM server that the dashboards query; all are histograms."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric: one row of the page."""

    name: str
    """Name in queries; for a histogram without `_bucket`, `_sum` and `_count`."""
    kind: str
    labels: tuple[str, ...]
    role: str
    sentence: str

    @property
    def unit(self) -> str:
        """The unit that the name contains; empty for a count."""
        last = self.name.removesuffix("_total").rpartition("_")[2]
        return last if last in UNITS else ""

    @property
    def series(self) -> tuple[str, ...]:
        """Names that a query may ask for."""
        if self.kind == "histogram":
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.name,)


def metrics() -> list[Metric]:
    """Every metric of ROSE. Imports the modules that declare metrics."""
    found: dict[str, Metric] = {}
    for source in SOURCES:
        for family, labels in _declared_metrics(import_module(source.module)):
            name = family.name + ("_total" if family.type == "counter" else "")
            role = next((role for begins, role in source.roles if name.startswith(begins)), source.role)
            found.setdefault(name, Metric(name, family.type, labels, role, family.documentation))
    return list(found.values())


def servers() -> list[Metric]:
    """Metrics that vLLM exports and ROSE does not."""
    return [Metric(name, "histogram", ("model_name", "engine"), "vLLM server", sentence) for name, sentence in SERVERS]


def _declared_metrics(module: ModuleType) -> Iterator[tuple[Family, tuple[str, ...]]]:
    """Families that a module declares, each with its labels: by metrics, and by collectors that describe theirs."""
    for value in vars(module).values():
        if isinstance(value, Counter | Gauge | Histogram):
            for family in value.describe():
                yield family, _metric_labels(value)
        elif isinstance(value, type) and value.__module__ == module.__name__ and hasattr(value, "describe"):
            for family in value.describe():
                yield family, _metric_labels(family)


def _metric_labels(declared: object) -> tuple[str, ...]:
    return tuple(getattr(declared, "_labelnames", ()))  # prometheus_client has no public name for them


def metrics_page(metrics_found: Sequence[Metric]) -> str:
    """Return the page of the metrics."""
    rows = [
        [
            code(each.name),
            each.kind,
            ", ".join(code(label) for label in each.labels),
            each.unit,
            each.role,
            each.sentence,
        ]
        for each in metrics_found
    ]
    return page(
        Page.METRICS,
        METRICS_INTRODUCTION,
        ["## All metrics\n", table(("name", "type", "labels", "unit", "role", "meaning"), rows)],
    )


METRICS_INTRODUCTION = """Every process serves Prometheus metrics on its own port, if one is configured
(`metrics.*`). Port 0 is off.

| role | port |
| --- | --- |
| any role in a container | `metrics.port` |
| trainer | `metrics.trainer` |
| router, control app, environment worker, executor or lender *n* | the port of its kind, plus *n* |

The metrics of a lender come from its sidecar. The server's own `/metrics` has the latencies of its users.

- A histogram has `_bucket`, `_sum` and `_count`.
- A counter restarts at 0 with its process: use `rate` or `increase`. Counters with known labels begin at 0.
- An executor that starts again exports no engine metrics until it has started: figures are missing rather than old.
- The client's own `process_*` and `python_*` are exported too."""
