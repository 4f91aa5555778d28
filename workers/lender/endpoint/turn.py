"""A turn at an endpoint: its state, the chunks of its answer, and its errors.

Keeps true: an error of one turn does not affect other turns, unless every turn would meet the same error.
"""

import asyncio
from dataclasses import dataclass, field

import msgspec

from rose.schemas.errors import RoseError
from rose.schemas.prompts import Sampling
from rose.schemas.sampled_tokens import SampledTokensBuilder
from rose.workers.executor.vllm.types import EngineBroken, EngineRefusal

FATAL_STATUSES = (401, 403, 404, 405)
"""HTTP statuses that every turn would meet: the endpoint cannot run turns."""

BUSY_STATUSES = (408, 429, 503, 504)
"""HTTP statuses of a turn for which the endpoint has no room at the moment."""


@dataclass(slots=True, eq=False)
class EndpointTurn:
    """A turn that waits in this process or runs at the endpoint. Times are unix seconds."""

    name: str
    context: list[int]
    sampling: Sampling
    version: int
    sampled: SampledTokensBuilder = field(default_factory=SampledTokensBuilder)
    cached_tokens: int = 0
    sent_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    first_tokens: int = 0
    """Tokens in the first chunk with tokens."""
    counted: int = 0
    """Tokens that earlier latency windows have counted."""
    counted_at: float = 0.0
    share_before: float = 0.0
    """Running sum of seconds per turn when the turn was sent."""
    task: asyncio.Task[None] | None = None


class Logprobs(msgspec.Struct):
    """Logprobs of the tokens of a choice. Tokens are named by `api.TOKEN_PREFIX` and their id."""

    token_logprobs: list[float]
    top_logprobs: list[dict[str, float] | None] = []


class Choice(msgspec.Struct):
    """The new tokens of an answer. Token ids are present because the request asks for them."""

    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens_details: CachedTokens | None = None


class CompletionChunk(msgspec.Struct):
    """One chunk of a streamed answer, or a whole answer."""

    choices: list[Choice]
    usage: Usage | None = None


class StreamError(msgspec.Struct):
    """Why the endpoint has ended a stream."""

    message: str
    code: int
    """An HTTP status."""


class StreamBroken(msgspec.Struct):
    """The last chunk of a stream that the endpoint has ended with an error."""

    error: StreamError


class TurnLost(RoseError):
    """A turn did not start or did not end, while the endpoint may be healthy."""

    def __init__(self, reason: str, *, failed: bool) -> None:
        """`failed`: whether the endpoint failed at this turn, and may fail again; False if it had no room."""
        super().__init__(reason)
        self.failed = failed


def error_for_status(url: str, status: int, message: str) -> RoseError:
    """Return the exception for a turn that is answered with `status`: EngineBroken, EngineRefusal or TurnLost."""
    if status < 400 or status in FATAL_STATUSES:
        return EngineBroken(f"{url} answers a turn with {status}: {message}")
    if status in BUSY_STATUSES:
        return TurnLost(f"{url} has no room for a turn: {message}", failed=False)
    if status < 500:
        return EngineRefusal(f"{url} does not take the turn: {message}")
    return TurnLost(f"{url} fails at a turn: {message}", failed=True)
