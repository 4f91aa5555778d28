"""The load generator against a scripted server."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path

import pytest
from aiohttp import web

from rose.schemas.errors import UsageError
from rose.workers.loadgen import main
from rose.workers.loadgen.config import TRACE_FILE, LoadgenConfig
from rose.workers.loadgen.main import PAUSE_SECONDS, paced_requests, run_loadgen
from rose.workers.loadgen.requests import REQUEST_LOG, read_request_log
from rose.workers.loadgen.traces import Request, TraceWindow, read_trace

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.0000000,64,4
2023-11-16 18:17:03.0500000,32,2
2023-11-16 18:17:03.1000000,16,8
"""


class Server:
    """Streams the requested number of tokens; refuses the second request."""

    def __init__(self) -> None:
        self.requests: list[dict[str, object]] = []

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "serving", "max_model_len": 512}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        if len(self.requests) == 2:
            return web.Response(status=503, text="no room")
        response = web.StreamResponse()
        await response.prepare(request)
        for token in range(body["max_tokens"]):
            chunk = {"choices": [{"token_ids": [7 + token]}]}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        return response


@asynccontextmanager
async def answering(server: Server) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/completions", server.complete)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield site.name
    await runner.cleanup()


def users(folder: Path, trace: str = TRACE) -> LoadgenConfig:
    (folder / "trace.csv").write_text(trace)
    (folder / "config.json").write_text('{"vocab_size": 40, "more": 1}')
    return LoadgenConfig(model_folder=folder, run_folder=folder / "run", trace=folder / "trace.csv")


async def test_latency_of_each_request_is_recorded_pass_by_pass(tmp_path: Path) -> None:
    server, stop = Server(), threading.Event()
    async with answering(server) as url:
        asking = asyncio.create_task(asyncio.to_thread(run_loadgen, users(tmp_path), url, stop))
        async with asyncio.timeout(60):
            while not asking.done() and (
                not (tmp_path / "run" / REQUEST_LOG).exists() or len(read_request_log(tmp_path / "run")) < 4
            ):
                await asyncio.sleep(0.02)
        stop.set()
        await asking
    first, refused, third, again = read_request_log(tmp_path / "run")[:4]
    assert [len(each["prompt"]) for each in server.requests[:3]] == [4, 2, 1]  # type: ignore[arg-type]
    assert max(max(each["prompt"]) for each in server.requests) < 40  # type: ignore[call-overload]
    assert (first.tokens, third.tokens) == (2, 4)
    assert first.first_token_seconds is not None and 0 < first.first_token_seconds <= first.seconds
    assert "no room" in refused.error and refused.first_token_seconds is None
    assert again.at - first.at == pytest.approx(0.1 + PAUSE_SECONDS)
    assert server.requests[0]["cache_salt"] != server.requests[3]["cache_salt"]


class Slow(Server):
    """Answers every other request when told to, and the rest never."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.requests.append({})
        await (self.answers.wait() if len(self.requests) % 2 else asyncio.Event().wait())
        self.requests.append({})  # as the second is refused
        return await super().complete(request)


async def test_requests_in_flight_at_the_stop_are_awaited_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "LEAVE_SECONDS", 3.0)
    server, stop = Slow(), threading.Event()
    async with answering(server) as url:
        asking = asyncio.create_task(asyncio.to_thread(run_loadgen, users(tmp_path), url, stop))
        async with asyncio.timeout(60):
            while len(server.requests) < 3:
                await asyncio.sleep(0.02)
        stop.set()
        await asyncio.sleep(1.0)
        server.answers.set()
        await asking
        requests = len(server.requests)
    waits = read_request_log(tmp_path / "run")
    assert [each.error for each in waits].count("") == 2
    assert [each.seconds > 3.0 for each in waits if "asked to stop" in each.error] == [True]
    assert requests == 3 + 2 * 2 and len(waits) == 3, "nothing more was asked for"


def test_load_generator_stops_without_a_server(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    run_loadgen(users(tmp_path), "http://127.0.0.1:1", stop)
    assert read_request_log(tmp_path / "run") == []


@pytest.mark.parametrize(("name", "says"), [("trace.csv", "cannot read the trace"), ("config.json", "vocabulary")])
def test_missing_file_or_model_is_reported_in_one_sentence(tmp_path: Path, name: str, says: str) -> None:
    config = users(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(UsageError, match=says):
        run_loadgen(config, "http://127.0.0.1:1", threading.Event())


def test_invalid_pace_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pace \(0.0\) must be from"):
        LoadgenConfig(model_folder=Path(), run_folder=Path(), pace=0.0)


def test_truncated_line_is_left_out(tmp_path: Path) -> None:
    (tmp_path / REQUEST_LOG).write_bytes(b'{"at":2.0,"seconds":1.0,"prompt_tokens":3}\n{"at":1.0,"sec')
    assert [each.at for each in read_request_log(tmp_path)] == [2.0]


def test_passes_are_consecutive() -> None:
    work = TraceWindow([Request(at=0.0, prompt=[5], tokens=1), Request(at=4.0, prompt=[6], tokens=1)], truncated=0)
    taken = [(at, number, request.prompt) for at, number, request in islice(paced_requests(work), 3)]
    assert taken == [(0.0, 0, [5]), (4.0, 0, [6]), (4.0 + PAUSE_SECONDS, 1, [5])]


def test_shipped_trace_slice_is_minutes_of_real_use() -> None:
    arrivals = read_trace(str(TRACE_FILE))
    assert (len(arrivals), round(arrivals[-1].at)) == (1296, 392)
