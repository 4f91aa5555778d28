"""A sweep over a server: its mean TTFT and TPOT by the number of requests at a time and by their lengths.

Keeps true
- The load is a closed loop: each of `batch` clients sends its next request when its last one has ended.
- The first answer of each client is shorter than the others, by another length for each client, and does not count. The
  prompts of the counted requests are thus spread over the steps, as in a server in use.
- Prompts are random, so that no prefix cache helps. Their tokens are among the first MOST_TOKEN, which all models have.
- A failed request ends the sweep with one sentence: the server would be measured under another load.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp
import msgspec

from rose.schemas.errors import RoseError
from rose.workers.loadgen.requests import StreamedCompletion, completion_body, http_session, stream_completion

REQUEST_SECONDS = 600.0
"""Timeout of a request."""

COUNTED = 2
"""Requests of each client that count."""

MOST_TOKEN = 15
"""Largest token of a prompt."""


class SweepFailed(RoseError):
    """The server cannot be measured."""


@dataclass(frozen=True)
class Point:
    """A load."""

    batch: int
    """Requests at a time."""
    prompt: int
    """Tokens of each prompt."""
    answer: int
    """Tokens of each answer."""


@dataclass(frozen=True)
class Latency:
    """Mean latencies under a load."""

    ttft_seconds: float
    tpot_seconds: float


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


def sweep(
    url: str, model: str | None, points: Sequence[Point], *, seed: int, on_point: Callable[[Point, Latency], None]
) -> None:
    """Measure a server at each point that the model's context has room for, and pass on each result.

    Args:
        url: The server, without a path. Its streams must hold token ids, as those of vLLM do.
        model: Name of the model at the server; None: the first that the server names.
        points: The loads, in order.
        seed: Seed of the prompts.
        on_point: Called with each result as soon as there is one.

    Raises:
        SweepFailed: The server does not answer, does not serve the model, or fails a request.
    """
    asyncio.run(_sweep(url.rstrip("/"), model, points, random.Random(seed), on_point))


async def _sweep(
    url: str,
    model: str | None,
    points: Sequence[Point],
    generator: random.Random,
    on_point: Callable[[Point, Latency], None],
) -> None:
    async with http_session(REQUEST_SECONDS) as client:
        served = await _served(client, url, model)
        for point in points:
            if served.max_model_len is None or point.prompt + point.answer <= served.max_model_len:
                on_point(point, await _measure(client, url, served.id, point, generator))


async def _served(client: aiohttp.ClientSession, url: str, name: str | None) -> _Model:
    try:
        async with client.get(f"{url}/v1/models") as response:
            models = msgspec.json.decode(await response.read(), type=_Models).data
    except (TimeoutError, aiohttp.ClientError, msgspec.DecodeError) as error:
        raise SweepFailed(
            f"{url}/v1/models does not list models: start the server, or mend the URL ({error})"
        ) from None
    chosen = next((each for each in models if name in (None, each.id)), None)
    if chosen is None:
        raise SweepFailed(f"{url} does not serve {name}: name one of {', '.join(each.id for each in models)}")
    return chosen


async def _measure(
    client: aiohttp.ClientSession, url: str, model: str, point: Point, generator: random.Random
) -> Latency:
    counted: list[StreamedCompletion] = []

    async def ask(tokens: int) -> StreamedCompletion:
        prompt = [generator.randint(1, MOST_TOKEN) for _ in range(point.prompt)]
        body = completion_body(model, prompt, tokens, temperature=0.0)
        answer = await stream_completion(client, url, body, due=time.monotonic())
        if answer.error:
            raise SweepFailed(f"{url} fails a request of {point.prompt} + {tokens} tokens: {answer.error}")
        return answer

    async def user(place: int) -> None:
        await ask(max(1, point.answer * (place + 1) // point.batch))
        counted.extend([await ask(point.answer) for _ in range(COUNTED)])

    await asyncio.gather(*map(user, range(point.batch)))
    return Latency(
        ttft_seconds=statistics.fmean(each.moments[0] - each.due for each in counted),
        tpot_seconds=statistics.fmean((each.moments[-1] - each.moments[0]) / (each.tokens - 1) for each in counted),
    )
