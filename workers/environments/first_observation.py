"""A first observation with several roles and tools, as the folder's chat template writes it.

Keeps true
- The text is the template's, message by message: a template that changes a message beyond its outer white space, leaves
  one out, or refuses a role is refused with one sentence.
- What the template writes is kept apart from what the environment wrote, so that only the template can write marks.
- A conversation that goes on from here has the framing of every later turn.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from rose.workers.environments.chat_template import (
    OBSERVATIONS,
    TRIMS,
    Messages,
    Template,
    TurnFormatError,
)
from rose.workers.environments.protocol import FirstObservation, Message

STAND_IN = "\U000f0000{}\U000f0001"
"""Stands for the content of a message, by its number: private characters that no template treats in a special way."""

STAND_INS = re.compile("\U000f0000([0-9]+)\U000f0001")


class Piece(NamedTuple):
    """A part of the text."""

    text: str
    by_template: bool
    """Whether the template wrote it; otherwise it is the content of a message."""


PROBE = FirstObservation(
    messages=(Message(role="system", content="Answer in one line."), Message(role="user", content="7 and 3?")),
    tools=({"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}},),
)
"""A first observation that folders are tried with."""


def written(template: Template, observation: FirstObservation) -> list[Piece]:
    """Return the text of a first observation in pieces. Raises TurnFormatError."""
    messages = as_template_reads(observation.messages)
    whole = template.render(messages, observation.tools)
    shape = template.render(
        [each | {"content": STAND_IN.format(n)} for n, each in enumerate(messages)], observation.tools
    )
    pieces = _split(whole, shape, observation.messages, template)
    if not whole.endswith(template.framing.suffix):
        raise TurnFormatError(
            f"{template.folder}: its chat template does not end this first observation as it ends others, with "
            f"{template.framing.suffix!r}: let the last message be the user's"
        )
    _check_next_turn(template, messages, observation, whole)
    return pieces


def as_template_reads(messages: Sequence[Message]) -> Messages:
    """Return the messages as plain dicts."""
    return [{"role": each.role, "content": each.content} for each in messages]


def _split(whole: str, shape: str, messages: Sequence[Message], template: Template) -> list[Piece]:
    """Split the text where its shape has a stand-in."""
    between = STAND_INS.split(shape)
    literals, numbers = between[::2], [int(number) for number in between[1::2]]
    if sorted(numbers) != list(range(len(messages))):
        lost = next((n for n in range(len(messages)) if numbers.count(n) != 1), 0)
        raise TurnFormatError(
            f"{template.folder}: its chat template does not write message {lost} ({messages[lost].role}) of the first "
            "observation exactly once: leave it out, or write a template that does"
        )
    pieces, at = [Piece(literals[0], True)], len(literals[0])
    matches = whole.startswith(literals[0])
    for number, literal in zip(numbers, literals[1:], strict=True):
        said = messages[number].content
        variants = dict.fromkeys(trim(said) for trim in TRIMS.values())
        found = next((text for text in variants if whole.startswith(text + literal, at)), None)
        if found is None or not matches:
            raise TurnFormatError(
                f"{template.folder}: its chat template changes message {number} ({messages[number].role}) of the first "
                f"observation, or what stands around it: {said[:40]!r}"
            )
        pieces += [Piece(found, False), Piece(literal, True)]
        at += len(found) + len(literal)
    return pieces


def _check_next_turn(template: Template, messages: Messages, observation: FirstObservation, whole: str) -> None:
    """Check that an action and an observation behind this first observation are framed as everywhere else."""
    if not template.action:
        return
    framing, action = template.framing, template.action
    more = [{"role": "assistant", "content": action}, {"role": "user", "content": OBSERVATIONS[0]}]
    longer = template.render([*messages, *more], observation.tools)
    behind = f"{action}{framing.stop}{framing.prefix}{OBSERVATIONS[0]}{framing.suffix}"
    if longer == whole + behind or (not template.only_appends and longer.endswith(behind)):
        return
    raise TurnFormatError(
        f"{template.folder}: its chat template does not only append behind this first observation, so a context could "
        "not grow by what was sampled: use other roles, or a template that leaves earlier messages as they are"
    )
