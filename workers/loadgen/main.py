"""Load generator for one server: replays the requests of a trace again and again and logs their latency.

Keeps true
- The load is open-loop: each request is sent at its time, whether or not earlier requests have been answered.
- Requests begin when the server first answers. Later requests to a server that is down fail and are logged as failed.
- After a stop, no further request is sent; answers under way are awaited for LEAVE_SECONDS and logged.
- A pass through the trace has its own cache salt, so it finds no entries of earlier passes in the prefix cache.
"""

import asyncio
import time
from collections.abc import Iterator
from itertools import count
from threading import Event
from typing import Annotated

import aiohttp
import msgspec
import structlog

from rose.schemas.errors import UsageError
from rose.workers.loadgen.config import LoadgenConfig
from rose.workers.loadgen.requests import (
    RequestLog,
    StreamedCompletion,
    UserRequest,
    completion_body,
    http_session,
    stream_completion,
)
from rose.workers.loadgen.traces import Arrival, Request, TraceScaling, TraceWindow, read_trace, scale_requests

REQUEST_SECONDS = 60.0
"""Timeout of a request."""

LEAVE_SECONDS = 10.0
"""How long answers under way are awaited after a stop. A request without an answer by then has failed."""

LOOK_SECONDS = 0.5
"""Interval of the checks for the server's first answer and for a stop."""

PAUSE_SECONDS = 1.0
"""Pause between two passes through the trace."""

log = structlog.get_logger("users")


class _Model(msgspec.Struct):
    id: str
    max_model_len: int


class _Models(msgspec.Struct):
    data: list[_Model]


class _ModelFolder(msgspec.Struct):
    vocab_size: Annotated[int, msgspec.Meta(ge=1)]


def run_loadgen(config: LoadgenConfig, url: str, stop: Event) -> None:
    """Send the trace's requests to the server at `url` until `stop` is set.

    Raises UsageError if the trace or the model folder is unreadable.
    """
    arrivals = read_trace(str(config.trace))
    file = config.model_folder / "config.json"
    try:
        vocabulary = msgspec.json.decode(file.read_bytes(), type=_ModelFolder).vocab_size
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{file} does not tell how large the vocabulary is: {error}") from None
    waits = RequestLog(config.run_folder)
    try:
        asyncio.run(_ask_all(config, url, arrivals, vocabulary, waits, stop))
    finally:
        waits.close()


def served_request(answer: StreamedCompletion, *, ended: float, to_unix: float) -> UserRequest:
    """The log line of a request.

    `ended` is monotonic seconds; `to_unix` added to monotonic seconds gives Unix seconds.
    """
    after_first = answer.tokens - 1
    first, last = (answer.moments[0], answer.moments[-1]) if answer.moments else (None, None)
    return UserRequest(
        at=answer.due + to_unix,
        seconds=ended - answer.due,
        prompt_tokens=answer.prompt_tokens,
        tokens=answer.tokens,
        first_token_seconds=None if first is None else first - answer.due,
        token_seconds=None if first is None or last is None or after_first < 1 else (last - first) / after_first,
        error=answer.error,
    )


def paced_requests(work: TraceWindow) -> Iterator[tuple[float, int, Request]]:
    """All requests of endless passes: seconds since the first request, number of the pass, request."""
    for number in count():
        begins = number * (work.seconds + PAUSE_SECONDS)
        for request in work.requests:
            yield begins + request.at, number, request


async def _ask_all(
    config: LoadgenConfig, url: str, arrivals: list[Arrival], vocabulary: int, waits: RequestLog, stop: Event
) -> None:
    to_unix = time.time() - time.monotonic()
    async with http_session(REQUEST_SECONDS) as client:
        model = await _model(client, url, stop)
        if model is None:
            return
        shape = TraceScaling(
            prompt_divisor=config.prompt_divisor,
            output_divisor=config.output_divisor,
            longest=model.max_model_len,
            vocabulary=vocabulary,
        )
        work = scale_requests(arrivals, shape).at_pace(config.pace)
        log.info("load_started", server=url, model=model.id, requests=len(work.requests), seconds=round(work.seconds))

        async def ask_one(request: Request, number: int, due: float) -> None:
            body = completion_body(model.id, request.prompt, request.tokens, temperature=0.0, cache_salt=str(number))
            try:
                answer = await stream_completion(client, url, body, due=due)
            except asyncio.CancelledError:
                left = f"it was not answered {LEAVE_SECONDS:.0f} s after the users were asked to stop"
                answer = StreamedCompletion(due=due, sent=due, prompt_tokens=len(request.prompt), error=left)
            if answer.error:
                log.warning("request_failed", reason=answer.error)
            waits.append(served_request(answer, ended=time.monotonic(), to_unix=to_unix))

        start, tasks = time.monotonic(), set[asyncio.Task[None]]()
        for at, number, request in paced_requests(work):
            if not await _wait_until(start + at, stop):
                break
            task = asyncio.create_task(ask_one(request, number, start + at))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await _drain(tasks)


async def _drain(tasks: set[asyncio.Task[None]]) -> None:
    """Wait for the answers under way for at most `LEAVE_SECONDS`, then cancel the rest."""
    last = set(tasks)
    if last:
        _, late = await asyncio.wait(last, timeout=LEAVE_SECONDS)
        for task in late:
            task.cancel()
        await asyncio.gather(*last)


async def _wait_until(moment: float, stop: Event) -> bool:
    """Wait until the moment; returns False if `stop` is set first."""
    while not stop.is_set():
        left = moment - time.monotonic()
        if left <= 0:
            return True
        await asyncio.sleep(min(left, LOOK_SECONDS))
    return False


async def _model(client: aiohttp.ClientSession, url: str, stop: Event) -> _Model | None:
    """The model that the server serves, once the server answers; None if `stop` is set first."""
    while not stop.is_set():
        try:
            async with client.get(f"{url}/v1/models") as response:
                if response.status == 200:
                    return msgspec.json.decode(await response.read(), type=_Models).data[0]
        except (TimeoutError, aiohttp.ClientError):
            pass
        await asyncio.sleep(LOOK_SECONDS)
    return None
