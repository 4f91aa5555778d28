"""A lender by requests as a program: an executor of the bus whose engine is played over HTTP.

Keeps true
- An endpoint that is away is waited for; its turns have gone back, and with its return the executor starts anew, so
  that no version is believed to serve that was not proven since.
- It answers its own users whatever becomes of this process: one that was paused for a load is told to go on.
- What only a person can mend ends it, in a sentence.
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

from schemas.errors import RoseError, UsageError
from schemas.slack import WorkerClass
from topics.health import HEALTH
from topics.settings import BusSettings
from workers.executor.config import ExecutorConfig
from workers.executor.line import Line
from workers.executor.link import EngineLink
from workers.executor.main import run_executor
from workers.executor.vllm.folder import check_folder
from workers.executor.vllm.types import EngineBroken
from workers.executor.wires import Wires
from workers.executor.words import Failed, Outbox
from workers.lender.endpoint.api import Endpoint, VllmConfig
from workers.lender.endpoint.config import EndpointConfig
from workers.lender.endpoint.player import Cache, Player
from workers.lender.endpoint.proof import Expected
from workers.lender.endpoint.versions import Versions, let_go_on
from workers.weights.config import WeightsConfig

AGAIN_SECONDS = 1.0
"""Between two looks for an endpoint that is away."""

log = structlog.get_logger("endpoint")


def lend_endpoint(
    settings: BusSettings, config: ExecutorConfig, endpoint: EndpointConfig, weights: WeightsConfig, stop: Event
) -> None:
    """Run turns for `config.worker` on the endpoint, until `stop` is set.

    Turns end on the version that they began on, whatever the configuration says. Raises RoseError: an endpoint that
    cannot lend, a policy that no version can be proven of, a broken key file or store, a broker that is not there.
    """
    config = replace(config, drain_before_swap=True)
    shapes, vocabulary = check_folder(config.model_folder)
    expected = Expected(config.model_folder)
    while not stop.is_set():
        try:
            with PlayedEngine(config, endpoint, shapes, vocabulary, expected) as link:
                run_executor(settings, config, link, shapes, stop, WorkerClass.SERVING, weights=weights)
        except EngineBroken as broken:
            log.warning("begins anew", reason=str(broken))
            HEALTH.begins_anew(str(broken))
            stop.wait(AGAIN_SECONDS)


class PlayedEngine:
    """A player on its thread: a context manager that ends it, and gives the link to it."""

    def __init__(
        self,
        config: ExecutorConfig,
        endpoint: EndpointConfig,
        shapes: Mapping[str, tuple[int, ...]],
        vocabulary: int,
        expected: Expected,
    ) -> None:
        self._config = config
        self._endpoint = endpoint
        self._shapes = shapes
        self._vocabulary = vocabulary
        self._expected = expected
        self._wires = Wires.new()
        self._life = os.eventfd(0, os.EFD_CLOEXEC)
        self._loop = asyncio.new_event_loop()
        self._playing = self._loop.create_task(self._play())
        self._thread = Thread(target=self._run, name=f"endpoint-{config.short_name}")

    def __enter__(self) -> EngineLink:
        self._thread.start()
        return EngineLink(self._wires, self._life)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._playing.cancel)
        self._thread.join()
        self._loop.close()
        self._wires.close()
        os.close(self._life)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._playing)
        except asyncio.CancelledError:
            pass
        except Exception as error:
            if not isinstance(error, RoseError):
                log.exception("the endpoint's player ends")
            Outbox(Line(self._wires.reports)).say(Failed(str(error), isinstance(error, UsageError)))
        finally:
            os.eventfd_write(self._life, 1)

    async def _play(self) -> None:
        api = Endpoint(self._endpoint.url, self._endpoint.model)
        async with aclosing(api):
            folder = self._endpoint.folder.resolve() / self._endpoint.place
            server = await self._arrival(api, folder)
            log.info("found", url=api.url, model=api.model, dtype=server.dtype)
            versions = Versions(api, server, self._vocabulary, self._expected, folder)
            kv = cache_of(server, self._config)
            player = Player(
                api, versions, self._wires, self._config, self._endpoint, vocabulary=self._vocabulary, kv=kv
            )
            await player.play()

    async def _arrival(self, api: Endpoint, folder: Path) -> VllmConfig:
        """What the endpoint is, once it is there; its versions are in `folder`. Raises EngineStartError."""
        waited = False
        while True:
            try:
                await let_go_on(api, folder)
                return await api.check(self._shapes, self._config.max_model_len)
            except EngineBroken as broken:
                if not waited:
                    log.warning("waits for its endpoint", reason=str(broken))
                waited = True
                HEALTH.says(f"waits for its endpoint: {broken}", ready=False)
                await asyncio.sleep(AGAIN_SECONDS)


def cache_of(server: VllmConfig, config: ExecutorConfig) -> Cache:
    """What the configuration grants of what the endpoint has; tokens cost what they do in plain attention."""
    model: dict[str, Any] = json.loads((config.model_folder / "config.json").read_bytes())
    heads, layers = int(model["num_attention_heads"]), int(model["num_hidden_layers"])
    size = int(model.get("head_dim") or model["hidden_size"] // heads)
    number = 4 if server.dtype == "float32" else 2
    per_token = 2 * layers * int(model.get("num_key_value_heads") or heads) * size * number
    there = (server.cache_config.num_gpu_blocks or 0) * server.cache_config.block_size * per_token
    return Cache(min(config.kv_cache_bytes, there or config.kv_cache_bytes), per_token)
