"""Chat templates rendered as transformers renders them, without a clock.

Keeps true
- A template runs in jinja2's sandbox. It gets no date, so its output is the same after every restart.
- It gets the variables that transformers passes: the messages, the names of special tokens, and empty tools and
  documents.

This module imports jinja2, so modules that seldom need a template import it late.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

Messages = list[dict[str, str]]


class GenerationTag(Extension):
    """`{% generation %}`, by which templates mark what the policy says: its body is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the tag: its body is rendered as it stands."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return str(caller())


def rendering(template: str, named: Mapping[str, str]) -> Callable[[Messages], str]:
    """A function from messages to text, the generation prompt behind them. Raises whatever the template does."""
    environment = _environment()
    parsed = environment.from_string(template)

    def render(messages: Messages) -> str:
        variables = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
        return str(parsed.render(**variables, **named))

    return render


def names_used(template: str) -> set[str]:
    """Return the names of the variables that a template reads. Raises jinja2's TemplateError."""
    environment = _environment()
    return meta.find_undeclared_variables(environment.parse(template))


def string_constants(template: str) -> list[str]:
    """Return the strings in a template's code that are more than white space, once each. Raises TemplateError."""
    constants = _environment().parse(template).find_all(nodes.Const)
    texts = dict.fromkeys(each.value for each in constants if isinstance(each.value, str))
    return [text for text in texts if text.strip()]


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.globals["raise_exception"] = _refuse
    environment.filters["tojson"] = _as_json
    return environment


def _refuse(reason: str) -> str:
    raise TemplateError(reason)


def _as_json(value: Any, ensure_ascii: Any = False, indent: Any = None, **layout: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **layout)
