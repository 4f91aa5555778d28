"""Building a guest: its engine, and the pool of its KV memory.

Keeps true: a build that fails holds nothing, on no rank.
"""

from logging import Logger
from pathlib import Path

from rose.schemas.prompts import Sampling
from rose.workers.executor.ipc.messages import NextWork, WorkKind
from rose.workers.executor.step_cost import StepCost
from rose.workers.executor.vllm.backend import InProcessBackend, ModelBackend
from rose.workers.executor.vllm.engine import Engine, EngineConfig
from rose.workers.lender.config import LendConfig
from rose.workers.lender.vllm.kv_pool import KvPool
from rose.workers.lender.vllm.kv_sharing import guest_pool
from rose.workers.lender.vllm.tp_driver import TpBackend, TpDriver

SIZE_GROWTH = 4
"""Each size is so many times the one before."""

ROUNDS = 2
"""That each size is tried."""

MAX_PROFILE_TOKENS = 64
"""Tokens of the largest step: what the prices of larger ones are is then known well enough to begin with."""

PROFILE_TURN = "profile"
"""Of the turn whose prefill it is."""


class StepProfile:
    """Of an engine that holds no turn."""

    def __init__(self, engine: Engine, cost: StepCost) -> None:
        """`cost` is told of the steps."""
        self.done = False
        self._engine = engine
        self._cost = cost
        self._sizes: list[int] | None = None
        """Of the steps to come, the next one last; None before the first."""
        self._warm = False

    @property
    def next_work(self) -> NextWork:
        """The next step."""
        return NextWork(WorkKind.STEP, self._cost.cautious_seconds(self._sizes[-1] if self._sizes else 1))

    def needs_memory(self, room_tokens: int) -> bool:
        """Whether it could do with more KV memory than for so many tokens."""
        return self._sizes is None and len(profile_sizes(room_tokens)) < len(
            profile_sizes(self._engine.longest_tokens - 1)
        )

    def step(self, most_tokens: int, room_tokens: int) -> None:
        """One step, of at most so many tokens; they all find room in `room_tokens`. Raises EngineBroken."""
        if self.done:
            return
        if self._sizes is None:
            room = min(room_tokens, self._engine.longest_tokens - 1)
            self._sizes = profile_sizes(room)
            if not self._sizes:
                self.done = True
                return
            context = [0] * (sum(self._sizes) + 1)  # its last token is not computed: nothing is drawn
            self._engine.add(PROFILE_TURN, context, Sampling(max_tokens=1), policy_version=self._engine.version)
        step = self._engine.step(min(self._sizes.pop(), most_tokens))
        if self._warm and step.tokens:
            self._cost.observe(step.tokens, step.seconds)
        self._warm = True
        if not self._sizes:
            self.close()

    def abort_turn(self, name: str, reason: str) -> None:
        """Serving wants its memory."""
        self.close()

    def close(self) -> None:
        """However far it is."""
        self._engine.abort(PROFILE_TURN)
        self.done = True


def profile_sizes(room_tokens: int) -> list[int]:
    """Tokens of each step, the first one last, as many as there is room for."""
    found: list[int] = []
    size = 1
    while (
        size <= MAX_PROFILE_TOKENS and 1 + ROUNDS * (sum(found) + size) < room_tokens
    ):  # and a token that is not computed
        found.append(size)
        size *= SIZE_GROWTH
    return [*reversed(found * ROUNDS), 1] if found else []


def build_guest(config: LendConfig, driver: TpDriver | None, log: Logger) -> tuple[Engine, KvPool]:
    """On the ranks of a serving that has several. Takes seconds. Raises ModelFolderError or EngineStartError."""
    backend: ModelBackend = InProcessBackend() if driver is None else TpBackend(driver, log)
    try:
        engine = build_engine(config, backend)
        return engine, guest_pool(engine)
    except Exception:
        backend.release()
        raise


def build_engine(config: LendConfig, backend: ModelBackend | None = None) -> Engine:
    """Takes seconds. Raises ModelFolderError or EngineStartError."""
    engine = Engine(
        EngineConfig(
            model_folder=Path(config.model_folder),
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            max_running=config.max_turns,
            kv_cache_bytes=config.kv_cache_bytes,
            step_tokens=config.step_tokens,
        ),
        backend,
    )
    engine.allocate_spare()
    return engine
