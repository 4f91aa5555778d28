"""A turn at an endpoint: what has come of it, the pieces of its answer, and why there are no more of them.

Keeps true: trouble with one turn says nothing of the others, unless it is of a kind that every turn would meet.
"""

import asyncio
from dataclasses import dataclass, field

import msgspec

from rose.schemas.errors import RoseError
from rose.schemas.prompts import Sampling
from rose.workers.executor.vllm.types import EngineBroken, EngineRefusal

FATAL_STATUSES = (401, 403, 404, 405)
"""Statuses that every turn would meet: this endpoint answers none."""

BUSY_STATUSES = (408, 429, 503, 504)
"""Statuses of a turn that there is no room for at the moment."""


@dataclass(slots=True, eq=False)
class EndpointTurn:
    """A turn, waiting here or at the endpoint. Times are unix seconds."""

    name: str
    context: list[int]
    sampling: Sampling
    version: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    sent_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    first_tokens: int = 0
    """That came at once with the first one."""
    counted: int = 0
    """Tokens that the window before has seen."""
    counted_at: float = 0.0
    share_before: float = 0.0
    """What the running sum of seconds a turn was when it was sent."""
    task: asyncio.Task[None] | None = None


class Logprobs(msgspec.Struct):
    """One of each for every token of a choice; tokens are named by TOKEN and their id."""

    token_logprobs: list[float]
    top_logprobs: list[dict[str, float] | None] = []


class Choice(msgspec.Struct):
    """What is new of one answer. Token ids are there because they were asked for."""

    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens_details: CachedTokens | None = None


class CompletionChunk(msgspec.Struct):
    """Of an answer: what is new in it."""

    choices: list[Choice]
    usage: Usage | None = None


class StreamError(msgspec.Struct):
    """Why a turn is ended."""

    message: str
    code: int
    """An HTTP status."""


class StreamBroken(msgspec.Struct):
    """Comes where a piece would, and none follows."""

    error: StreamError


class TurnLost(RoseError):
    """A turn that was not begun, or not ended, while the endpoint may be well."""

    def __init__(self, reason: str, *, failed: bool) -> None:
        """`failed`: the endpoint did at this turn, and may do so again. Else it had no room for it."""
        super().__init__(reason)
        self.failed = failed


def error_for_status(url: str, status: int, message: str) -> RoseError:
    """What is raised of a turn that is answered with this status: EngineBroken, EngineRefusal or TurnLost."""
    if status < 400 or status in FATAL_STATUSES:
        return EngineBroken(f"{url} answers a turn with {status}: {message}")
    if status in BUSY_STATUSES:
        return TurnLost(f"{url} has no room for a turn: {message}", failed=False)
    if status < 500:
        return EngineRefusal(f"{url} does not take the turn: {message}")
    return TurnLost(f"{url} fails at a turn: {message}", failed=True)
