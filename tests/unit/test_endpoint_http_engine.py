"""A turn at an endpoint: learned rates, and the result of a turn when the endpoint fails."""

import asyncio
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest

from rose.schemas.arrays import pack_tokens, unpack_tokens
from rose.schemas.prompts import Sampling
from rose.workers.executor.config import ExecutorConfig
from rose.workers.executor.ipc.messages import ABORTED, REPORT_DECODER, SubmitTurn, TurnFinished, TurnRejected
from rose.workers.executor.ipc.shared_memory import ChannelFds, RingBuffer
from rose.workers.executor.vllm.types import EngineBroken, EngineRefusal
from rose.workers.lender.config import EndpointConfig
from rose.workers.lender.endpoint import http_engine as room
from rose.workers.lender.endpoint.concurrency_limit import TokenRates
from rose.workers.lender.endpoint.http_engine import HttpEngine, KvAllowance
from rose.workers.lender.endpoint.server_interface import TurnChunk, TurnLost
from rose.workers.lender.endpoint.server_vllm import (
    BUSY_STATUSES,
    FATAL_STATUSES,
    VllmConfig,
    VllmEndpoint,
    error_for_status,
)

SAMPLING = Sampling(max_tokens=8)
CONFIG = ExecutorConfig(model_folder=Path(), name="lender", max_turns=8, max_model_len=256)


class Scripted:
    """An endpoint with scripted token chunks and turn ends."""

    url = "http://endpoint"

    def __init__(self, *ends: Exception | str, pieces: tuple[int, ...] = (1, 1)) -> None:
        self.ends = list(ends)
        self.pieces = pieces
        self.logprobs: list[float] = []
        """Logprobs of the next chunks; later chunks have -1."""
        self.looks = 0
        self.there = True

    async def stream_turn(self, context: object, sampling: Sampling, *, salt: str) -> Any:
        end = self.ends.pop(0)
        for size in self.pieces:
            await asyncio.sleep(0)
            yield TurnChunk([5] * size, [self.logprobs.pop(0) if self.logprobs else -1.0] * size, 0, "")
        if isinstance(end, Exception):
            raise end
        yield TurnChunk([], [], 0, end)

    async def check_unchanged(self) -> None:
        self.looks += 1
        if not self.there:
            raise EngineBroken("another")


def results_of_turns(
    api: Any, check: Callable[[HttpEngine], None] = lambda _: None
) -> list[TurnFinished | TurnRejected]:
    """Run turns in sequence and return their results; `check` gets the engine afterwards."""

    async def play(channel: ChannelFds) -> None:
        versions: Any = SimpleNamespace(version=1, salt="")
        endpoint = EndpointConfig(url=api.url)
        engine = HttpEngine(api, versions, channel, CONFIG, endpoint, vocabulary=48, kv=KvAllowance(1 << 20, 64))
        for number in range(len(api.ends)):
            engine._execute(SubmitTurn(f"turn-{number}", pack_tokens([1, 2]), SAMPLING, 1))
            engine._send_waiting()
            await asyncio.gather(*engine._tasks, return_exceptions=True)
        await asyncio.sleep(0)
        check(engine)
        if engine._broken.done():
            engine._broken.exception()

    with closing(ChannelFds.create()) as channel:
        asyncio.run(play(channel))
        return [REPORT_DECODER.decode(message) for message in RingBuffer(channel.reports).read()]


def sampled(answer: TurnFinished | TurnRejected) -> int:
    assert isinstance(answer, TurnFinished)
    return len(unpack_tokens(answer.turn.sampled.tokens))


def test_tokens_of_one_chunk_give_no_decode_rate() -> None:
    """vLLM merges chunks that its client has not read yet, and with `--stream-interval` sends several tokens at
    a time."""

    def unmoved(engine: HttpEngine) -> None:
        assert engine._rates.decode(1) == pytest.approx(100.0)

    [answer] = results_of_turns(Scripted("length", pieces=(8,)), unmoved)
    assert isinstance(answer, TurnFinished) and answer.turn.finish_reason == "length"


def test_tokens_in_the_first_chunk_count_in_no_decode_time(monkeypatch: pytest.MonkeyPatch) -> None:
    learned: list[float] = []
    monkeypatch.setattr(TokenRates, "on_decoded", lambda _, seconds, __: learned.append(seconds))
    clock = iter(range(100))
    monkeypatch.setattr(room, "time", SimpleNamespace(time=lambda: float(next(clock)), monotonic=lambda: 0.0))
    results_of_turns(Scripted("length", pieces=(4, 4)))
    assert learned == [1 / 4], "one second for the four that followed"


def test_partial_turn_is_returned_and_an_empty_turn_refused_unless_no_room() -> None:
    failed, no_room = TurnLost("error", failed=True), TurnLost("full", failed=False)
    [partial] = results_of_turns(Scripted(failed))
    assert isinstance(partial, TurnFinished) and (partial.turn.finish_reason, partial.reason, sampled(partial)) == (
        ABORTED,
        "error",
        2,
    )
    [silent] = results_of_turns(Scripted("abort"))
    assert isinstance(silent, TurnFinished) and "abort" in silent.reason and sampled(silent) == 2
    [paused] = results_of_turns(Scripted("abort", pieces=()))
    assert isinstance(paused, TurnFinished), "whoever pauses the server has its requests end so"
    [nothing] = results_of_turns(Scripted(failed, pieces=()))
    assert isinstance(nothing, TurnRejected) and nothing.reason == "error"
    [full] = results_of_turns(Scripted(no_room, pieces=()))
    assert isinstance(full, TurnFinished) and (full.turn.finish_reason, sampled(full)) == (ABORTED, 0)
    [unfit] = results_of_turns(Scripted(EngineRefusal("too long"), pieces=()))
    assert isinstance(unfit, TurnRejected) and unfit.reason == "too long"


@pytest.mark.parametrize("logprob", [-9999.0, -100.0, 0.5, float("-inf"), float("nan")])
def test_only_the_turn_with_impossible_logprobs_is_refused(logprob: float) -> None:
    api = Scripted("length", "length")
    api.logprobs = [-1.0, logprob]
    one, other = results_of_turns(api)
    assert isinstance(one, TurnRejected) and f"a logprob of {logprob:g}" in one.reason
    assert isinstance(other, TurnFinished) and sampled(other) == 2


def test_broken_turn_ends_the_endpoint_only_if_the_server_was_replaced() -> None:
    def goes_on(engine: HttpEngine) -> None:
        assert not engine._broken.done()

    def is_over(engine: HttpEngine) -> None:
        assert isinstance(engine._broken.exception(), EngineBroken) and list(engine._running) == ["turn-0"]

    api = Scripted(TurnLost("error", failed=True), "length")
    assert [type(answer) for answer in results_of_turns(api, goes_on)] == [
        TurnFinished,
        TurnFinished,
    ] and api.looks == 1
    api = Scripted(TurnLost("error", failed=True))
    api.there = False
    assert results_of_turns(api, is_over) == [], "who plays gives it back, with all others"


@pytest.mark.parametrize(
    ("ends", "late"),
    [
        (["failed"], 0),
        (["failed", "length", "failed"], 0),
        (["failed", "failed"], 1),
        (["failed", "no room"], 1),
        (["no room"], 1),
        (["refused", "refused"], 0),
    ],
)
def test_missing_room_and_constant_failure_count_as_late(ends: list[str], late: int) -> None:
    """Otherwise a faster failing endpoint would attract more turns."""
    faults = {
        "failed": TurnLost("error", failed=True),
        "no room": TurnLost("full", failed=False),
        "refused": EngineRefusal("unfit"),
    }

    def counts(engine: HttpEngine) -> None:
        window = engine._window(others_late=False)
        assert sum(seconds == float("inf") for seconds in window.ttft) == late

    results_of_turns(Scripted(*(faults.get(end, end) for end in ends)), counts)


@pytest.mark.parametrize("status", [200, 204, 302, *FATAL_STATUSES, 400, 409, 413, 422, *BUSY_STATUSES, 500, 501, 502])
def test_http_error_blames_the_turn_unless_every_turn_would_fail(status: int) -> None:
    error = error_for_status("http://endpoint", status, "why")
    if status < 400 or status in FATAL_STATUSES:
        assert isinstance(error, EngineBroken)
    elif status in BUSY_STATUSES or status >= 500:
        assert isinstance(error, TurnLost) and error.failed is (status not in BUSY_STATUSES)
    else:
        assert isinstance(error, EngineRefusal)
    assert "why" in str(error)


@pytest.mark.parametrize(("error", "failed"), [(aiohttp.SocketTimeoutError(), False), (aiohttp.ClientError(), True)])
def test_silent_turn_has_no_room_and_a_disconnected_turn_has_failed(error: Exception, failed: bool) -> None:
    async def ask() -> None:
        api = VllmEndpoint("http://endpoint", "policy")
        await api.aclose()

        def post(*_: object, **__: object) -> None:
            raise error

        api._session = SimpleNamespace(post=post)  # type: ignore[assignment]
        async for _ in api.stream_turn([1], SAMPLING, salt=""):
            pass

    with pytest.raises(TurnLost) as lost:
        asyncio.run(ask())
    assert lost.value.failed is failed


@pytest.mark.parametrize(("processes", "another"), [(1, True), (2, False)])
def test_instance_id_identifies_a_server_only_if_it_has_one_api_process(processes: int, another: bool) -> None:
    def config(instance: str) -> VllmConfig:
        chunk = {
            "model_config": {"model": "m", "dtype": "torch.float32", "max_model_len": 8, "max_logprobs": 20},
            "parallel_config": {"world_size": 1, "data_parallel_size": 1, "_api_process_count": processes},
            "cache_config": {"block_size": 32},
            "device_config": {"device": "cpu"},
            "instance_id": instance,
        }
        chunk["model_config"]["logprobs_mode"] = "processed_logprobs"  # type: ignore[index]
        return msgspec.convert(chunk, VllmConfig)

    assert (config("one").without_instance != config("other").without_instance) is another
