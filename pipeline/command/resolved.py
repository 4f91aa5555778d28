"""The resolved configuration as TOML, for people and for the roles of a run.

Keeps true: reading back what was written gives the same configuration.
"""

import dataclasses
import json
import re
import textwrap
from enum import Enum
from pathlib import Path
from typing import Any

from pipeline.command.config import NOT_SHOWN, SHARED, Config, section_types
from pipeline.command.documentation import field_sentences

COLUMNS = 110

_CONFIDENTIAL = r"(?i:pass(?:word|phrase)|secret|credential|token|(?:api|access)_?key|key\.pem|oauthbearer\.config)"
_QUOTED = r'(?:[^"\\]|\\.)*"'

SECRET = re.compile(
    rf'("[^"\\]*{_CONFIDENTIAL}[^"\\]*" = "|"--(?:api[-_]key|hf[-_]token)(?:=|", ")){_QUOTED}',
)
"""What is told in confidence, in TOML as it is written here: settings of librdkafka, variables and flags of vLLM."""


def resolved_toml(config: Config, *, explained: bool) -> str:
    """Every field and its value; if `explained`, with its sentence and who said it."""
    lines: list[str] = []
    for section, declared_by in section_types().items():
        lines += [f"[{section}]"]
        values = getattr(config.settings, section)
        sentences = field_sentences(declared_by)
        for field in dataclasses.fields(declared_by):
            path = f"{section}.{field.name}"
            if path in SHARED:
                continue
            if explained:
                said = f"{sentences.get(field.name, '')} ({config.origins.get(path, 'default')})".strip()
                lines += textwrap.wrap(said, COLUMNS, initial_indent="# ", subsequent_indent="# ")
            value = getattr(values, field.name)
            lines.append(f"# {field.name} =" if value is None else f"{field.name} = {_toml(value)}")
        lines.append("")
    return "\n".join(lines)


def without_secrets(resolved: str) -> str:
    """The resolved TOML for others to read: what librdkafka and a server are told in confidence is left out."""
    return SECRET.sub(rf'\1{NOT_SHOWN}"', resolved)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Enum):
        return _toml(value.value)
    if isinstance(value, Path):
        return _toml(str(value))
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if dataclasses.is_dataclass(value):
        return _toml({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, dict):
        pairs = (f"{_toml(str(key))} = {_toml(inner)}" for key, inner in value.items() if inner is not None)
        return f"{{ {', '.join(pairs)} }}" if value else "{}"
    return f"[{', '.join(_toml(item) for item in value)}]"
