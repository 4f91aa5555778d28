"""Program of a lender by requests: an executor whose engine is an endpoint over HTTP.

Keeps true
- The program returns the turns of an unreachable endpoint and waits for the endpoint. The executor then starts again,
  so that no version counts as serving without a new proof.
- The endpoint answers its own users whatever happens to this process: an endpoint that a killed lender has paused for a
  load is resumed.
- An error that only an operator can fix ends the program with a message.
"""

import asyncio
import json
import os
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import Any

import structlog

from rose.schemas.errors import RoseError, UsageError
from rose.schemas.heartbeats import WorkerClass
from rose.topics.health import HEALTH
from rose.topics.settings import BusSettings
from rose.workers.executor.config import ExecutorConfig
from rose.workers.executor.ipc.engine_client import EngineClient
from rose.workers.executor.ipc.messages import EngineFailed, MessageSender
from rose.workers.executor.ipc.shared_memory import ChannelFds, RingBuffer
from rose.workers.executor.loop import run_executor
from rose.workers.executor.vllm.types import EngineBroken
from rose.workers.lender.config import EndpointConfig
from rose.workers.lender.endpoint.http_engine import HttpEngine, KvAllowance
from rose.workers.lender.endpoint.server_interface import Endpoint, EndpointInfo
from rose.workers.lender.endpoint.server_vllm import VllmEndpoint
from rose.workers.lender.endpoint.versions import EndpointVersions, ReferenceModel, resume_paused
from rose.workers.weights.config import WeightsConfig
from rose.workers.weights.model_folder import check_folder

RETRY_SECONDS = 1.0
"""Seconds between two tries to reach an endpoint."""

log = structlog.get_logger("endpoint")


def lend_endpoint(
    settings: BusSettings, config: ExecutorConfig, endpoint: EndpointConfig, weights: WeightsConfig, stop: Event
) -> None:
    """Run turns for `config.worker` on the endpoint until `stop` is set.

    Turns end under the version under which they began, whatever the configuration says. Raises RoseError if the
    endpoint cannot lend, no version of the policy can be proven, a key file or store is invalid, or the broker is
    unreachable.
    """
    config = replace(config, drain_before_swap=True)
    shapes, vocabulary = check_folder(config.model_folder)
    expected = ReferenceModel(config.model_folder)
    while not stop.is_set():
        try:
            with HttpEngineThread(config, endpoint, shapes, vocabulary, expected) as client:
                run_executor(settings, config, client, shapes, stop, WorkerClass.SERVING, weights=weights)
        except EngineBroken as broken:
            log.warning("restarting", reason=str(broken))
            HEALTH.report_restart(str(broken))
            stop.wait(RETRY_SECONDS)


def open_server(config: EndpointConfig) -> Endpoint:
    """Return a client of the endpoint. The kind of server is chosen here; there is one, vLLM."""
    return VllmEndpoint(config.url, config.model)


class HttpEngineThread:
    """Runs an `HttpEngine` on a thread. As a context manager it gives the engine client, and ends the thread."""

    def __init__(
        self,
        config: ExecutorConfig,
        endpoint: EndpointConfig,
        shapes: Mapping[str, tuple[int, ...]],
        vocabulary: int,
        expected: ReferenceModel,
    ) -> None:
        self._config = config
        self._endpoint = endpoint
        self._shapes = shapes
        self._vocabulary = vocabulary
        self._expected = expected
        self._channel = ChannelFds.create()
        self._liveness_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._run_engine())
        self._thread = Thread(target=self._run, name=f"endpoint-{config.short_name}")

    def __enter__(self) -> EngineClient:
        self._thread.start()
        return EngineClient(self._channel, self._liveness_fd)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()
        self._loop.close()
        self._channel.close()
        os.close(self._liveness_fd)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        except Exception as error:
            if not isinstance(error, RoseError):
                log.exception("http_engine_failed")
            MessageSender(RingBuffer(self._channel.reports)).send(
                EngineFailed(str(error), isinstance(error, UsageError))
            )
        finally:
            os.eventfd_write(self._liveness_fd, 1)

    async def _run_engine(self) -> None:
        endpoint = open_server(self._endpoint)
        async with aclosing(endpoint):
            folder = self._endpoint.folder.resolve() / self._endpoint.folder_name
            info = await self._wait_for_endpoint(endpoint, folder)
            log.info("endpoint_found", url=endpoint.url, model=endpoint.model, dtype=info.dtype)
            versions = EndpointVersions(endpoint, info, self._vocabulary, self._expected, folder)
            engine = HttpEngine(
                endpoint,
                versions,
                self._channel,
                self._config,
                self._endpoint,
                vocabulary=self._vocabulary,
                kv=kv_allowance(info, self._config),
            )
            await engine.run()

    async def _wait_for_endpoint(self, endpoint: Endpoint, folder: Path) -> EndpointInfo:
        """Wait until the endpoint answers, and return what it says of itself.

        `folder`: the folder of its versions. Raises EngineStartError if the endpoint cannot lend.
        """
        waited = False
        while True:
            try:
                await resume_paused(endpoint, folder)
                return await endpoint.check(self._shapes, self._config.max_model_len)
            except EngineBroken as broken:
                if not waited:
                    log.warning("endpoint_unreachable", reason=str(broken))
                waited = True
                HEALTH.report(f"waits for its endpoint: {broken}", ready=False)
                await asyncio.sleep(RETRY_SECONDS)


def kv_allowance(info: EndpointInfo, config: ExecutorConfig) -> KvAllowance:
    """Return the KV memory that turns may use: the smaller of the configured size and the endpoint's cache.

    Bytes per token are those of plain attention.
    """
    model: dict[str, Any] = json.loads((config.model_folder / "config.json").read_bytes())
    heads, layers = int(model["num_attention_heads"]), int(model["num_hidden_layers"])
    size = int(model.get("head_dim") or model["hidden_size"] // heads)
    number = 4 if info.dtype == "float32" else 2
    per_token = 2 * layers * int(model.get("num_key_value_heads") or heads) * size * number
    there = info.kv_tokens * per_token
    return KvAllowance(min(config.kv_cache_bytes, there or config.kv_cache_bytes), per_token)
