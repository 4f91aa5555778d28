"""An HTTP endpoint that behaves as vLLM 0.32 with a transformers policy, and a lender of this endpoint."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file

from rose.schemas.errors import RoseError
from rose.topics.local_broker import free_ports
from rose.topics.settings import BusSettings
from rose.workers.executor.config import ExecutorConfig
from rose.workers.lender.config import EndpointConfig
from rose.workers.lender.endpoint.main import lend_endpoint
from rose.workers.lender.endpoint.server_interface import VISIBILITY_TENSOR
from rose.workers.weights.config import WeightsConfig
from tests.support.executor_fixtures import SLOT

MOST_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a server at one turn."""

    status: int
    """HTTP status; 0 breaks the connection."""
    tokens: int = 0
    """Number of streamed tokens before the fault; 0 makes the fault the whole answer."""


class ScriptedEndpoint:
    """A server in this process. A test can set its faults at any time."""

    def __init__(self, folder: Path, model: Any) -> None:
        """`folder` has the model that the server serves at first."""
        self.model = model
        self.folder = folder
        [self.port] = free_ports(1)
        self.token_seconds = 0.0
        """Seconds of sleep before each token."""
        self.version: Any = {"version": "0.32.0"}
        self.tells_token_ids = True
        self.loads = True
        """Whether a load takes effect. If False, the server reports a load that did not happen."""
        self.answers_probes = True
        """Whether probes are answered with tokens. If False, the answers are empty."""
        self.sees_folders = True
        self.changed: dict[str, Any] = {}
        """Changed fields of the model configuration."""
        self.instance = "first"
        self.turns = 0
        """Number of requested turns."""
        self.faults: dict[int, Fault] = {}
        """Faults by the number of the turn, counted from 1."""
        self.loaded: list[str] = []
        self.pauses = 0
        self.answers = asyncio.Event()
        self.answers.set()
        self.says_paused = True
        """Whether a pause is reported at once. If False, the server pauses too, and reports the pause once it
        continues."""
        self.goes_on = asyncio.Event()
        """Cleared while the server is paused."""
        self.goes_on.set()
        self._runner: web.AppRunner | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10.0)

    def stop(self) -> None:
        """Stop at once, also during an answer."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10.0)

    def end(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def pause(self) -> None:
        """Pause, as a lender does before a load."""
        self._loop.call_soon_threadsafe(self.goes_on.clear)

    def hang(self, hangs: bool) -> None:
        """Make the engine hang. Every request then waits."""
        self._loop.call_soon_threadsafe(self.answers.clear if hangs else self.answers.set)

    async def _start(self) -> None:
        app = web.Application()
        app.add_routes(
            [
                web.get("/version", self._told_version),
                web.get("/server_info", self._info),
                web.get("/v1/models", partial(_json, {"data": [{"id": "policy"}]})),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
                web.post("/reset_prefix_cache", partial(_json, {"success": True})),
                web.post("/collective_rpc", self._reload),
                web.post("/v1/completions", self._complete),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def _stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _told_version(self, _: web.Request) -> web.Response:
        return await _json(self.version)

    async def _info(self, _: web.Request) -> web.Response:
        model = {
            "model": str(self.folder),
            "dtype": "torch.float32",
            "max_model_len": MOST_TOKENS,
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": 20,
        }
        config = {
            "model_config": model | self.changed,
            "parallel_config": {"world_size": 1, "data_parallel_size": 1},
            "cache_config": {"block_size": 32, "num_gpu_blocks": 100},
            "device_config": {"device": "cpu"},
            "instance_id": self.instance,
        }
        return await _json({"vllm_config": config})

    async def _pause(self, _: web.Request) -> web.Response:
        self.goes_on.clear()
        self.pauses += 1
        if not self.says_paused:
            await self.goes_on.wait()
        return await _json({})

    async def _resume(self, _: web.Request) -> web.Response:
        self.goes_on.set()
        return await _json({})

    async def _reload(self, request: web.Request) -> web.Response:
        called = await request.json()
        await self.answers.wait()
        if called["method"] == "check_health":
            return await _json({"results": [None]})
        arguments = called["kwargs"]
        folder = Path(arguments["weights_path"])
        if not arguments.get("is_checkpoint_format", True):
            there = (
                f"PolicyForCausalLM has no attribute `{VISIBILITY_TENSOR}`"
                if self.sees_folders
                else "Repo id must be otherwise"
            )
            return await _json({"error": {"message": there}}, status=500)
        self.loaded.append(folder.name)
        if self.loads:
            self.model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
        return await _json({"results": [None]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        streams, context = body.get("stream", False), body["prompt"]
        response, fault = web.StreamResponse(), None
        if streams:
            self.turns += 1
            fault = self.faults.get(self.turns)
            if fault is not None and fault.status and not fault.tokens:
                return await _json({"error": _error(fault)}, status=fault.status)
            await response.prepare(request)
        tokens: list[int] = []
        places: list[dict[str, float]] = []
        reason = None
        while reason is None:
            await asyncio.sleep(self.token_seconds)
            await self.answers.wait()
            await self.goes_on.wait()
            if fault is not None and len(tokens) == fault.tokens:
                return await _ended(request, response, fault)
            token, place = self._draw([*context, *tokens], body)
            tokens.append(token)
            places.append(place)
            stopped = token in body["stop_token_ids"]
            reason = "stop" if stopped else "length" if len(tokens) == body["max_tokens"] else None
            if streams:
                first = {"prompt_token_ids": context} if len(tokens) == 1 else {}
                await response.write(_line({**self._choice([token], [place], reason), **first}))
        if not streams and not self.answers_probes:
            return await _json({"choices": [self._choice([], [], reason)]})
        if not streams:
            return await _json({"choices": [self._choice(tokens, places, reason)]})
        usage = {"prompt_tokens_details": {"cached_tokens": 0}}
        await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    @torch.no_grad()
    def _draw(self, context: list[int], body: dict[str, Any]) -> tuple[int, dict[str, float]]:
        """Return a token and the likeliest tokens with their logprobs."""
        logits = self.model(input_ids=torch.tensor([context])).logits[0, -1]
        logprobs = torch.log_softmax(logits / (body["temperature"] or 1.0), -1)
        token = int(torch.multinomial(logprobs.exp(), 1) if body["temperature"] else logprobs.argmax())
        likeliest = [token, *logprobs.topk(body["logprobs"]).indices.tolist()]
        return token, {f"token_id:{each}": float(logprobs[each]) for each in likeliest}

    def _choice(self, tokens: list[int], places: list[dict[str, float]], reason: str | None) -> dict[str, Any]:
        own = [place[f"token_id:{token}"] for token, place in zip(tokens, places, strict=True)]
        ids = {"token_ids": tokens} if self.tells_token_ids else {}
        return {"logprobs": {"token_logprobs": own, "top_logprobs": places}, "finish_reason": reason, **ids}


async def _json(answer: Any, _: web.Request | None = None, status: int = 200) -> web.Response:
    return web.json_response(answer, status=status)


def _error(fault: Fault) -> dict[str, Any]:
    return {"message": f"fault {fault.status}", "type": "Fault", "param": None, "code": fault.status}


async def _ended(request: web.Request, response: web.StreamResponse, fault: Fault) -> web.StreamResponse:
    if fault.status:
        await response.write(b"data: " + json.dumps({"error": _error(fault)}).encode() + b"\n\ndata: [DONE]\n\n")
    elif request.transport is not None:
        request.transport.close()
    return response


def _line(choice: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


class Lending:
    """`lend_endpoint` on a thread. It ends with an exit status, like a process."""

    def __init__(self, settings: BusSettings, policy: Path, endpoint: EndpointConfig) -> None:
        self.message = ""
        """The last error message."""
        self._stop = Event()
        self._status: int | None = None
        config = ExecutorConfig(
            model_folder=policy,
            name=f"executor-{SLOT}",
            slot=SLOT,
            max_turns=8,
            max_model_len=MOST_TOKENS,
            kv_cache_bytes=16 << 20,
        )
        self._thread = Thread(target=self._run, args=(settings, config, endpoint))
        self._thread.start()

    def _run(self, settings: BusSettings, config: ExecutorConfig, endpoint: EndpointConfig) -> None:
        try:
            lend_endpoint(settings, config, endpoint, WeightsConfig(), self._stop)
            self._status = 0
        except RoseError as error:
            self.message, self._status = str(error), error.exit_status

    def poll(self) -> int | None:
        return self._status

    def end(self) -> int | None:
        self._stop.set()
        self._thread.join(60.0)
        assert not self._thread.is_alive()
        return self._status


@contextmanager
def lending(settings: BusSettings, policy: Path, endpoint: EndpointConfig) -> Iterator[Lending]:
    lender = Lending(settings, policy, endpoint)
    try:
        yield lender
    finally:
        lender.end()
