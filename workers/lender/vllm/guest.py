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
from logging import Logger

from rose.schemas.errors import describe_error
from rose.schemas.heartbeats import BUILDING_REASON, NOT_RESUMED_REASON
from rose.workers.executor.engine_loop import EngineLoop
from rose.workers.executor.ipc.messages import NO_LIMIT, EngineLost, NextWork, ServingStats, WorkKind
from rose.workers.executor.ipc.shared_memory import RingBuffer
from rose.workers.executor.step_cost import StepCost
from rose.workers.lender.config import LendConfig
from rose.workers.lender.guest_lifecycle import (
    Building,
    Dropped,
    GuestLifecycle,
    Lending,
    Profiling,
    Suspended,
    SuspendedEngine,
    Suspending,
)
from rose.workers.lender.sidecar_link import CurrentSidecar, SidecarListener
from rose.workers.lender.status_page import StatusPage
from rose.workers.lender.vllm.guest_build import BuiltGuest, GuestBuild
from rose.workers.lender.vllm.host_process import release_frames

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
        log: Logger,
        start_build: Callable[[], GuestBuild],
    ) -> None:
        """`cost`: observes the guest's steps. `serving_stats`: makes the serving part of a status."""
        self._config = config
        self._sidecar = CurrentSidecar(listener)
        self._page = page
        self._cost = cost
        self._serving_stats = serving_stats
        self._log = log
        self._start_build = start_build
        self._lifecycle: GuestLifecycle[GuestBuild, BuiltGuest] = GuestLifecycle()
        self._loop: EngineLoop | SuspendedEngine | None = None
        """Answers the sidecar; None without a sidecar."""
        self._kept_grant = 0
        """KV bytes by the newest command of a sidecar that has left; 0: the guest may not lend."""
        self._pause_error: Exception | None = None
        """Exception that was raised while the guest's step was paused; raised again after the step."""

    @property
    def state(self) -> type:
        """The class of the lifecycle's state."""
        return type(self._lifecycle.state)

    @property
    def exists(self) -> bool:
        """Whether there is an engine."""
        return self._lifecycle.guest is not None

    @property
    def busy(self) -> bool:
        """Whether a tick has something to do."""
        guest = self._lifecycle.guest
        if self._sidecar.changed or (guest is not None and guest.sharing.can_grow):
            return True
        if self._loop is None:  # a guest without a sidecar that should not lend must be suspended
            return guest is not None and not self._should_lend
        return self._loop.busy or self._lifecycle.has_action(self._should_lend, time.monotonic())

    @property
    def _should_lend(self) -> bool:
        return self._granted_bytes > 0 and not self._page.stop_reason

    @property
    def _granted_bytes(self) -> int:
        """KV bytes by the newest command."""
        return self._kept_grant if self._loop is None else self._loop.granted_bytes

    @property
    def next_work(self) -> NextWork:
        """The piece of work of the next tick."""
        match self._lifecycle.state:
            case Suspended() | Dropped() | Building():
                return NextWork(WorkKind.INTERRUPTIBLE, self._config.piece_seconds)
            case Profiling(guest) if not guest.needs_memory:
                return guest.profile.next_work
            case Profiling(guest) | Lending(guest) | Suspending(guest) if guest.sharing.can_grow:
                return NextWork(WorkKind.ATOMIC, self._config.piece_seconds)
        loop = self._loop
        return loop.next_work if isinstance(loop, EngineLoop) else NextWork(WorkKind.INTERRUPTIBLE, 0.0)

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
            if self._loop is not None:
                self._loop.tick_idle(blocked=blocked)
            self._suspend_if_unwanted(blocked=blocked)
        except Exception as error:  # noqa: BLE001  as above
            self.drop(error)
        finally:
            self._page.guest_left()

    def _advance(self, seconds: float, tokens: int) -> None:
        if self._loop is None:
            self._suspend_if_unwanted(blocked=False)
            return
        self._update_lifecycle()
        match self._lifecycle.state:
            case Suspending(guest, since):
                self._loop.tick_idle()
                self._continue_suspending(guest, since, blocked=False)
            case Building(build):
                self._loop.tick()
                self._continue_build(build, min(seconds, self._config.piece_seconds))
            case Profiling(guest):
                self._loop.tick()
                self._continue_profile(guest, tokens)
            case Lending(guest) if guest.sharing.can_grow:
                self._rebalance_memory(guest, grow=True)
                self._loop.tick_idle()
            case Lending(guest):
                with guest.globals.as_guest():
                    self._loop.tick(tokens, seconds)
            case Suspended() | Dropped():
                self._loop.tick()
        if self._pause_error is not None:
            raise self._pause_error

    @contextmanager
    def as_host(self) -> Iterator[None]:
        """Give the thread to the host while the guest's step is paused between two layers."""
        guest = self._lifecycle.guest
        if guest is None:  # the thread is the host's
            yield
            return
        with guest.globals.as_host():
            began = time.perf_counter()
            self._page.guest_left()
            yield
            self._page.guest_entered()
            guest.engine.suspended_seconds += time.perf_counter() - began

    def tick_mid_step(self, *, blocked: bool) -> bool:
        """Report while the guest's step is paused. Return whether the step may stay paused.

        The step must be finished if an abort, a suspension, another sidecar or an error waits for its end. `blocked`:
        whether the step is not allowed to continue. Raises nothing.
        """
        if self._loop is None or self._sidecar.changed or self._pause_error is not None:
            return False
        self._page.guest_entered()
        try:
            may_wait = self._loop.tick_mid_step(blocked=blocked)
            return may_wait and self._should_lend
        except Exception as error:  # noqa: BLE001  raised after the step, which is finished first
            self._pause_error = error
            return False
        finally:
            self._page.guest_left()

    def make_room(self) -> None:
        """Give serving the KV memory that its next step needs. Raises nothing."""
        guest = self._lifecycle.guest
        if guest is not None:
            try:
                self._rebalance_memory(guest, grow=False)
            except Exception as error:  # noqa: BLE001  as above
                self.drop(error)

    def make_room_mid_step(self) -> bool:
        """Give serving its KV memory while the guest's step is paused. Raises nothing.

        Return False if this is not done, because it needs an abort of a turn, which no step allows.
        """
        guest = self._lifecycle.guest
        if guest is None or self._loop is None:
            return True
        try:
            done = guest.sharing.rebalance_mid_step(most_bytes=self._loop.granted_bytes or NO_LIMIT)
            if done:
                self._report_changes(guest)
            return done
        except Exception as error:  # noqa: BLE001  as above
            self._pause_error = error
            return False

    def _rebalance_memory(self, guest: BuiltGuest, *, grow: bool) -> None:
        loop = self._loop
        give_up: Callable[[str, str], None] | None = None
        if isinstance(loop, EngineLoop):
            give_up = loop.abort_turn
        elif loop is not None and self.state is Profiling:
            give_up = guest.profile.abort_turn
        most = (loop is not None and loop.granted_bytes) or NO_LIMIT  # a suspension aborts turns one by one
        guest.sharing.rebalance(give_up, most_bytes=most, grow=grow)
        self._report_changes(guest)

    def _report_changes(self, guest: BuiltGuest) -> None:
        if isinstance(self._loop, EngineLoop) and guest.sharing.take_changed():
            self._loop.report_status()

    def _update_lifecycle(self) -> None:
        match self._lifecycle.state:
            case Profiling(guest) if not self._should_lend:
                self._start_lending(guest)
        self._lifecycle.advance(self._should_lend, time.monotonic(), self._start_build)

    def _suspended_reason(self) -> str:
        match self._lifecycle.state:
            case Building() | Profiling():
                return BUILDING_REASON
            case Dropped():
                return "its guest was dropped, and is built again"
            case _:
                return self._page.stop_reason or NOT_RESUMED_REASON

    def _suspend_if_unwanted(self, *, blocked: bool) -> None:
        """Suspend the guest if it should not lend."""
        if not self._should_lend:
            self._update_lifecycle()
        match self._lifecycle.state:
            case Suspending(guest, since):
                self._continue_suspending(guest, since, blocked=blocked)

    def _continue_suspending(self, guest: BuiltGuest, since: float, *, blocked: bool) -> None:
        """Return one turn, or free all memory if no turn is left."""
        if isinstance(self._loop, EngineLoop) and not self._loop.abort_one_turn():
            return
        if blocked and time.monotonic() - since < FREE_SECONDS:
            return
        self._lifecycle.on_freed()
        guest.close()
        self._log.info("rose: guest_suspended reason=%s", self._suspended_reason())
        self._attach_loop()

    def _switch_connection(self) -> None:
        if self._loop is not None:
            self._loop.detach()
        self._detach_loop()
        match self._lifecycle.state:
            case Profiling(guest):
                guest.profile.close()
        self._sidecar.switch()
        self._attach_loop()
        guest_now = self._lifecycle.guest
        if guest_now is not None:
            self._rebalance_memory(guest_now, grow=False)  # without a sidecar the guest's memory is given back

    def _detach_loop(self) -> None:
        self._kept_grant, self._loop = self._granted_bytes, None

    def _attach_loop(self) -> None:
        """Make the loop that answers the sidecar: an `EngineLoop`, or a `SuspendedEngine` if no engine is ready."""
        self._detach_loop()
        channel, reports, every = self._sidecar.channel, self._sidecar.reports, self._config.heartbeat_seconds
        if channel is None or reports is None:
            return
        match self._lifecycle.state:
            case Lending(guest) | Suspending(guest):
                self._loop = EngineLoop(
                    guest.engine,
                    channel,
                    reports,
                    self._cost,
                    status_seconds=every,
                    serving_stats=self._serving_stats,
                    lending_stats=guest.sharing.take_stats,
                    granted_bytes=self._kept_grant,
                )
            case _:
                self._loop = SuspendedEngine(
                    RingBuffer(channel.commands),
                    reports,
                    self._serving_stats,
                    self._suspended_reason,
                    status_seconds=every,
                    granted_bytes=self._kept_grant,
                )

    def _continue_build(self, build: GuestBuild, seconds: float) -> None:
        guest = build.resume(seconds)
        if guest is not None:
            self._lifecycle.on_built(guest)
            if self._cost.has_observed:
                self._start_lending(guest)

    def _continue_profile(self, guest: BuiltGuest, tokens: int) -> None:
        """Do one of the first steps, or give them memory."""
        if guest.needs_memory:
            self._rebalance_memory(guest, grow=True)
            return
        with guest.globals.as_guest():
            guest.profile.step(tokens, guest.sharing.room_tokens)
        if guest.profile.done:
            self._start_lending(guest)

    def _start_lending(self, guest: BuiltGuest) -> None:
        """End the first steps and start to lend."""
        guest.profile.close()
        self._lifecycle.on_profiled(guest)
        self._attach_loop()

    def drop(self, error: Exception) -> None:
        """Drop the engine because of `error`, and tell the sidecar. Raises nothing."""
        match self._lifecycle.state:
            case Building(build) if build.is_running:  # the next sidecar waits for the build, which has not failed
                self._detach_loop()
                self._sidecar.close()
                self._log.error("rose: sidecar_disconnected reason=%s", describe_error(error))
                return
        guest, self._pause_error = self._lifecycle.guest, None
        wait, reason = self._lifecycle.on_fault(time.monotonic()), describe_error(error)
        self._log.error("rose: guest_dropped retry_seconds=%.0f reason=%s", wait, reason)
        with suppress(Exception):  # the link may be broken
            self._sidecar.report_lost(EngineLost(reason, wait), then_close=isinstance(self._loop, SuspendedEngine))
        release_frames(error)
        if guest is not None:
            with suppress(Exception):  # the release of a broken engine may fail
                guest.close()
        with suppress(Exception):  # no file descriptor may be left
            self._attach_loop()
        if self._loop is None:
            self._sidecar.close()
