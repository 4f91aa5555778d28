"""The clients, each a process of its own: users of serving, and rollouts that ask for turns.

    python -m bench.coserving.clients users      the requests of a trace, each at its moment (open loop)
    python -m bench.coserving.clients rollouts   a fixed number of trajectories, always asking (closed loop)

A client reads its task as a line of JSON, says that it is ready, and reads one more line: users the moment at which
their window begins, rollouts nothing until they are told to stop. Its last line is what it measured.

Keeps true
- A user never waits for an answer before the next request is sent.
- How late a client was is measured and told: of each request, and of a timer that runs all the while.
- A trajectory asks for its next turn with all its tokens so far, so that its prefix is in a cache where one holds it.
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
"""After which a request has failed."""

TICK_SECONDS = 0.01
"""Of the timer that tells how late a client is."""

LESS_URGENT = 5
"""How much nicer rollouts are than users, whose clocks are what is measured with."""

PROMPT_TOKENS, TURN_TOKENS, OBSERVATION_TOKENS, TURNS = 96, 48, 24, 5
"""Of a rollout's trajectory: what it begins with, samples, is told between turns, and how many turns it has."""


class UserTask(msgspec.Struct, frozen=True):
    """What a process of users is to send."""

    url: str
    model: str
    salt: str
    """Of the cache: what another window left there is not found."""
    requests: list[Request]


class RolloutTask(msgspec.Struct, frozen=True):
    """What a process of rollouts is to keep going."""

    url: str
    model: str
    trajectories: int
    priority: int | None
    """Of its requests, where the server knows priorities; larger is later."""
    vocabulary: int


class UserResult(msgspec.Struct):
    """What users measured."""

    answers: list[StreamedCompletion]
    ticks: list[float]
    """Seconds that each tick of the timer was behind."""


class RolloutResult(msgspec.Struct):
    """What rollouts got: when, and how many tokens; lists of equal length."""

    moments: list[float]
    counts: list[int]
    errors: list[str]
    steps: int = 0
    """Of a guest; this and the next four are its host's word."""
    step_seconds: float = 0.0
    """That they took."""
    longest_seconds: list[float] = []
    """Of each report, the longest piece of the guest's work since the one before."""
    computed_seconds: list[float] = []
    """The same in processor time of the thread that computes both."""
    held_back: dict[str, int] = {}
    """How often the guest might not compute, by why."""


async def send_requests(task: UserTask, start: float) -> UserResult:
    """Send every request at its moment after `start`; return when all are answered."""
    ticks: list[float] = []
    async with http_session(REQUEST_SECONDS) as client:
        ticking = asyncio.create_task(_tick(ticks, start))
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(_at_its_moment(client, task, each, start)) for each in task.requests]
        ticking.cancel()
    return UserResult([each.result() for each in asked], ticks)


async def _at_its_moment(
    client: aiohttp.ClientSession, task: UserTask, request: Request, start: float
) -> StreamedCompletion:
    due = start + request.at
    await asyncio.sleep(due - time.monotonic())
    wanted = completion_body(task.model, request.prompt, request.tokens, temperature=0.0, cache_salt=task.salt)
    return await stream_completion(client, task.url, wanted, due=due)


async def _tick(ticks: list[float], start: float) -> None:
    due = start
    while True:
        due = max(due + TICK_SECONDS, time.monotonic())
        await asyncio.sleep(due - time.monotonic())
        ticks.append(time.monotonic() - due)


async def run_rollouts(task: RolloutTask, rolled: RolloutResult) -> None:
    """Keep the trajectories going until this is cancelled."""
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
            wanted = completion_body(task.model, list(context), TURN_TOKENS, temperature=1.0, **more)
            answer = await stream_completion(client, task.url, wanted, due=time.monotonic(), on_tokens=count)
            if answer.error:
                rolled.errors.append(answer.error)
                await asyncio.sleep(0.1)  # a server that refuses is not asked without a pause
                break
            context += words(draw, OBSERVATION_TOKENS, task.vocabulary)


def words(draw: random.Random, count: int, vocabulary: int) -> list[int]:
    """Token ids at random."""
    return draw.choices(range(FIRST_WORD, vocabulary), k=count)


async def _roll_until_told(task: RolloutTask) -> RolloutResult:
    rolled = RolloutResult([], [], [])
    rolling = asyncio.create_task(run_rollouts(task, rolled))
    told = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    await asyncio.wait((rolling, told), return_when=asyncio.FIRST_COMPLETED)
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
