"""The build of a guest: its engine, the pool of its KV memory, and its first steps.

Keeps true
- A build that fails, and a guest that ends, leave nothing in memory, on any rank.
- A build writes to no KV block but the null block, also where vLLM warms up its kernels.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from logging import Logger
from pathlib import Path

from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu import attn_utils

from rose.schemas.prompts import Sampling
from rose.workers.executor.ipc.messages import NextWork, WorkKind
from rose.workers.executor.step_cost import StepCost
from rose.workers.executor.vllm.engine import Engine
from rose.workers.executor.vllm.engine_core import ModelBackend
from rose.workers.executor.vllm.types import EngineConfig, EngineStartError
from rose.workers.lender.config import LendConfig
from rose.workers.lender.vllm.guest_device import CPU, GuestDevice
from rose.workers.lender.vllm.host_process import (
    WRITES_TO_NULL_BLOCK,
    GlobalsSwap,
    TimeSlicedCall,
    globals_for_build,
)
from rose.workers.lender.vllm.kv_sharing import KvPool, KvSharing, ServingMemory, guest_pool
from rose.workers.lender.vllm.shared_cache import CacheLayout, CacheView, GuestBackend, SharedCacheBackend
from rose.workers.lender.vllm.tp_driver import TpBackend, TpDriver

NULL_BLOCK = 0
"""vLLM's block for no tokens, in serving's view and the guest's."""

SIZE_GROWTH = 4
"""Ratio of each step size to the size before."""

ROUNDS = 2
"""Number of steps of each size."""

MAX_PROFILE_TOKENS = 64
"""Tokens of the largest step: the cost of larger steps can then be extrapolated well enough."""

PROFILE_TURN = "profile"
"""Name of the turn whose prefill makes the steps."""


class StepProfile:
    """The first steps of an engine without turns, which measure the cost of its steps."""

    def __init__(self, engine: Engine, cost: StepCost) -> None:
        """`cost`: observes the steps after the first one, which is a warm-up."""
        self.done = False
        self._engine = engine
        self._cost = cost
        self._sizes: list[int] | None = None
        """Tokens of the steps to come, the next one last; None before the first step."""
        self._warm = False

    @property
    def next_work(self) -> NextWork:
        """The next step, as a piece of work."""
        return NextWork(WorkKind.STEP, self._cost.cautious_seconds(self._sizes[-1] if self._sizes else 1))

    def needs_memory(self, room_tokens: int) -> bool:
        """Whether more KV memory than for `room_tokens` tokens would allow more step sizes."""
        return self._sizes is None and len(profile_sizes(room_tokens)) < len(
            profile_sizes(self._engine.longest_tokens - 1)
        )

    def step(self, most_tokens: int, room_tokens: int) -> None:
        """Run a step of at most `most_tokens` tokens. All steps together fit in `room_tokens`. Raises EngineBroken."""
        if self.done:
            return
        if self._sizes is None:
            room = min(room_tokens, self._engine.longest_tokens - 1)
            self._sizes = profile_sizes(room)
            if not self._sizes:
                self.done = True
                return
            context = [0] * (sum(self._sizes) + 1)  # the last token is not computed, so no token is sampled
            self._engine.add(PROFILE_TURN, context, Sampling(max_tokens=1), policy_version=self._engine.version)
        step = self._engine.step(min(self._sizes.pop(), most_tokens))
        if self._warm and step.tokens:
            self._cost.observe(step.tokens, step.seconds)
        self._warm = True
        if not self._sizes:
            self.close()

    def abort_turn(self, name: str, reason: str) -> None:
        """End the first steps: serving needs their memory."""
        self.close()

    def close(self) -> None:
        """End the first steps at any point."""
        self._engine.abort(PROFILE_TURN)
        self.done = True


def profile_sizes(room_tokens: int) -> list[int]:
    """Return the tokens of each step, the first step last, for as many steps as fit in `room_tokens`."""
    found: list[int] = []
    size = 1
    while (
        size <= MAX_PROFILE_TOKENS and 1 + ROUNDS * (sum(found) + size) < room_tokens
    ):  # 1: the token that is not computed
        found.append(size)
        size *= SIZE_GROWTH
    return [*reversed(found * ROUNDS), 1] if found else []


@dataclass(frozen=True, slots=True)
class BuiltGuest:
    """A guest's engine, with all that exists as long as the engine does."""

    engine: Engine
    sharing: KvSharing
    """Shares the KV memory of serving and the engine."""
    globals: GlobalsSwap
    profile: StepProfile
    """The first steps."""

    @property
    def needs_memory(self) -> bool:
        """Whether the first steps wait for more KV memory, and the budget can grow."""
        return self.sharing.can_grow and self.profile.needs_memory(self.sharing.room_tokens)

    def close(self) -> None:
        """Give all KV memory to serving, and free the memory of the engine."""
        try:
            self.sharing.close()
        finally:
            _close_engine(self.engine, self.globals)


def _close_engine(engine: Engine, globals_swap: GlobalsSwap) -> None:
    """Free the memory of an engine, and all that its process-wide values hold."""
    try:
        with globals_swap.as_guest():
            engine.close()
    finally:
        globals_swap.close()


class GuestBuild:
    """The build of one guest, on a thread that advances only while it is resumed."""

    def __init__(
        self,
        config: LendConfig,
        serving: ServingMemory,
        cost: StepCost,
        layer_hook: Callable[[], None],
        driver: TpDriver | None,
        device: GuestDevice,
        log: Logger,
    ) -> None:
        """Begin to build a guest.

        `cost` observes the first steps. `layer_hook` is called between two layers of the guest's steps, if the model is
        in this process. `driver` calls serving's workers; None if serving has one rank. `device`: the guest's part of
        the device.
        """
        self.is_running = True
        """Whether the thread still builds: it cannot be ended."""
        self._config = config
        self._serving = serving
        self._cost = cost
        self._layer_hook = layer_hook
        self._driver = driver
        self._log = log
        self._began = time.monotonic()
        self._globals = globals_for_build(device)
        self._globals.set(*WRITES_TO_NULL_BLOCK, True)
        view = None if serving.runner is None else CacheView(serving.runner)
        if view is not None:
            for module in (gpu_model_runner, attn_utils):
                self._globals.set(module, "allocate_kv_cache", view.allocate)
        build = partial(build_guest, config, serving.layout, driver or view, device, log)
        self._call = TimeSlicedCall(build, "rose-guest-build", device)

    def resume(self, seconds: float) -> BuiltGuest | None:
        """Build for `seconds`. Return the guest when it is built. Raises what the build raised."""
        if self._driver is not None and self._driver.has_pending_call:
            self._driver.resume_pending(seconds)
            return None
        with self._globals.as_guest_build():
            if not self._call.resume(seconds):
                return None
        self.is_running = False
        self._globals.set(*WRITES_TO_NULL_BLOCK, False)
        try:
            engine, pool, shared = self._call.result()
        except Exception:
            gc.collect()  # a model is a cycle, and no engine has closed it
            self._globals.close()
            raise
        try:
            if shared:
                with self._globals.as_guest():
                    self._serving.zero([NULL_BLOCK])  # serving reads it where a window has left blocks behind
            engine.set_layer_hook(partial(_before_layer, self._globals.device, self._layer_hook))
            sharing = KvSharing(self._serving, engine, pool, self._config, shared=shared)
        except Exception:
            _close_engine(engine, self._globals)
            raise
        pieces, longest_seconds = (0, 0.0) if self._driver is None else self._driver.take_timings()
        self._log.info(
            "rose: guest_built kv_cache=%s block_tokens=%d seconds=%.2f slices=%d longest_slice_seconds=%.4f",
            "shared" if shared else "own",
            engine.cache.groups[0][0],
            time.monotonic() - self._began,
            pieces + self._call.slices,
            max(longest_seconds, self._call.longest_seconds),
        )
        return BuiltGuest(engine, sharing, self._globals, StepProfile(engine, self._cost))


def _before_layer(device: GuestDevice, layer_hook: Callable[[], None]) -> None:
    device.before_layer()
    layer_hook()


def build_engine(config: LendConfig, backend: ModelBackend | None = None, device: GuestDevice = CPU) -> Engine:
    """Build the guest's engine with its spare weights. Takes seconds. Raises FolderError or EngineStartError."""
    engine = Engine(
        EngineConfig(
            model_folder=Path(config.model_folder),
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            max_running=config.max_turns,
            kv_cache_bytes=config.kv_cache_bytes,
            step_tokens=config.step_tokens,
            # compilation and the capture of CUDA graphs would hold up serving for seconds
            vllm_arguments=device.engine_arguments,
        ),
        backend,
    )
    engine.allocate_spare()
    return engine


def build_guest(
    config: LendConfig,
    layout: CacheLayout | None,
    place: TpDriver | CacheView | None,
    device: GuestDevice,
    log: Logger,
) -> tuple[Engine, KvPool, bool]:
    """Build the guest's engine and its KV pool. Return both, and whether the guest has a view of serving's cache.

    `layout`: that of serving's cache. `place`: the driver of serving's ranks, or the view in this process; None if
    serving's cache is in another process. Takes seconds. Raises FolderError or EngineStartError.
    """
    backend: SharedCacheBackend = (
        GuestBackend(layout, place) if place is None or isinstance(place, CacheView) else TpBackend(layout, place, log)
    )
    try:
        engine = build_engine(config, backend, device)
        _check_longest_turn(engine, config.kv_cache_bytes)
        reason = None if backend.executor is None else backend.executor.own_cache_reason
        if reason is not None:
            log.warning("rose: guest_cache_not_shared kv_bytes=%d reason=%s", config.kv_cache_bytes, reason)
        return engine, guest_pool(engine), reason is None
    except Exception:
        backend.release()
        raise


def _check_longest_turn(engine: Engine, most_bytes: int) -> None:
    """Raise EngineStartError if the longest turn takes more than `most_bytes`."""
    needed = engine.cache.blocks_of(engine.longest_tokens) * engine.cache.block_bytes
    if needed > most_bytes:
        what = f"a turn of max_model_len ({engine.longest_tokens}) takes KV blocks of {needed} bytes"
        raise EngineStartError(f"{what}, more than kv_cache_bytes ({most_bytes}): raise it, or lower max_model_len")
