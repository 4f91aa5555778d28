"""The benchmark's clients against a scripted server."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from bench.coserving.clients import RolloutResult, RolloutTask, UserTask, run_rollouts, send_requests
from bench.coserving.figures import engine_seconds
from rose.workers.loadgen.requests import StreamedCompletion, http_session, stream_completion
from rose.workers.loadgen.traces import Request

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield site.name
    await runner.cleanup()


async def streamed(request: web.Request, *chunks: object) -> web.StreamResponse:
    """Return each chunk as vLLM sends it."""
    response = web.StreamResponse()
    await response.prepare(request)
    for chunk in chunks:
        await response.write(b"data: " + (chunk if isinstance(chunk, bytes) else json.dumps(chunk).encode()) + b"\n\n")
    return response


def tokens(*ids: int) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": "", "token_ids": list(ids)}]}


LAST = {
    "choices": [],
    "usage": {"prompt_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}},
    "metrics": {"queue_time_ms": 1.0, "time_to_first_token_ms": 2.0, "generation_time_ms": 3.0, "mean_itl_ms": None},
}


async def answer_of(*chunks: object, token_count: int) -> StreamedCompletion:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await streamed(request, *chunks)

    async with serving(handler) as url, http_session(5) as client:
        return await stream_completion(client, url, {"prompt": [5, 6], "max_tokens": token_count}, due=time.monotonic())


async def test_tokens_of_one_chunk_have_one_timestamp() -> None:
    answer = await answer_of(tokens(7), tokens(8, 9), LAST, b"[DONE]", token_count=3)
    assert answer.error == ""
    assert (answer.tokens, answer.counts, len(answer.moments)) == (3, [1, 2], 2)
    assert (answer.prompt_tokens, answer.cached_tokens) == (2, 1)
    assert engine_seconds(answer) == pytest.approx(0.006)


@pytest.mark.parametrize(
    ("chunks", "says"),
    [
        ((tokens(7),), "1 of 3 tokens came"),
        ((tokens(7), {"error": {"message": "out of blocks"}}), "out of blocks"),
        ((b"{",), "DecodeError"),
        ((), "0 of 3 tokens came"),
    ],
)
async def test_incomplete_answer_is_an_error_in_one_sentence(chunks: tuple[object, ...], says: str) -> None:
    answer = await answer_of(*chunks, token_count=3)
    assert says in answer.error
    assert "\n" not in answer.error


async def test_unreachable_server_is_an_error() -> None:
    async with http_session(5) as client:
        answer = await stream_completion(client, "http://127.0.0.1:1", {"prompt": [5], "max_tokens": 1}, due=0.0)
    assert answer.error.startswith("ClientConnectorError")


async def test_simulated_users_do_not_wait_for_answers() -> None:
    """The server answers no request before the last has arrived."""
    here, all_here = 0, asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal here
        here += 1
        if here == 20:
            all_here.set()
        await all_here.wait()
        return await streamed(request, tokens(7), LAST)

    requests = [Request(at=0.005 * i, prompt=[5, 6], tokens=1) for i in range(20)]
    async with serving(handler) as url:
        used = await asyncio.wait_for(send_requests(UserTask(url, "m", "s", requests), time.monotonic()), 30)
    assert [answer.error for answer in used.answers] == [""] * 20
    assert max(answer.sent for answer in used.answers) <= min(answer.moments[0] for answer in used.answers)


async def test_next_turn_of_a_trajectory_has_all_its_tokens() -> None:
    seen: list[list[int]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        seen.append(body["prompt"])
        return await streamed(request, tokens(*range(7, 7 + body["max_tokens"])), LAST)

    rolled = RolloutResult([], [], [])
    async with serving(handler) as url:
        rolling = asyncio.create_task(run_rollouts(RolloutTask(url, "m", 1, None, 99), rolled))
        while len(seen) < 3:
            await asyncio.sleep(0.01)
        rolling.cancel()
        await asyncio.wait((rolling,))
    first, second, third = seen[:3]
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    assert second[len(first) :][: rolled.counts[0]] == list(range(7, 7 + rolled.counts[0]))
