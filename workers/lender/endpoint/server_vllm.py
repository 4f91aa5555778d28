"""An endpoint of vLLM 0.32: a client of its HTTP API, including its development API.

Keeps true
- An endpoint whose versions cannot be proven, or that returns no token ids, is refused with a message before the
  lender uses it.
- Answers are validated against the structs that are declared here, which have only the fields that are used.
- The endpoint is asked to load only folders that it was seen to read: vLLM 0.32 exits if a load fails half-way.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from rose.schemas.errors import RoseError
from rose.schemas.prompts import Sampling
from rose.workers.executor.vllm.types import EngineBroken, EngineRefusal, EngineStartError, SwapRefused
from rose.workers.lender.endpoint.server_interface import (
    ANSWER_TOKENS,
    HEAD,
    TOLERANCES,
    VISIBILITY_TENSOR,
    EndpointInfo,
    LatencyHistograms,
    ProbeAnswer,
    TurnChunk,
    TurnLost,
)
from rose.workers.model_config import max_context_tokens_of
from rose.workers.weights.model_folder import check_folder

VERSION = "0.32."
"""Prefix of the supported vLLM versions: the development API may change."""

ANSWER_SECONDS = 10.0
"""Timeout of a request that costs a healthy endpoint nothing."""

INFO_SECONDS = 60.0
"""Timeout of a request for the configuration: at the first one vLLM inspects its machine."""

SILENT_SECONDS = 30.0
"""Longest time between two tokens of a turn: an endpoint that is silent for longer has no room, or hangs."""

LOAD_SECONDS = 600.0
"""Timeout of a load, which reads the whole model."""

MAX_LINE_BYTES = 8 << 20
"""Most bytes of one chunk of an answer."""

MAX_ERROR_CHARACTERS = 300
"""Most characters of an endpoint's error message that are passed on."""

TOP_LOGPROBS = 20
"""Likeliest tokens at each position of a probe: the default of vLLM's `--max-logprobs`."""

TTFT, TPOT = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
"""Names of the endpoint's latency histograms."""

TOKEN_PREFIX = "token_id:"
"""Prefix of a token id in the name of a token."""

FATAL_STATUSES = (401, 403, 404, 405)
"""HTTP statuses that every turn would meet: the endpoint cannot run turns."""

BUSY_STATUSES = (408, 429, 503, 504)
"""HTTP statuses of a turn for which the endpoint has no room at the moment."""

NOT_VLLM = (
    "only a vLLM 0.32 server that was started with VLLM_SERVER_DEV_MODE=1 is known to load a policy version that can "
    "be proven; SGLang and others were not tried"
)

Response = TypeVar("Response")


class ModelConfig(msgspec.Struct):
    """The endpoint's model."""

    model: str
    dtype: str
    max_model_len: int
    logprobs_mode: str
    max_logprobs: int
    quantization: str | None = None


class ParallelConfig(msgspec.Struct):
    """The endpoint's processes."""

    world_size: int
    data_parallel_size: int
    api_processes: int = msgspec.field(default=1, name="_api_process_count")


class CacheConfig(msgspec.Struct):
    """The endpoint's KV cache."""

    block_size: int
    num_gpu_blocks: int | None = None


class DeviceConfig(msgspec.Struct):
    """The endpoint's device."""

    device: str = ""


class VllmConfig(msgspec.Struct):
    """The used part of the server's configuration, from `/server_info`."""

    model_config: ModelConfig
    parallel_config: ParallelConfig
    cache_config: CacheConfig
    device_config: DeviceConfig
    instance_id: str = ""
    """Id of the server's process: changes with each start, and differs between several API processes."""
    lora_config: Any = None
    speculative_config: Any = None

    @property
    def without_instance(self) -> "VllmConfig":
        """The part that is constant while the server runs, whichever of its API processes answers."""
        alone = self.parallel_config.api_processes == 1
        return self if alone else msgspec.structs.replace(self, instance_id="")

    @property
    def dtype(self) -> str:
        """Element type of the model, as `float32`."""
        return self.model_config.dtype.removeprefix("torch.")


class Version(msgspec.Struct):
    """Answer of `/version`."""

    version: str


class ServerInfo(msgspec.Struct):
    """Answer of `/server_info`."""

    vllm_config: VllmConfig


class Model(msgspec.Struct):
    """A model that the endpoint serves."""

    id: str


class Models(msgspec.Struct):
    """Answer of `/v1/models`."""

    data: list[Model]


class Logprobs(msgspec.Struct):
    """Logprobs of the tokens of a choice. Tokens are named by TOKEN_PREFIX and their id."""

    token_logprobs: list[float]
    top_logprobs: list[dict[str, float] | None] = []


class Choice(msgspec.Struct):
    """The new tokens of an answer. Token ids are present because the request asks for them."""

    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CachedTokens(msgspec.Struct):
    """Details of the prompt in a usage object."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Usage object of a completion."""

    prompt_tokens_details: CachedTokens | None = None


class CompletionChunk(msgspec.Struct):
    """One chunk of a streamed answer, or a whole answer."""

    choices: list[Choice]
    usage: Usage | None = None


class StreamError(msgspec.Struct):
    """Why the endpoint has ended a stream."""

    message: str
    code: int
    """An HTTP status."""


class StreamBroken(msgspec.Struct):
    """The last chunk of a stream that the endpoint has ended with an error."""

    error: StreamError


class VllmEndpoint:
    """Client of one vLLM server. Implements `protocol.Endpoint`, where the methods are described."""

    def __init__(self, url: str, model: str) -> None:
        """`model`: the model's name at the server; empty for its only one. Call it within a running event loop."""
        self.url = url.rstrip("/")
        self.model = model
        self._checked_config: VllmConfig | None = None
        """The configuration at `check`."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=MAX_LINE_BYTES,
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def check(self, shapes: Mapping[str, Sequence[int]], max_model_len: int) -> EndpointInfo:
        """Check the server by `/version`, `/server_info` and a request, as `Endpoint.check` says."""
        version = await self._get("/version")
        info = await self._get("/server_info?config_format=json", INFO_SECONDS) if version is not None else None
        if version is None or info is None:
            raise EngineStartError(f"{self.url}: {NOT_VLLM}")
        try:
            version_text = msgspec.json.decode(version, type=Version).version
        except msgspec.DecodeError:
            raise EngineStartError(f"{self.url}: {NOT_VLLM}") from None
        if not version_text.startswith(VERSION):
            raise EngineStartError(f"{self.url} is vLLM {version_text}: {NOT_VLLM}")
        config = self._decoded(info, ServerInfo).vllm_config
        sentence = compatibility_error(config, shapes, max_model_len)
        if sentence:
            raise EngineStartError(f"{self.url}: {sentence}")
        models = self._decoded(await self._get("/v1/models") or b"{}", Models).data
        names = [model.id for model in models]
        if not self.model and len(names) == 1:
            self.model = names[0]
        if self.model not in names:
            raise EngineStartError(f"{self.url} serves {', '.join(names)}: set endpoint.model to the policy's name")
        await self._check_tokens()
        self._checked_config = config.without_instance
        cache = config.cache_config
        return EndpointInfo(
            model_folder=Path(config.model_config.model),
            dtype=config.dtype,
            max_logprobs=min(TOP_LOGPROBS, config.model_config.max_logprobs),
            kv_tokens=(cache.num_gpu_blocks or 0) * cache.block_size,
        )

    async def _check_tokens(self) -> None:
        sampling = Sampling(max_tokens=1, temperature=0.0)
        try:
            async for chunk in self.stream_turn([0, 1], sampling, salt="rose"):
                if chunk.tokens and len(chunk.tokens) == len(chunk.logprobs):
                    return
        except EngineRefusal as refusal:
            raise EngineStartError(f"{self.url} answers no turn: {refusal}") from None
        except TurnLost as lost:
            raise EngineBroken(str(lost)) from None
        raise EngineStartError(f"{self.url} does not tell the token ids that it draws: turns are never tokenised again")

    async def check_alive(self) -> None:
        """Check the engine's health, as `Endpoint.check_alive` says."""
        try:
            await self._post("/collective_rpc", {"method": "check_health"}, ANSWER_SECONDS)
        except SwapRefused as refusal:
            raise EngineBroken(str(refusal)) from None

    async def check_unchanged(self) -> None:
        """Compare `/server_info` with the first one, as `Endpoint.check_unchanged` says."""
        await self.check_alive()
        info = await self._get("/server_info?config_format=json", INFO_SECONDS)
        if info is None or self._decoded(info, ServerInfo).vllm_config.without_instance != self._checked_config:
            raise EngineBroken(f"{self.url} is another server than it was")

    async def histograms(self) -> LatencyHistograms:
        """Read the latency histograms from `/metrics`."""
        text = await self._get("/metrics")
        ttft: dict[float, float] = {}
        tpot: dict[float, float] = {}
        for family in text_string_to_metric_families((text or b"").decode()):
            if family.name in (TTFT, TPOT):
                buckets = ttft if family.name == TTFT else tpot
                for sample in family.samples:
                    if sample.name.endswith("_bucket"):
                        bound = float(sample.labels["le"])
                        buckets[bound] = buckets.get(bound, 0.0) + sample.value
        return LatencyHistograms(ttft, tpot)

    async def stream_turn(self, context: Sequence[int], sampling: Sampling, *, salt: str) -> AsyncIterator[TurnChunk]:
        """Stream a completion of token ids, as `Endpoint.stream_turn` says."""
        body = {**self._body(context, sampling, salt), "stream": True, "stream_options": {"include_usage": True}}
        silence = aiohttp.ClientTimeout(total=None, sock_connect=ANSWER_SECONDS, sock_read=SILENT_SECONDS)
        try:
            async with self._session.post(f"{self.url}/v1/completions", json=body, timeout=silence) as response:
                if response.status != 200:
                    raise error_for_status(self.url, response.status, await _error_text(response))
                async for line in response.content:
                    if line.startswith(b'data: {"error"'):
                        error = self._decoded(line[6:], StreamBroken).error
                        reason = f"{self.url} broke a turn off: {error.message[:MAX_ERROR_CHARACTERS]}"
                        raise TurnLost(reason, failed=error.code not in BUSY_STATUSES)
                    if line.startswith(b"data: {"):
                        yield self._parse_chunk(self._decoded(line[6:], CompletionChunk), context)
        except (aiohttp.ClientError, TimeoutError) as error:
            silent = isinstance(error, TimeoutError)
            raise TurnLost(f"{self.url} broke a turn off: {_reason(error)}", failed=not silent) from None
        except ValueError as error:
            raise EngineBroken(f"{self.url} answers a turn with what is none: {_reason(error)}") from None

    def _parse_chunk(self, piece: CompletionChunk, context: Sequence[int]) -> TurnChunk:
        details = piece.usage.prompt_tokens_details if piece.usage is not None else None
        cached = details.cached_tokens or 0 if details is not None else 0
        if not piece.choices:
            return TurnChunk([], [], cached, "")
        choice = piece.choices[0]
        if choice.prompt_token_ids is not None and choice.prompt_token_ids != list(context):
            raise EngineRefusal(f"{self.url} changes the tokens of a context: turns are never tokenised again")
        logprobs = choice.logprobs.token_logprobs if choice.logprobs is not None else []
        return TurnChunk(choice.token_ids or [], logprobs, cached, choice.finish_reason or "")

    async def probe(self, context: Sequence[int], *, salt: str, likeliest: int) -> ProbeAnswer:
        """Request a few tokens with the likeliest logprobs, as `Endpoint.probe` says."""
        sampling = Sampling(max_tokens=ANSWER_TOKENS)
        body = {**self._body(context, sampling, salt), "logprobs": likeliest}
        answer = self._decoded(await self._post("/v1/completions", body, SILENT_SECONDS), CompletionChunk)
        choice = answer.choices[0] if answer.choices else Choice()
        if choice.logprobs is None or choice.token_ids is None:
            raise SwapRefused("a probe is answered without token ids or logprobs")
        places = [place or {} for place in choice.logprobs.top_logprobs]
        try:
            ids = [{int(name.removeprefix(TOKEN_PREFIX)): value for name, value in place.items()} for place in places]
        except ValueError as error:
            raise SwapRefused(f"a probe is answered with what is no token id: {error}") from None
        return ProbeAnswer(context, choice.token_ids, ids)

    async def can_read(self, folder: Path) -> bool:
        """Whether the server can read `folder`.

        vLLM is asked to load the folder without the model's loader: it names the unknown tensor in its error, and
        changes no weights.
        """
        arguments = {"weights_path": str(folder), "is_checkpoint_format": False}
        try:
            await self._post("/collective_rpc", {"method": "reload_weights", "kwargs": arguments}, LOAD_SECONDS)
        except SwapRefused as refusal:
            return f"no attribute `{VISIBILITY_TENSOR}`" in str(refusal)
        return False

    async def load_weights(self, folder: Path) -> None:
        """Pause the server, load the weights and empty the prefix cache, as `Endpoint.load_weights` says."""
        await self._post("/pause?mode=keep", {}, LOAD_SECONDS)
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._post("/collective_rpc", body, LOAD_SECONDS)
        await self._post("/reset_prefix_cache?reset_running_requests=true", {}, LOAD_SECONDS)

    async def resume_serving(self) -> None:
        """Resume a paused server."""
        await self._post("/resume", {}, LOAD_SECONDS)

    def _body(self, context: Sequence[int], sampling: Sampling, salt: str) -> dict[str, Any]:
        """Return the body of a completion request, which overrides all sampling defaults of the server."""
        return {
            "model": self.model,
            "prompt": list(context),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,
            "add_special_tokens": False,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "cache_salt": salt,
        }

    async def _get(self, path: str, seconds: float = ANSWER_SECONDS) -> bytes | None:
        """Return the body of the answer; None if the server has no such path."""
        try:
            async with self._session.get(self.url + path, timeout=aiohttp.ClientTimeout(total=seconds)) as response:
                if response.status in (404, 405):
                    return None
                if response.status != 200:
                    raise EngineBroken(f"{self.url}{path} answers {response.status}: {await _error_text(response)}")
                return await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineBroken(f"{self.url} does not answer: {_reason(error)}") from None

    async def _post(self, path: str, body: dict[str, Any], seconds: float) -> bytes:
        """Return the body of the answer. Raises SwapRefused if the status is not 200."""
        try:
            timeout = aiohttp.ClientTimeout(total=seconds)
            async with self._session.post(self.url + path, json=body, timeout=timeout) as response:
                if response.status != 200:
                    raise SwapRefused(f"{self.url}{path} answers {response.status}: {await _error_text(response)}")
                return await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineBroken(f"{self.url} does not answer: {_reason(error)}") from None

    def _decoded(self, answer: bytes, kind: type[Response]) -> Response:
        try:
            return msgspec.json.decode(answer, type=kind)
        except msgspec.DecodeError as error:
            raise EngineBroken(f"{self.url} answers what is no {kind.__name__}: {error}") from None


def compatibility_error(config: VllmConfig, shapes: Mapping[str, Sequence[int]], max_model_len: int) -> str | None:
    """Return why a server of this configuration cannot lend to a policy of these shapes; None if it can."""
    model, parallel = config.model_config, config.parallel_config
    if parallel.world_size > 1 or parallel.data_parallel_size > 1:
        return "it runs on several ranks, which nobody has tried"
    if config.speculative_config is not None or config.lora_config is not None or model.quantization is not None:
        return "it speculates, quantizes or has LoRA adapters, which nobody has tried"
    if config.dtype not in TOLERANCES:
        return f"it computes in {config.dtype}: a version can be proven in {' or '.join(TOLERANCES)}"
    if model.logprobs_mode != "processed_logprobs":
        return f"its logprobs are {model.logprobs_mode}: start it with --logprobs-mode processed_logprobs"
    if model.max_model_len < max_model_len:
        return f"its longest turn is {model.max_model_len} tokens, executor.max_model_len is {max_model_len}"
    most = max_context_tokens_of(Path(model.model))
    if most is not None and model.max_model_len > most:
        return (
            f"its longest turn is {model.max_model_len} tokens: start it with --max-model-len {most}, of which "
            "trainer and engine compute the same"
        )
    return _model_error(Path(model.model), shapes, on_cpu=config.device_config.device == "cpu")


def _model_error(folder: Path, shapes: Mapping[str, Sequence[int]], *, on_cpu: bool) -> str | None:
    if not (folder / "config.json").is_file():
        return f"its model folder {folder} cannot be read from here, so it cannot be compared with the policy's"
    theirs, _ = check_folder(folder)
    ours = {name: tuple(shape) for name, shape in shapes.items()}
    if {**theirs, **ours} != theirs or theirs.keys() - ours.keys() - {HEAD}:
        return f"it serves {folder}, whose tensors are not the policy's: only a server of the policy's model can lend"
    if on_cpu and HEAD not in theirs:
        return f"on a CPU vLLM does not load a head again that is tied: give it {folder} with an {HEAD} of its own"
    return None


def error_for_status(url: str, status: int, message: str) -> RoseError:
    """Return the exception for a turn that is answered with `status`: EngineBroken, EngineRefusal or TurnLost."""
    if status < 400 or status in FATAL_STATUSES:
        return EngineBroken(f"{url} answers a turn with {status}: {message}")
    if status in BUSY_STATUSES:
        return TurnLost(f"{url} has no room for a turn: {message}", failed=False)
    if status < 500:
        return EngineRefusal(f"{url} does not take the turn: {message}")
    return TurnLost(f"{url} fails at a turn: {message}", failed=True)


async def _error_text(response: aiohttp.ClientResponse) -> str:
    return (await response.text(errors="replace"))[:MAX_ERROR_CHARACTERS]


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
