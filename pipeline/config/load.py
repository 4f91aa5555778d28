"""The configuration: one TOML file, environment variables and flags, with the origin of each value.

Keeps true
- The precedence is: flags, then `ROSE_SECTION__FIELD` variables of the environment, then the file, then the defaults.
- An unknown key or an invalid value is reported in one sentence that names its origin.
- A role's section is the role's own dataclass: fields, defaults and docstrings are declared there only. Fields that
  several roles share (`SHARED`) are set once, in the section that they come from.
"""

import dataclasses
import difflib
import json
import math
import os
import re
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from rose.pipeline.config.options import Common
from rose.pipeline.config.settings import SHARED, Settings, check_together, field_docs, section_types
from rose.schemas.errors import UsageError
from rose.schemas.wire import reject_duplicate_keys
from rose.topics.catalog import Partitions, Retention
from rose.topics.settings import BusSettings, parse_properties
from rose.workers.environments.registry import BUILT_IN
from rose.workers.weights.config import WeightsConfig
from rose.workers.weights.trust import Trust, make_trust

COLUMNS = 110

_CONFIDENTIAL = r"(?i:pass(?:word|phrase)|secret|credential|token|(?:api|access)_?key|key\.pem|oauthbearer\.config)"
_QUOTED = r'(?:[^"\\]|\\.)*"'

SECRET = re.compile(
    rf'("[^"\\]*{_CONFIDENTIAL}[^"\\]*" = "|"--(?:api[-_]key|hf[-_]token)(?:=|", ")){_QUOTED}',
)
"""Secrets in resolved TOML: passwords and keys in librdkafka settings, in variables and in flags of vLLM."""


PREFIX = "ROSE_"
DELIMITER = "__"

LINKS = ("tcp://", "udp://")
"""Prefixes of values of variables that Kubernetes sets for a service: ROSE_METRICS_PORT for a service rose-metrics."""

RUNS = Path("runs")
"""Folder in which `--run NAME` looks for a run."""

RESOLVED = "config.toml"
"""File in a run's folder with its complete configuration."""

CONFIDENTIAL = ("broker.properties", "serving.environment", "serving.flags")
"""Fields that may contain a password or key: error messages do not show their values."""

PROPERTIES = ("broker", "properties")
"""The field for librdkafka's settings, whose names contain dots."""

ANY_TYPE = ("executor", "vllm")
"""The field whose values have types that only vLLM knows."""

NOT_SHOWN = "(not shown)"
"""Text in place of a password where a configuration is shown."""

KINDS = {
    "tuple_type": 'must be a list, as ["a", "b"]',
    "list_type": 'must be a list, as ["a", "b"]',
    "dict_type": 'must be a table, as {name = value} in TOML and {"name": value} elsewhere',
}
"""Messages that replace pydantic's where those use terms of Python."""

FIELD = re.compile(r"[a-z]+\.[a-z_]+")
"""A field of the configuration in a sentence."""

AT_LINE = re.compile(r"\(at line (\d+),")
"""Position in an error of tomllib; an error without position is at the end of the file."""

KEY_LINE = re.compile(r"""\s*(\[[^\]]*\]+|[\w.'"-]+(?=\s*=))""")
"""Start of a line that sets a key or begins a table."""

Values = dict[str, Any]
"""Sections by name, with the given values of their fields."""

Override = tuple[str, tuple[str, ...], Any]
"""Origin, path (section, field, and further parts) and value of a setting."""


@dataclass(frozen=True, slots=True)
class Config:
    """The resolved configuration."""

    settings: Settings
    origins: Mapping[str, str]
    """Origin of each given value, by `section.field`; fields with their default are not listed."""

    @property
    def run_folder(self) -> Path:
        """The folder for all files that the run writes."""
        return self.settings.run.folder / self.settings.run.name

    @property
    def partitions(self) -> Partitions:
        """Number of partitions of each kind of topic."""
        topics = self.settings.topics
        return Partitions(
            home=topics.home_partitions,
            slots=topics.inbox_slots,
            samples=topics.sample_partitions,
            chunks=topics.chunk_partitions,
            cells=topics.cells,
        )

    @property
    def retention(self) -> Retention:
        """How long the records of each topic are kept."""
        topics = self.settings.topics
        families = (each.name for each in dataclasses.fields(Retention))
        return Retention(**{family: getattr(topics, f"{family}_retention_seconds") for family in families})

    @property
    def environments(self) -> tuple[str, ...]:
        """Environment names that a prompt may use: built-in environments and those of the configuration."""
        return (*BUILT_IN, *self.settings.environment.environments)

    @property
    def weights(self) -> WeightsConfig:
        """The weights section; if `dtype` is not set, versions are sent in the engines' dtype."""
        weights = self.settings.weights
        return dataclasses.replace(weights, dtype=weights.dtype or self.settings.executor.dtype)

    def import_paths(self) -> list[str]:
        """Return the folders to import environments from. Raises UsageError if one does not exist."""
        paths = self.settings.environment.import_paths
        for path in paths:
            if not path.exists():
                own = ", ".join(self.settings.environment.environments) or "environments"
                raise UsageError(f"environment.import_paths: {path.absolute()} is not there to import {own} from")
        return [str(path) for path in paths]

    def trust(self, settings: BusSettings) -> Trust:
        """Return the check of which policy versions are the run's. Raises UsageError for an invalid key file."""
        return make_trust(settings, self.settings.trainer.model_id, self.weights)

    def bus(self) -> BusSettings:
        """Return the settings to reach the broker. Raises UsageError if no broker is named."""
        broker = self.settings.broker
        if not broker.bootstrap_server:
            raise UsageError("no broker is named: give --bootstrap-server HOST:PORT, or --run NAME for that of a run")
        return BusSettings(
            broker.bootstrap_server, broker.namespace, broker.properties, broker.embedded, self.retention
        )


def load(common: Common, *, resolved: bool = False) -> Config:
    """Read all sources and resolve them.

    `resolved`: the file is a resolved configuration, so the environment is not read again. Raises UsageError.
    """
    merged: Values = {}
    origins: dict[str, str] = {}
    for origin, path, value in [
        *_file_overrides(common),
        *([] if resolved else _environment_overrides()),
        *_flag_overrides(common),
    ]:
        _check_known(path, origin)
        if path[:2] == PROPERTIES:
            for parts, leaf in _dotted(path[2:], value):
                _say(merged, (*PROPERTIES, ".".join(parts)) if parts else PROPERTIES, leaf, origin)
        else:
            _say(merged, path, value, origin)
        origins[".".join(path[:2])] = origin
    given = parse_properties(common.properties or [], common.command_config)
    if given:
        _set_value(merged, ("broker", "properties"), given)
        origins["broker.properties"] = "-X or --command-config"
    for field, sources in SHARED.items():
        values = [_value_or_default(merged, *source.split(".")) for source in sources]
        if len(values) == 1:
            _set_value(merged, tuple(field.split(".")), values[0])
        elif all(isinstance(value, str | Path) for value in values):  # else the section with the wrong value is refused
            _set_value(merged, tuple(field.split(".")), Path(*values))
    settings = _validate(merged, origins)
    _check_values(settings, merged, origins)
    try:
        check_together(settings)
    except UsageError as error:
        raise UsageError(f"{_origin_of(str(error), origins)}{error}") from None
    config = Config(settings, origins)
    if common.run is not None and origins.get("run.name") == origins.get("run.folder") == str(
        RUNS / common.run / RESOLVED
    ):
        _refuse_moved(RUNS / common.run, config)
    return config


def _refuse_moved(folder: Path, config: Config) -> None:
    """Raise UsageError if the run in `folder` would write to another folder, which may be that of another run."""
    if folder.resolve() != config.run_folder.resolve():
        raise UsageError(
            f"the run in {folder} was in {config.run_folder}, as its {RESOLVED} says: move the folder back, or start "
            f"the command in a folder from which {config.run_folder} is this folder"
        )


def _file_overrides(common: Common) -> Iterator[Override]:
    if common.run is not None and common.config is not None:
        raise UsageError("--run and --config both name a configuration: give one of them")
    path = common.config if common.run is None else RUNS / common.run / RESOLVED
    if path is None:
        return
    if path == Path():
        raise UsageError("--config is empty or a folder: write the path of a file, or leave it out")
    for section, fields in _read_toml(path).items():
        if not isinstance(fields, dict):
            raise UsageError(f"{path}: {section} stands in no section; the sections are {', '.join(section_types())}")
        for name, value in fields.items():
            yield str(path), (section, name), value


def _read_toml(path: Path) -> dict[str, Any]:
    """Return the content of the file. Raises UsageError, which names the key before the first syntax error."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no TOML: {error}") from None
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        key = _key_before(str(error), text)
        raise UsageError(f"{path} is no TOML: {error}{f', at {key}' if key else ''}") from None


def _key_before(reason: str, text: str) -> str:
    """Return the key at the error without its value, which may be a password."""
    lines = text.rstrip().splitlines()
    at = AT_LINE.search(reason)
    before = lines[: int(at[1])] if at else lines
    return next((found[1] for line in reversed(before) if (found := KEY_LINE.match(line))), "")


RANK_VARIABLES = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE"})
"""Environment variables by which a launcher tells a process its rank."""


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that `load` reads, for a process that reads a resolved file only.

    The variables of a launcher of ranks are left out, too: a process of a local run is no rank of the command's.
    """
    return {
        name: value
        for name, value in environment.items()
        if DELIMITER not in _path_of_variable(name) and name not in RANK_VARIABLES
    }


def _path_of_variable(variable: str) -> str:
    """Return the path in a variable's name, SECTION__FIELD in lower case; empty without ROSE's prefix."""
    return variable[len(PREFIX) :].lower() if variable.upper().startswith(PREFIX) else ""


def _environment_overrides() -> Iterator[Override]:
    said_as: dict[str, str] = {}
    for variable in os.environ:
        if (
            other := said_as.setdefault(_path_of_variable(variable), variable)
        ) != variable and DELIMITER in _path_of_variable(variable):
            raise UsageError(f"{variable} and {other} say the same field: leave one of them out")
        section, delimiter, _ = _path_of_variable(variable).partition(DELIMITER)
        if delimiter and section not in Settings.model_fields:
            raise UsageError(f"{variable}: there is no section {section}{_did_you_mean(section, section_types())}")
        if not delimiter and section in Settings.model_fields:
            one = f"{PREFIX}{section}{DELIMITER}FIELD".upper()
            raise UsageError(f"{variable}: {section} is a section: say its fields one by one, as {one}")
        if not delimiter and section in _fields_by_one_underscore() and not os.environ[variable].startswith(LINKS):
            meant = _fields_by_one_underscore()[section]
            raise UsageError(f"{variable}: two underscores stand between section and field: write it as {meant}")
    fields = {name: variable for name, variable in said_as.items() if DELIMITER in name}
    if not fields:
        return
    for name, variable in fields.items():
        if whole := next((other for other in fields if name.startswith(f"{other}{DELIMITER}")), ""):
            raise UsageError(f"{variable} says a part of what {fields[whole]} says: say all of it by one of them")
    from pydantic_settings import EnvSettingsSource  # slow to import, and rarely needed

    source = EnvSettingsSource(cast(Any, Settings), env_prefix=PREFIX, env_nested_delimiter=DELIMITER)
    for section, fields in source().items():
        for name, value in fields.items():
            variable = f"{PREFIX}{section}{DELIMITER}{name}".upper()
            yield variable, (section, name), _from_text(value, variable, (section, name))


@cache
def _fields_by_one_underscore() -> dict[str, str]:
    """Return the correct variable names, by the path of a name with one underscore instead of two."""
    return {
        f"{section}_{field.name}": f"{PREFIX}{section}{DELIMITER}{field.name}".upper()
        for section, declared_by in section_types().items()
        for field in dataclasses.fields(declared_by)
    }


def _flag_overrides(common: Common) -> Iterator[Override]:
    for setting in common.settings or []:
        path, equals, value = setting.partition("=")
        if not equals or "." not in path:
            raise UsageError(f"--set {setting}: write it as --set section.key=value")
        parts = tuple(path.split("."))
        yield f"--set {path}", parts, _from_text(value, f"--set {path}", parts)
    for flag, path, override in common.overrides:
        yield flag, tuple(path.split(".")), override
    if common.bootstrap_server is not None:
        yield "--bootstrap-server", ("broker", "bootstrap_server"), common.bootstrap_server
    if common.namespace is not None:
        yield "--namespace", ("broker", "namespace"), common.namespace


def _from_text(value: Any, origin: str, path: tuple[str, ...]) -> Any:
    """Decode a list or table from JSON. Other text stays, without its line end; pydantic converts it.

    Within `ANY_TYPE` every text that is JSON is decoded.
    """
    if isinstance(value, dict) and path[:2] == ANY_TYPE:
        return {name: _from_text(inner, origin, (*path, name)) for name, inner in value.items()}
    if isinstance(value, str):
        value = value.rstrip("\r\n")
    if isinstance(value, str) and (value[:1] in ("[", "{") or path[:2] == ANY_TYPE):
        if value in ("True", "False"):  # as other settings may be written
            return value == "True"
        try:
            return json.loads(value, object_pairs_hook=reject_duplicate_keys)
        except json.JSONDecodeError:
            return value
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{origin}: {error}") from None
    return value


def _dotted(parts: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield librdkafka's settings by the parts of their names: TOML makes nested tables of a dotted key."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _dotted((*parts, key), inner)
    else:
        yield parts, value


def _say(into: Values, path: tuple[str, ...], value: Any, origin: str) -> None:
    """Set a value. Raises UsageError if a parent of the path already has a value that is no table."""
    whole: Any = into
    for name in path[:-1]:
        whole = whole.get(name, {})
        if not isinstance(whole, dict):
            raise UsageError(f"{origin}: {'.'.join(path[:2])} is set as one value, and has no parts")
    _set_value(into, path, value)


def _set_value(into: Values, path: tuple[str, ...], value: Any) -> None:
    """Set a value; tables are merged key by key."""
    for name in path[:-1]:
        into = into.setdefault(name, {})
    last = path[-1]
    if isinstance(value, dict) and isinstance(into.get(last), dict):
        for key, inner in value.items():
            _set_value(into[last], (key,), inner)
    else:
        into[last] = value


def _check_known(path: tuple[str, ...], origin: str) -> None:
    sections = section_types()
    section, name = path[:2]
    if section not in sections:
        raise UsageError(f"{origin}: there is no section {section}{_did_you_mean(section, sections)}")
    names = [field.name for field in dataclasses.fields(sections[section])]
    if name not in names:
        raise UsageError(f"{origin}: there is no {section}.{name}{_did_you_mean(name, names)}")
    if f"{section}.{name}" in SHARED:
        sources = " and ".join(SHARED[f"{section}.{name}"])
        raise UsageError(f"{origin}: {section}.{name} always follows {sources}: set that")


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word.lower(), list(known), n=1)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}"


def _value_or_default(merged: Values, section: str, name: str) -> Any:
    if name in merged.get(section, {}):
        return merged[section][name]
    return getattr(section_types()[section](), name)


def _validate(merged: Values, origins: Mapping[str, str]) -> Settings:
    try:
        return Settings(**merged)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        origin = origins.get(".".join(str(part) for part in first["loc"][:2]))
        quiet = first["loc"][1:] == () or path.startswith(CONFIDENTIAL)
        shown = "" if quiet else f", not {first['input']!r}"
        message = KINDS.get(first["type"], first["msg"].removeprefix("Value error, "))
        raise UsageError(f"{f'{origin}: ' if origin else ''}{path}: {message}{shown}") from None


def _check_values(settings: Settings, given: Values, origins: Mapping[str, str]) -> None:
    """Check the rules for the fields of every section; `given` are the values as written. Raises UsageError."""
    for section, declared_by in section_types().items():
        for field in dataclasses.fields(declared_by):
            path, value = f"{section}.{field.name}", getattr(getattr(settings, section), field.name)
            origin = f"{origins[path]}: " if path in origins else ""
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{origin}{path} ({value}) must be a finite number")
            if path in CONFIDENTIAL and any(NOT_SHOWN in each for each in _texts(value)):
                raise UsageError(
                    f"{origin}{path} has {NOT_SHOWN} in it, which `rose config` writes in the place of a password: "
                    "say what is meant, or leave it out"
                )
            files = value if isinstance(value, list | tuple) else [value]
            written = given.get(section, {}).get(field.name)
            if "" in (written if isinstance(written, list) else [written]) and isinstance(files[0], Path):
                raise UsageError(f"{origin}{path} is empty, which names no file: write a path, or leave it out")
            for file in files:
                if isinstance(file, Path) and "\0" in str(file):
                    raise UsageError(f"{origin}{path} ({str(file)!r}) names no file: it has a NUL in it")
                if isinstance(file, Path) and str(file).startswith(("~", "$", "%")):
                    raise UsageError(f"{origin}{path} ({file}): {str(file)[0]} is not expanded, write the whole path")


def _texts(value: list[str] | dict[str, str]) -> Iterable[str]:
    return value.values() if isinstance(value, dict) else value


def _origin_of(sentence: str, origins: Mapping[str, str]) -> str:
    """Return the origin of the first field in the sentence that has one."""
    return next((f"{origins[path]}: " for path in FIELD.findall(sentence) if path in origins), "")


def resolved_toml(config: Config, *, explained: bool) -> str:
    """Return every field with its value as TOML; `explained` adds its description and origin as comments."""
    lines: list[str] = []
    for section, declared_by in section_types().items():
        lines += [f"[{section}]"]
        values = getattr(config.settings, section)
        sentences = field_docs(declared_by)
        for field in dataclasses.fields(declared_by):
            path = f"{section}.{field.name}"
            if path in SHARED:
                continue
            if explained:
                comment = f"{sentences.get(field.name, '')} ({config.origins.get(path, 'default')})".strip()
                lines += textwrap.wrap(comment, COLUMNS, initial_indent="# ", subsequent_indent="# ")
            value = getattr(values, field.name)
            lines.append(f"# {field.name} =" if value is None else f"{field.name} = {as_toml(value)}")
        lines.append("")
    return "\n".join(lines)


def without_secrets(resolved: str) -> str:
    """Return the resolved TOML without secrets: librdkafka's passwords, and keys in variables and flags of a server."""
    return SECRET.sub(rf'\1{NOT_SHOWN}"', resolved)


def as_toml(value: Any) -> str:
    """Return a value as TOML, on one line; tables are inline tables."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Enum):
        return as_toml(value.value)
    if isinstance(value, Path):
        return as_toml(str(value))
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if dataclasses.is_dataclass(value):
        return as_toml({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, dict):
        pairs = (f"{as_toml(str(key))} = {as_toml(inner)}" for key, inner in value.items() if inner is not None)
        return f"{{ {', '.join(pairs)} }}" if value else "{}"
    return f"[{', '.join(as_toml(item) for item in value)}]"
