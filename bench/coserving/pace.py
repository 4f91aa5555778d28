"""How fast the trace is played: found once by measuring, then the same for every arm.

Keeps true
- The pace that is found keeps serving alone busy between LEAST and MOST of a window, in a window that was measured.
- The first guess is that of requests that never meet; from there on each window corrects the next.
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

LEAST, WANTED, MOST = 0.17, 0.24, 0.33
"""Busy share of serving alone: within the fleet's 15 to 35 % also in another window."""

FAINTEST = 0.02
"""A share that is this near to 0 or to 1 says no more than that it is."""

WINDOWS = 5
"""Measured at most."""

UNLOADED_REQUESTS = 40
WARM_REQUESTS = 10
"""Before these: a new server's first answers are slow."""


class PaceError(RoseError):
    """No pace keeps serving as busy as it should be."""


def unloaded(server: Server, work: TraceWindow) -> list[StreamedCompletion]:
    """Requests of the slice, evenly taken, each sent when the one before was answered. Raises PaceError."""
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
    """The pace at which these requests would keep an engine WANTED busy if they never met."""
    each = sum(engine_seconds(answer) for answer in answers) / len(answers)
    return WANTED * work.seconds / (each * len(work.requests))


def load(busy: float) -> float:
    """Requests held at a time, on average, if they came at random and none waited for another."""
    return -math.log1p(-min(max(busy, FAINTEST), 1 - FAINTEST))


def search(busy_at: Callable[[float], float], guess: float) -> float:
    """A pace at which the busy share was measured to be right, from this one on. Raises PaceError."""
    pace = guess
    for _ in range(WINDOWS):
        busy = busy_at(pace)
        if LEAST <= busy <= MOST:
            return pace
        pace *= load(WANTED) / load(busy)
    raise PaceError(f"at no pace tried was serving alone busy {LEAST:.0%} to {MOST:.0%} of the time: give one")
