"""The guest: the rollout engine inside a serving engine's process, built, ticked and dropped.

Keeps true
- No error of the guest leaves `tick`: the guest is dropped and reported as lost, and is built again after a back-off.
- A tick is one bounded piece of work: of the build, of staging a version, or an engine step. A guest without observed
  steps makes some steps before it lends (`guest_build`).
- Between two ticks, and within `as_host` between two layers of a step, the process is as the host left it.
- A guest is built when a sidecar has connected and sent Resume, and suspended when it should not lend any more
  (`lifecycle`), with or without a sidecar. A later sidecar gets the same engine, without turns, at its version.
- Serving's next step has the KV memory that it needs, whatever the guest holds (`kv_sharing`).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from logging import Logger

from rose.schemas.errors import describe_error
from rose.workers.executor.engine_loop import EngineLoop
from rose.workers.executor.ipc.messages import NO_LIMIT, EngineLost, NextWork, ServingStats, WorkKind
from rose.workers.executor.ipc.shared_memory import RingBuffer
from rose.workers.executor.step_cost import StepCost
from rose.workers.executor.vllm.engine import Engine
from rose.workers.lender.config import LendConfig
from rose.workers.lender.lifecycle import NOT_RESUMED, Action, GuestLifecycle, GuestState, SuspendedEngine
from rose.workers.lender.sidecar_link import CurrentSidecar, SidecarListener
from rose.workers.lender.vllm.guest_build import StepProfile, build_guest
from rose.workers.lender.vllm.kv_pool import KvPool
from rose.workers.lender.vllm.kv_sharing import KvSharing
from rose.workers.lender.vllm.process_globals import GlobalsSwap, globals_for_build
from rose.workers.lender.vllm.serving import ServingMemory
from rose.workers.lender.vllm.time_sliced import TimeSlicedCall
from rose.workers.lender.vllm.tp_driver import TpDriver
from rose.workers.lender.watchdog_page import StatusPage

FREE_SECONDS = 0.5
"""How long a guest that is suspended waits for idle serving before it frees its memory regardless."""


class Guest:
    """The guest of one server: at most one engine, for at most one sidecar."""

    def __init__(
        self,
        config: LendConfig,
        listener: SidecarListener,
        page: StatusPage,
        cost: StepCost,
        serving_stats: Callable[[], ServingStats],
        serving: ServingMemory,
        log: Logger,
        layer_hook: Callable[[], None],
        driver: TpDriver | None = None,
    ) -> None:
        """`cost`: observes the guest's steps. `serving_stats`: makes the serving part of a status.

        `layer_hook`: called between two layers of the guest's steps, if the model is in this process. `driver`: calls
        serving's workers; None if serving has one rank.
        """
        self._config = config
        self._listener = listener
        self._sidecar = CurrentSidecar(listener)
        self._page = page
        self._cost = cost
        self._serving_stats = serving_stats
        self._serving = serving
        self._log = log
        self._layer_hook = layer_hook
        self._driver = driver
        self._lifecycle = GuestLifecycle()
        self._suspending_since = 0.0
        self._globals: GlobalsSwap | None = None
        self._build_call: TimeSlicedCall[tuple[Engine, KvPool]] | None = None
        self._engine: Engine | None = None
        self._sharing: KvSharing | None = None
        """Shares the KV memory; None without an engine."""
        self._profile: StepProfile | None = None
        """First steps of an engine that has just been built; None without these."""
        self._engine_loop: EngineLoop | SuspendedEngine | None = None
        """Answers the sidecar; None without a sidecar."""
        self._granted_bytes = 0
        """KV bytes by the newest command; 0: the guest may not lend."""
        self._failure: Exception | None = None
        """Exception that was raised while the guest's step was paused."""
        self._build_began = 0.0

    @property
    def busy(self) -> bool:
        """Whether a tick has something to do."""
        if self._sidecar.changed:
            return True
        if self._sharing is not None and self._sharing.busy:
            return True
        if self._engine_loop is None:
            return self._is_abandoned
        return self._engine_loop.busy or self._lifecycle.has_action(self._should_lend, time.monotonic())

    @property
    def _is_abandoned(self) -> bool:
        """Whether an engine without a sidecar should not lend, and must be suspended."""
        return self._engine_loop is None and self._engine is not None and not self._should_lend

    @property
    def _should_lend(self) -> bool:
        return self._granted_bytes > 0 and not self._page.stop_reason

    @property
    def next_work(self) -> NextWork:
        """The piece of work of the next tick."""
        if self._engine is None or self._sharing is None:
            return NextWork(WorkKind.INTERRUPTIBLE, self._config.piece_seconds)
        if self._profile is not None and not self._needs_memory:
            return self._profile.next_work
        if self._sharing.can_grow:
            return NextWork(WorkKind.ATOMIC, self._config.piece_seconds)
        return (
            self._engine_loop.next_work
            if isinstance(self._engine_loop, EngineLoop)
            else NextWork(WorkKind.INTERRUPTIBLE, 0.0)
        )

    @property
    def _needs_memory(self) -> bool:
        """Whether the first steps wait for more KV memory, and the budget can grow."""
        assert self._profile is not None and self._sharing is not None
        return self._sharing.can_grow and self._profile.needs_memory(self._sharing.room_tokens)

    def tick(self, *, seconds: float, tokens: int) -> None:
        """Do one piece of work of at most `seconds`, or a step of at most `tokens` tokens. Raises nothing."""
        self._page.guest_entered()
        try:
            if self._sidecar.changed:
                self._switch_connection()
            else:
                self._advance(seconds, tokens)
        except Exception as error:  # noqa: BLE001  serving continues whatever error the guest has
            self.drop(error)
        finally:
            self._page.guest_left()

    def tick_idle(self, *, blocked: bool) -> None:
        """Report, and continue to suspend a guest that should not lend.

        `blocked`: whether a tick is not allowed; False if there is only nothing to do. Raises nothing.
        """
        self._page.guest_entered()
        try:
            if self._sidecar.changed:
                self._switch_connection()
            if self._engine_loop is not None:
                self._engine_loop.tick_idle(blocked=blocked)
                self._granted_bytes = self._engine_loop.granted_bytes
            self._suspend_if_unwanted(blocked=blocked)
        except Exception as error:  # noqa: BLE001  as above
            self.drop(error)
        finally:
            self._page.guest_left()

    def _advance(self, seconds: float, tokens: int) -> None:
        if self._engine_loop is None:
            self._suspend_if_unwanted(blocked=False)
            return
        self._update_lifecycle()
        loop: EngineLoop | SuspendedEngine | None = self._engine_loop
        assert loop is not None
        if self._lifecycle.state is GuestState.SUSPENDING:
            loop.tick_idle()
            self._continue_suspending(blocked=False)
        elif isinstance(loop, SuspendedEngine):
            loop.tick()
            if self._lifecycle.state is GuestState.RESUMING:
                self._continue_resuming(seconds, tokens)
        elif self._sharing is not None and self._sharing.can_grow:
            self._rebalance_memory(grow=True)
            loop.tick_idle()
        else:
            assert self._globals is not None
            with self._globals.as_guest():
                loop.tick(tokens, seconds)
        self._granted_bytes = loop.granted_bytes
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def as_host(self) -> Iterator[None]:
        """Give the thread to the host while the guest's step is paused between two layers."""
        assert self._engine is not None and self._globals is not None
        began = time.perf_counter()
        self._page.guest_left()
        with self._globals.as_host():
            yield
        self._page.guest_entered()
        self._engine.suspended_seconds += time.perf_counter() - began

    def tick_mid_step(self, *, blocked: bool) -> bool:
        """Report while the guest's step is paused. Return whether the step may stay paused.

        The step must be finished if an abort, a suspension, another sidecar or an error waits for its end. `blocked`:
        whether the step is not allowed to continue. Raises nothing.
        """
        if self._engine_loop is None or self._sidecar.changed or self._failure is not None:
            return False
        self._page.guest_entered()
        try:
            may_wait = self._engine_loop.tick_mid_step(blocked=blocked)
            self._granted_bytes = self._engine_loop.granted_bytes
            return may_wait and self._should_lend
        except Exception as error:  # noqa: BLE001  raised after the step, which is finished first
            self._failure = error
            return False
        finally:
            self._page.guest_left()

    def make_room(self) -> None:
        """Give serving the KV memory that its next step needs. Raises nothing."""
        if self._sharing is not None:
            try:
                self._rebalance_memory(grow=False)
            except Exception as error:  # noqa: BLE001  as above
                self.drop(error)

    def make_room_mid_step(self) -> bool:
        """Give serving its KV memory while the guest's step is paused. Raises nothing.

        Return False if this is not done, because it needs an abort of a turn, which no step allows.
        """
        if self._sharing is None or self._engine_loop is None:
            return True
        try:
            done = self._sharing.rebalance_mid_step(most_bytes=self._engine_loop.granted_bytes or NO_LIMIT)
            if done:
                self._report_changes()
            return done
        except Exception as error:  # noqa: BLE001  as above
            self._failure = error
            return False

    def _rebalance_memory(self, *, grow: bool) -> None:
        assert self._sharing is not None
        loop = self._engine_loop
        give_up: Callable[[str, str], None] | None = None
        if isinstance(loop, EngineLoop):
            give_up = loop.abort_turn
        elif loop is not None and self._profile is not None:
            give_up = self._profile.abort_turn
        most = (loop is not None and loop.granted_bytes) or NO_LIMIT  # a suspension aborts turns one by one
        self._sharing.rebalance(give_up, most_bytes=most, grow=grow)
        self._report_changes()

    def _report_changes(self) -> None:
        if isinstance(self._engine_loop, EngineLoop) and self._sharing is not None and self._sharing.take_changed():
            self._engine_loop.report_status()

    def _update_lifecycle(self) -> None:
        now = time.monotonic()
        if self._profile is not None and not self._should_lend:
            self._start_lending()
        match self._lifecycle.next_action(self._should_lend, now):
            case Action.BUILD:
                self._build_began = now
                self._globals = globals_for_build()
                self._build_call = TimeSlicedCall(
                    partial(build_guest, self._config, self._driver, self._log), "rose-guest-build"
                )
            case Action.SUSPEND:
                self._suspending_since = now
            case Action.NONE:
                pass
        if isinstance(self._engine_loop, SuspendedEngine):
            self._engine_loop.reason = self._suspended_reason

    @property
    def _suspended_reason(self) -> str:
        if self._lifecycle.state is GuestState.RESUMING:
            return "its guest is being built"
        if self._lifecycle.state is GuestState.DROPPED:
            return "its guest was dropped, and is built again"
        return self._page.stop_reason or NOT_RESUMED

    def _suspend_if_unwanted(self, *, blocked: bool) -> None:
        """Suspend the guest if it should not lend."""
        if not self._should_lend:
            self._update_lifecycle()
        if self._lifecycle.state is GuestState.SUSPENDING:
            self._continue_suspending(blocked=blocked)

    def _continue_suspending(self, *, blocked: bool) -> None:
        """Return one turn, or free all memory if no turn is left."""
        assert self._engine is not None and self._globals is not None
        if isinstance(self._engine_loop, EngineLoop) and not self._engine_loop.abort_one_turn():
            return
        if blocked and time.monotonic() - self._suspending_since < FREE_SECONDS:
            return
        engine = self._engine
        self._release_engine()
        with self._globals.as_guest():
            engine.close()
        self._lifecycle.on_freed()
        self._log.info("rose: guest_suspended reason=%s", self._suspended_reason)
        self._attach_loop()

    def _switch_connection(self) -> None:
        if self._engine_loop is not None:
            self._granted_bytes = self._engine_loop.granted_bytes
            self._engine_loop.detach()
        self._engine_loop = None
        if self._profile is not None:
            self._profile.close()
        self._sidecar.switch()
        self._attach_loop()
        if self._sharing is not None:
            self._rebalance_memory(grow=False)  # without a sidecar the guest's memory is given back

    def _attach_loop(self) -> None:
        """Make the loop that answers the sidecar: an `EngineLoop`, or a `SuspendedEngine` if no engine is ready."""
        if self._engine_loop is not None:
            self._granted_bytes = self._engine_loop.granted_bytes
        self._engine_loop = None
        channel, reports, every = self._sidecar.channel, self._sidecar.reports, self._config.heartbeat_seconds
        if channel is None or reports is None:
            return
        if self._engine is None or self._profile is not None:
            self._engine_loop = SuspendedEngine(
                RingBuffer(channel.commands), reports, self._serving_stats, status_seconds=every
            )
            self._engine_loop.reason = self._suspended_reason
        else:
            assert self._sharing is not None
            serving_stats, lending_stats = self._serving_stats, self._sharing.take_stats
            self._engine_loop = EngineLoop(
                self._engine,
                channel,
                reports,
                self._cost,
                status_seconds=every,
                serving_stats=serving_stats,
                lending_stats=lending_stats,
            )
        self._engine_loop.granted_bytes = self._granted_bytes

    def _continue_resuming(self, seconds: float, tokens: int) -> None:
        """Do one piece of the build, or one of the first steps."""
        if self._profile is None:
            self._build(min(seconds, self._config.piece_seconds))
        elif self._needs_memory:
            self._rebalance_memory(grow=True)
        else:
            assert self._globals is not None and self._sharing is not None
            with self._globals.as_guest():
                self._profile.step(tokens, self._sharing.room_tokens)
            if self._profile.done:
                self._start_lending()

    def _start_lending(self) -> None:
        """End the first steps and start to lend."""
        assert self._profile is not None
        self._profile.close()
        self._profile = None
        self._lifecycle.on_built()
        self._attach_loop()

    def _build(self, seconds: float) -> None:
        assert self._build_call is not None and self._globals is not None
        if self._driver is not None and self._driver.has_pending_call:
            self._driver.resume_pending(seconds)
            return
        with self._globals.as_guest_build():
            if not self._build_call.resume(seconds):
                return
        building, self._build_call = self._build_call, None
        self._engine, pool = building.result()
        self._listener.has_guest = True
        self._engine.set_layer_hook(self._layer_hook)
        self._sharing = KvSharing(self._serving, self._engine, pool, self._config)
        self._profile = StepProfile(self._engine, self._cost)
        pieces, longest_seconds = (0, 0.0) if self._driver is None else self._driver.take_timings()
        self._log.info(
            "rose: guest_built seconds=%.2f slices=%d longest_slice_seconds=%.4f",
            time.monotonic() - self._build_began,
            pieces + building.slices,
            max(longest_seconds, building.longest_seconds),
        )
        if self._cost.has_observed:
            self._start_lending()

    def drop(self, error: Exception) -> None:
        """Drop the engine because of `error`, and tell the sidecar. Raises nothing."""
        if self._build_call is not None:  # the build has not failed and cannot be ended: the next sidecar waits for it
            self._engine_loop = None
            self._sidecar.close()
            self._log.error("rose: sidecar_disconnected reason=%s", describe_error(error))
            return
        engine, self._failure = self._engine, None
        with suppress(Exception):  # the release of a broken engine may fail
            self._release_engine()
        wait, reason = self._lifecycle.on_fault(time.monotonic()), describe_error(error)
        self._log.error("rose: guest_dropped retry_seconds=%.0f reason=%s", wait, reason)
        with suppress(Exception):  # the link may be broken
            self._sidecar.report_lost(
                EngineLost(reason, wait), then_close=isinstance(self._engine_loop, SuspendedEngine)
            )
        if engine is not None and self._globals is not None:
            with suppress(Exception), self._globals.as_guest():  # as above
                engine.close()
        with suppress(Exception):  # no file descriptor may be left
            self._attach_loop()
        if self._engine_loop is None:
            self._sidecar.close()

    def _release_engine(self) -> None:
        """Forget the engine, and give all KV memory to serving."""
        sharing, self._engine, self._sharing, self._profile = self._sharing, None, None, None
        self._listener.has_guest = False
        if sharing is not None:
            sharing.close()
