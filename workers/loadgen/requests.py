"""The requests of a load generator: one completion over HTTP with its streamed answer, and the log of all of them.

Keeps true
- Prompts and answers are token ids; no text is read.
- Times of a StreamedCompletion are time.monotonic(), which all processes of a machine share. The time of a token is
  read after its line has arrived. Times of the request log are Unix seconds.
- Each request has its own connection, as each user has.
- An error ends only its own request and is one sentence in `StreamedCompletion.error`.
- The request log `serving.jsonl` has one JSON line for the latency of each request. A line is written in one piece when
  its request has ended; several writers may share the file.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from rose.schemas.errors import describe_error

REQUEST_LOG = "serving.jsonl"


class UserRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the request log: one request to a serving engine. Times are measured by the sender."""

    at: float
    """Unix seconds at which the request was due."""
    seconds: float
    """Time from `at` until the end of the answer or the failure of the request."""
    prompt_tokens: int
    tokens: int = 0
    """Number of generated tokens."""
    first_token_seconds: float | None = None
    """TTFT: time from `at` to the first token; None without a token."""
    token_seconds: float | None = None
    """TPOT: mean time from one token to the next; None with fewer than two tokens."""
    error: str = ""
    """Why the request failed; empty if it succeeded."""


PREFIX, DONE = b"data: ", b"[DONE]"
JSON = {"Content-Type": "application/json"}


class StreamedCompletion(msgspec.Struct):
    """Result of one request. Times are on the client's monotonic clock; `moments` and `counts` have equal length."""

    due: float
    sent: float
    prompt_tokens: int
    tokens: int = 0
    """Number of generated tokens."""
    moments: list[float] = []
    """Times at which tokens arrived."""
    counts: list[int] = []
    """Number of tokens that arrived at each of `moments`."""
    cached_tokens: int = 0
    """Prompt tokens from the server's prefix cache. This value and the next three are reported by the server."""
    queue_seconds: float = 0.0
    """Seconds in the scheduler until the request was first scheduled. The time that a request waits for a guest's step
    is not included: vLLM gives the request to the scheduler after the step."""
    prefill_seconds: float = 0.0
    """Seconds from the first scheduling to the first token."""
    decode_seconds: float = 0.0
    """Seconds from the first token to the last token."""
    error: str = ""


class _Choice(msgspec.Struct):
    token_ids: list[int] = []


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Metrics(msgspec.Struct):
    queue_time_ms: float | None = None
    time_to_first_token_ms: float | None = None
    generation_time_ms: float | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    metrics: _Metrics | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Chunk)


def http_session(timeout_seconds: float) -> aiohttp.ClientSession:
    """An HTTP session with one connection for each request and no limit on their number."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=timeout_seconds))


def completion_body(model: str, prompt: list[int], tokens: int, **more: Any) -> dict[str, Any]:
    """JSON body of a streamed completion request for exactly `tokens` tokens; `more` adds fields."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **more,
    }


async def stream_completion(
    client: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    *,
    due: float,
    on_tokens: Callable[[float, list[int]], None] | None = None,
) -> StreamedCompletion:
    """Send one completion request and read its stream to the end. An error is returned in the result, not raised.

    `due`: monotonic time at which the request was to be sent. `on_tokens` is called with the time and the token ids of
    each chunk.
    """
    answer = StreamedCompletion(due=due, sent=time.monotonic(), prompt_tokens=len(body["prompt"]))
    try:
        async with client.post(f"{url}/v1/completions", data=msgspec.json.encode(body), headers=JSON) as response:
            if response.status != 200:
                answer.error = f"status {response.status}: {(await response.text())[:200]}"
                return answer
            async for line in response.content:
                if line.startswith(PREFIX) and not line.startswith(DONE, len(PREFIX)):
                    _on_chunk(answer, _decoder.decode(line[len(PREFIX) :]), on_tokens)
    except (TimeoutError, aiohttp.ClientError, msgspec.DecodeError) as error:
        answer.error = describe_error(error)
    if not answer.error and answer.tokens != body["max_tokens"]:
        answer.error = f"{answer.tokens} of {body['max_tokens']} tokens came"
    return answer


def _on_chunk(answer: StreamedCompletion, chunk: _Chunk, on_tokens: Callable[[float, list[int]], None] | None) -> None:
    now = time.monotonic()
    if chunk.error is not None:
        answer.error = str(chunk.error)[:200]
    tokens = [token for choice in chunk.choices for token in choice.token_ids]
    if tokens:
        answer.moments.append(now)
        answer.counts.append(len(tokens))
        answer.tokens += len(tokens)
        if on_tokens is not None:
            on_tokens(now, tokens)
    if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
        answer.cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens or 0
    if chunk.metrics is not None:
        answer.queue_seconds = (chunk.metrics.queue_time_ms or 0.0) / 1000
        answer.prefill_seconds = (chunk.metrics.time_to_first_token_ms or 0.0) / 1000
        answer.decode_seconds = (chunk.metrics.generation_time_ms or 0.0) / 1000


class RequestLog:
    """Appends to the request log of a run folder."""

    def __init__(self, run_folder: Path) -> None:
        run_folder.mkdir(parents=True, exist_ok=True)
        self._file = (run_folder / REQUEST_LOG).open("ab", buffering=0)

    def append(self, line: UserRequest) -> None:
        """Write the line of a request."""
        self._file.write(msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_request_log(run_folder: Path) -> Sequence[UserRequest]:
    """The complete lines of a run's request log, sorted by time; empty if the file does not exist."""
    file = run_folder / REQUEST_LOG
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    whole = [msgspec.json.decode(line, type=UserRequest) for line in lines if line.endswith(b"\n")]
    return sorted(whole, key=lambda each: each.at)
