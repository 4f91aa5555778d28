"""The pace at which the trace is replayed: measured once, then the same for every arm.

Keeps true
- The pace keeps serving alone busy between LEAST and MOST of a window, and this was measured in a window.
- The first guess assumes requests that never overlap; each window corrects the next guess.
"""

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Sequence

from bench.coserving.clients import REQUEST_SECONDS
from bench.coserving.figures import engine_seconds
from bench.coserving.server import MODEL_NAME, Server
from rose.schemas.errors import RoseError
from rose.workers.loadgen.requests import StreamedCompletion, completion_body, http_session, stream_completion
from rose.workers.loadgen.traces import TraceWindow

LEAST, TARGET, MOST = 0.17, 0.24, 0.33
"""Busy share of serving alone: least, target and most. Other windows then stay within 15 to 35 % too."""

FAINTEST = 0.02
"""Distance from 0 or 1 below which a busy share has no information about the load."""

WINDOWS = 5
"""Most windows of the search."""

UNLOADED_REQUESTS = 40
WARM_REQUESTS = 10
"""Number of requests before the unloaded requests, which do not count: a new server's first answers are slow."""


class PaceError(RoseError):
    """There is no pace with the required busy share."""


def unloaded(server: Server, work: TraceWindow) -> list[StreamedCompletion]:
    """Send evenly selected requests of the slice, one after another. Raises PaceError."""
    step = max(1, len(work.requests) // UNLOADED_REQUESTS)
    chosen = list(itertools.islice(itertools.cycle(work.requests[::step]), WARM_REQUESTS + UNLOADED_REQUESTS))
    salt = f"unloaded-{time.monotonic()}"

    async def one_by_one() -> list[StreamedCompletion]:
        async with http_session(REQUEST_SECONDS) as client:
            return [
                await stream_completion(
                    client,
                    server.url,
                    completion_body(
                        MODEL_NAME, each.prompt, each.tokens, temperature=0.0, cache_salt=f"{salt}-{number}"
                    ),
                    due=time.monotonic(),
                )
                for number, each in enumerate(chosen)
            ]

    answers = asyncio.run(one_by_one())[WARM_REQUESTS:]
    for answer in answers:
        if answer.error:
            raise PaceError(f"serving alone and unloaded failed a request: {answer.error}")
    return answers


def first_guess(answers: Sequence[StreamedCompletion], work: TraceWindow) -> float:
    """Return the pace at which these requests would keep an engine TARGET busy if they never overlapped."""
    each = sum(engine_seconds(answer) for answer in answers) / len(answers)
    return TARGET * work.seconds / (each * len(work.requests))


def load(busy: float) -> float:
    """Return the mean number of concurrent requests, for random arrivals and no queueing."""
    return -math.log1p(-min(max(busy, FAINTEST), 1 - FAINTEST))


def search(busy_at: Callable[[float], float], guess: float) -> float:
    """Return a pace with a measured busy share within the bounds, starting from `guess`. Raises PaceError."""
    pace = guess
    for _ in range(WINDOWS):
        busy = busy_at(pace)
        if LEAST <= busy <= MOST:
            return pace
        pace *= load(TARGET) / load(busy)
    raise PaceError(f"at no pace tried was serving alone busy {LEAST:.0%} to {MOST:.0%} of the time: give one")
