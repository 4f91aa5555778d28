"""The clients, each in its own process: users of serving, and rollouts that request turns.

    python -m bench.coserving.clients users      the requests of a trace, each at its time (open loop)
    python -m bench.coserving.clients rollouts   a fixed number of trajectories, always requesting (closed loop)

A client reads its task as one line of JSON, reports that it is ready, and reads one more line: users read the start
time of their window, rollouts read the end of the run. The last line of output is the result.

Keeps true
- A user sends each request on time, without waiting for earlier answers.
- The lateness of a client is measured and reported: of each request, and of a timer that runs during the window.
- A trajectory requests its next turn with all its tokens so far, so that a prefix cache can hold its prefix.
"""

import argparse
import asyncio
import os
import random
import sys
import time

import aiohttp
import msgspec

from rose.workers.loadgen.requests import StreamedCompletion, completion_body, http_session, stream_completion
from rose.workers.loadgen.traces import FIRST_WORD, Request

REQUEST_SECONDS = 120.0
"""Time after which a request has failed."""

TICK_SECONDS = 0.01
"""Interval of the timer that measures how late a client is."""

LESS_URGENT = 5
"""Increase of the rollouts' nice value over the users', whose clocks are the measuring instrument."""

PROMPT_TOKENS, TURN_TOKENS, OBSERVATION_TOKENS, TURNS = 96, 48, 24, 5
"""Shape of a trajectory: tokens of the prompt, sampled tokens of a turn, tokens of an observation, and number of
turns."""


class UserTask(msgspec.Struct, frozen=True):
    """The requests that a process of users sends."""

    url: str
    model: str
    salt: str
    """Salt of the prefix cache, so that entries of another window are not found."""
    requests: list[Request]


class RolloutTask(msgspec.Struct, frozen=True):
    """The rollouts that a process keeps running."""

    url: str
    model: str
    trajectories: int
    priority: int | None
    """Priority of its requests, if the server schedules by priority; a larger number is scheduled later."""
    vocabulary: int


class UserResult(msgspec.Struct):
    """The measurements of users."""

    answers: list[StreamedCompletion]
    ticks: list[float]
    """Delay of each tick of the timer, in seconds."""


class RolloutResult(msgspec.Struct):
    """Times at which rollouts received tokens, and numbers of tokens; lists of equal length."""

    moments: list[float]
    counts: list[int]
    errors: list[str]
    steps: int = 0
    """Number of a guest's steps; this and the next four fields are reported by the guest's host."""
    step_seconds: float = 0.0
    """Total time of the steps."""
    longest_seconds: list[float] = []
    """Longest piece of the guest's work since the previous report, for each report."""
    computed_seconds: list[float] = []
    """The same in processor time of the thread that computes serving and guest."""
    held_back: dict[str, int] = {}
    """How often the guest was not admitted, by reason."""


async def send_requests(task: UserTask, start: float) -> UserResult:
    """Send every request at its time after `start`; return when all are answered."""
    ticks: list[float] = []
    async with http_session(REQUEST_SECONDS) as client:
        ticking = asyncio.create_task(_tick(ticks, start))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_at_its_moment(client, task, each, start)) for each in task.requests]
        ticking.cancel()
    return UserResult([each.result() for each in tasks], ticks)


async def _at_its_moment(
    client: aiohttp.ClientSession, task: UserTask, request: Request, start: float
) -> StreamedCompletion:
    due = start + request.at
    await asyncio.sleep(due - time.monotonic())
    body = completion_body(task.model, request.prompt, request.tokens, temperature=0.0, cache_salt=task.salt)
    return await stream_completion(client, task.url, body, due=due)


async def _tick(ticks: list[float], start: float) -> None:
    due = start
    while True:
        due = max(due + TICK_SECONDS, time.monotonic())
        await asyncio.sleep(due - time.monotonic())
        ticks.append(time.monotonic() - due)


async def run_rollouts(task: RolloutTask, rolled: RolloutResult) -> None:
    """Keep the trajectories running until this task is cancelled."""
    salt = f"rollouts-{time.monotonic()}"
    async with http_session(REQUEST_SECONDS) as client, asyncio.TaskGroup() as group:
        for number in range(task.trajectories):
            group.create_task(_run_trajectory(client, task, salt, random.Random(number), rolled))


async def _run_trajectory(
    client: aiohttp.ClientSession, task: RolloutTask, salt: str, draw: random.Random, rolled: RolloutResult
) -> None:
    more = {"cache_salt": salt} | ({} if task.priority is None else {"priority": task.priority})

    def count(moment: float, tokens: list[int]) -> None:
        rolled.moments.append(moment)
        rolled.counts.append(len(tokens))
        context.extend(tokens)

    while True:
        context = words(draw, PROMPT_TOKENS, task.vocabulary)
        for _ in range(TURNS):
            body = completion_body(task.model, list(context), TURN_TOKENS, temperature=1.0, **more)
            answer = await stream_completion(client, task.url, body, due=time.monotonic(), on_tokens=count)
            if answer.error:
                rolled.errors.append(answer.error)
                await asyncio.sleep(0.1)  # pause before a server that refuses gets another request
                break
            context += words(draw, OBSERVATION_TOKENS, task.vocabulary)


def words(draw: random.Random, count: int, vocabulary: int) -> list[int]:
    """Return random token ids."""
    return draw.choices(range(FIRST_WORD, vocabulary), k=count)


async def _roll_until_told(task: RolloutTask) -> RolloutResult:
    rolled = RolloutResult([], [], [])
    rolling = asyncio.create_task(run_rollouts(task, rolled))
    stopping = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    await asyncio.wait((rolling, stopping), return_when=asyncio.FIRST_COMPLETED)
    rolling.cancel()
    await asyncio.wait((rolling,))
    if not rolling.cancelled():
        rolling.result()
    return rolled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["users", "rollouts"])
    kind = parser.parse_args().kind
    line = sys.stdin.readline()
    measured: UserResult | RolloutResult
    if kind == "users":
        task = msgspec.json.decode(line, type=UserTask)
        print("ready", flush=True)
        measured = asyncio.run(send_requests(task, float(sys.stdin.readline())))
    else:
        os.nice(LESS_URGENT)
        rollouts = msgspec.json.decode(line, type=RolloutTask)
        print("ready", flush=True)
        measured = asyncio.run(_roll_until_told(rollouts))
    print(msgspec.json.encode(measured).decode(), flush=True)


if __name__ == "__main__":
    main()
