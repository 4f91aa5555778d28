"""The guest: the rollout engine inside a serving engine's process, built, ticked and dropped.

Keeps true
- Nothing that goes wrong here leaves `tick`: the guest is dropped, which is told, and built again after a while.
- A tick is one bounded piece: of building the guest, of preparing a version, or a step of the engine.
- Between two ticks the process is as the host left it.
- Serving's next step has the KV memory that it may take, whatever the guest holds (`sharing`).
- A guest is built when somebody first knocks. Who knocks later gets the same engine, empty, at the version that it has.
"""

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from logging import Logger
from pathlib import Path

import torch
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine import core
from vllm.v1.worker import gpu_worker

from workers.executor.host import EngineHost
from workers.executor.line import Line
from workers.executor.step_cost import StepCost
from workers.executor.vllm.engine import Engine, EngineConfig
from workers.executor.words import Gone, Outbox, Slack
from workers.lender.config import LendConfig
from workers.lender.feeder import Feeder
from workers.lender.link import End
from workers.lender.vllm.apart import Apart
from workers.lender.vllm.pieces import Pieces
from workers.lender.vllm.pool import Pool
from workers.lender.vllm.serving_memory import ServingMemory
from workers.lender.vllm.sharing import Sharing, guest_pool

FIRST_RETRY_SECONDS = 1.0
MOST_RETRY_SECONDS = 60.0
"""How long a guest that was dropped stays away: twice as long each time, until it has stayed for as long as this."""


class Guest:
    """At most one engine, for at most one process beside."""

    def __init__(
        self,
        config: LendConfig,
        feeder: Feeder,
        cost: StepCost,
        slack: Callable[[], Slack],
        serving: ServingMemory,
        log: Logger,
    ) -> None:
        """`cost`: of the guest's steps, which is told of each; `slack`: how serving stands, for those beside."""
        self._config = config
        self._feeder = feeder
        self._cost = cost
        self._slack = slack
        self._serving = serving
        self._log = log
        self._apart: Apart | None = None
        self._building: Pieces[tuple[Engine, Pool]] | None = None
        self._engine: Engine | None = None
        self._sharing: Sharing | None = None
        self._link: End | None = None
        self._host: EngineHost | None = None
        self._retry_at = 0.0
        self._retry_seconds = FIRST_RETRY_SECONDS
        self._began = 0.0

    @property
    def busy(self) -> bool:
        """Whether a tick has something to do."""
        if self._feeder.link is not self._link:
            return True
        if self._engine is None:
            return self._link is not None and time.monotonic() >= self._retry_at
        if self._sharing is not None and self._sharing.busy:
            return True
        return self._host is not None and self._host.busy

    @property
    def wanted_seconds(self) -> float:
        """What the next piece of work will take, as predicted."""
        if self._engine is None or (self._sharing is not None and self._sharing.grows):
            return self._config.piece_seconds
        return self._host.wanted_seconds if self._host is not None else 0.0

    def tick(self, *, seconds: float, tokens: int) -> None:
        """One bounded piece of work, of at most `seconds`, or a step of at most `tokens` tokens. Raises nothing."""
        try:
            if self._feeder.link is not self._link:
                self._change_link()
            elif self._engine is None:
                self._build(min(seconds, self._config.piece_seconds))
            elif self._sharing is not None and self._sharing.grows:
                self._share(grow=True)
                self.beat()
            elif self._host is not None:
                assert self._apart is not None
                with self._apart.stepping():
                    self._host.tick(tokens)
        except Exception as error:  # noqa: BLE001  whatever a guest does, serving goes on
            self._drop(error)

    def make_room(self) -> None:
        """Before a step of serving. Raises nothing."""
        if self._sharing is not None:
            try:
                self._share(grow=False)
            except Exception as error:  # noqa: BLE001  as above
                self._drop(error)

    def _share(self, *, grow: bool) -> None:
        assert self._sharing is not None
        host = self._host
        if self._sharing.look(None if host is None else host.give_up, grow=grow) and host is not None:
            host.tell_load()

    def beat(self) -> None:
        """Report while no tick may be done. Raises nothing."""
        if self._host is not None:
            try:
                self._host.beat()
            except Exception as error:  # noqa: BLE001  as above
                self._drop(error)

    def _change_link(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            host.leave()
        while self._feeder.ended:  # first: the link that is taken now may end at any moment
            self._feeder.ended.pop().close()
        self._link = self._feeder.link
        if self._engine is not None:
            self._enter(self._engine)

    def _enter(self, engine: Engine) -> None:
        if self._link is not None:
            assert self._sharing is not None
            self._host = EngineHost(
                engine,
                self._link.wires,
                self._cost,
                tick_seconds=self._config.heartbeat_seconds,
                slack=self._slack,
                lent=self._sharing.told,
            )

    def _build(self, seconds: float) -> None:
        if self._building is None:
            self._began = time.monotonic()
            self._apart = _apart_for_building()
            self._building = Pieces(lambda: _built(self._config), "rose-guest-build")
        assert self._apart is not None
        with self._apart.building():
            if not self._building.go_on(seconds):
                return
        building, self._building = self._building, None
        self._engine, pool = building.result()
        self._sharing = Sharing(self._serving, self._engine, pool, self._config)
        self._log.info(
            "rose: the guest is built, %.2f s after it was begun, in %d pieces of at most %.1f ms",
            time.monotonic() - self._began,
            building.pieces,
            1000 * building.longest_seconds,
        )
        self._enter(self._engine)

    def _drop(self, error: Exception) -> None:
        engine, self._engine, self._host, self._building = self._engine, None, None, None
        sharing, self._sharing = self._sharing, None
        if sharing is not None:
            sharing.close()
        now = time.monotonic()
        if now - self._retry_at > MOST_RETRY_SECONDS:
            self._retry_seconds = FIRST_RETRY_SECONDS
        self._retry_at, wait = now + self._retry_seconds, self._retry_seconds
        self._retry_seconds = min(2 * self._retry_seconds, MOST_RETRY_SECONDS)
        with suppress(Exception):  # an error may not let itself be told
            reason = f"{type(error).__name__}: {error}".encode(errors="replace").decode()
            self._log.error("rose: the guest is dropped, serving goes on, another is built in %.0f s: %s", wait, reason)
            self._tell(Gone(reason, wait))
        if engine is not None and self._apart is not None:
            with suppress(Exception), self._apart.stepping():  # what is broken may not let itself be closed
                engine.close()

    def _tell(self, gone: Gone) -> None:
        """Where there is no room for it, the end of the link says as much."""
        if self._link is None:
            return
        reports = Outbox(Line(self._link.wires.reports))
        reports.say(gone)
        if len(reports):
            self._link.connection.shutdown(socket.SHUT_RDWR)


def _built(config: LendConfig) -> tuple[Engine, Pool]:
    engine = engine_of(config)
    return engine, guest_pool(engine)


def engine_of(config: LendConfig) -> Engine:
    """Takes seconds. Raises ModelFolderError or EngineStartError."""
    engine = Engine(
        EngineConfig(
            model_folder=Path(config.model_folder),
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            max_running=config.max_turns,
            kv_cache_bytes=config.kv_cache_bytes,
            step_tokens=config.step_tokens,
        )
    )
    engine.hold_spare()
    return engine


def _apart_for_building() -> Apart:
    """A guest sets no thread counts, freezes no garbage, and leaves the root of serving's block hashes as it is."""
    apart = Apart()
    apart.set(torch, "set_num_threads", _nothing)
    apart.set(core, "freeze_gc_heap", _nothing)
    apart.set(gpu_worker, "freeze_gc_heap", _nothing)
    if hasattr(kv_cache_utils, "NONE_HASH"):
        apart.set(core, "init_none_hash", _nothing)
    return apart


def _nothing(*_: object) -> None:
    """In place of what a guest may not do."""
