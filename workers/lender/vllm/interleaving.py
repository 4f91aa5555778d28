"""Turns of the guest in the serving engine's loop. See `attach`.

Keeps true
- Who comes while a step of the guest's computes in this process waits for one layer of it, its logits or its sampling:
  between them the step stands still until admission would let the rest of it go on, and serving's steps are made within
  it, as if it was not there.
- The guest's heartbeats go on meanwhile, and serving gets the memory that it may take. It stands still for as long as
  that needs no turn of the guest's, none is to go back and the guest is not to park: as none of that can be done within
  a step. Then it is computed to its end, without a further stop.
- What fails of serving fails where it would without a guest.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from logging import Logger
from pathlib import Path
from typing import Any

from vllm.v1.engine import EngineCoreRequestType

from rose.workers.executor.ipc.messages import NextWork, ServingStats, WorkKind
from rose.workers.lender.admission import Admission, AdmissionDecision, ServingState
from rose.workers.lender.config import LendConfig
from rose.workers.lender.sidecar_link import SidecarListener
from rose.workers.lender.vllm.guest import Guest
from rose.workers.lender.vllm.serving import ServingMemory, ServingView
from rose.workers.lender.vllm.tp_driver import TpDriver
from rose.workers.lender.watchdog_page import StatusPage


class ServingFailed(BaseException):
    """A step of serving's failed between two layers of the guest's: whatever the guest does with what fails in its own,
    this passes through.
    """


@dataclass(slots=True)
class GuestPiece:
    """Of the guest's work, while it has the thread. Seconds."""

    serve: Callable[[], bool]
    """Serving's step."""
    held: int
    """Requests that serving holds, as of the last look at them."""
    seconds_left: float
    """Of what was planned, after that which admission has been told of."""
    charged_at: float
    """Of what admission has not been told of yet."""
    polled_at: float
    """When it was last seen whether somebody has come."""
    thread_seconds: float
    """By this thread, until then."""
    uninterruptible: bool = False
    """It does not stand still any more."""
    error: Exception | None = None
    """What was not foreseen of serving while it stood still."""


def _run_serving(action: Callable[[], object]) -> None:
    """Raises ServingFailed."""
    try:
        action()
    except Exception as error:
        raise ServingFailed from error


class StepInterleaver:
    """Who computes next: after each step of serving's, the guest if admission lets it."""

    def __init__(
        self,
        core: Any,
        config: LendConfig,
        listener: SidecarListener,
        page: StatusPage,
        log: Logger,
        driver: TpDriver | None = None,
    ) -> None:
        self._core = core
        self._take_input: Callable[[], None] = core._process_input_queue
        self._recheck_seconds = config.heartbeat_seconds
        self._recheck_at = 0.0
        """Of a guest that wants nothing, when it is asked again whether it might."""
        self._admission = Admission(config.promise, serving_step_tokens=core.scheduler.max_num_scheduled_tokens)
        self._view = ServingView(core, self._admission)
        learned = self._admission.guest, self._serving_stats
        self._guest = Guest(config, listener, page, *learned, ServingMemory(core), log, self._yield_to_serving, driver)
        self._log = log
        self._disabled = False
        """What serving does was not understood: nothing is lent any more."""
        self._stalled = False
        """The guest was held back by requests that no step of serving's moves, as those of a server that is paused."""
        self._held_back: dict[str, int] = {}
        self._longest = self._computed = 0.0
        self._piece: GuestPiece | None = None
        """Of the guest's, while it has one."""
        self._decision: AdmissionDecision | None = None
        """The newest since this was last told of: what was found long ago says nothing of serving now."""

    @property
    def guest_ready(self) -> bool:
        """Whether the guest has something to do, and may be let without that something arrives first."""
        return not self._disabled and not self._stalled and self._guest.busy

    def step(self, process_engine_step: Callable[[], bool]) -> bool:
        """Room for serving's step, the step, then the guest's piece if it may have one. Raises what serving's step
        raises.
        """
        if self._disabled:
            return process_engine_step()
        self._guest.make_room()
        began = time.monotonic()
        executed = process_engine_step()
        ended = time.monotonic()
        try:
            self._view.on_step(began, ended)
            self._stalled = False
            if self._guest.busy and self._core.is_running():
                self._run_guest(process_engine_step)
            else:
                self._guest.tick_idle(blocked=not self._guest_may_compute())
        except ServingFailed as failed:
            error = failed.__cause__
            assert error is not None
            raise error from error.__cause__
        except Exception as error:  # noqa: BLE001  serving goes on whatever of it was not foreseen
            self._disabled = True
            self._log.exception("rose: this server lends no more")
            self._guest.drop(error)
        return executed

    def _guest_may_compute(self) -> bool:
        """Whether a guest that wants nothing might compute, as far as that is looked at: now and then."""
        now = time.monotonic()
        if now < self._recheck_at or not self._core.is_running():
            return False
        self._recheck_at = now + self._recheck_seconds
        return self._admission.admit(self._view.state(), NextWork(WorkKind.STEP, 0.0), now=now).hold_reason is None

    def _run_guest(self, process_engine_step: Callable[[], bool]) -> None:
        now = time.monotonic()
        serving = self._view.state()
        next_work = self._guest.next_work
        decision = self._admit(serving, next_work, now)
        if decision.hold_reason is not None:
            self._stalled = not serving.queued and not self._core.has_work()
            self._guest.tick_idle(blocked=True)
            return
        left = min(next_work.seconds, decision.seconds)
        if next_work.kind is WorkKind.STEP and self._admission.guest.has_observed:
            left = min(left, self._admission.guest.cautious_seconds(decision.tokens))
        piece = self._piece = GuestPiece(process_engine_step, serving.held, left, now, now, time.thread_time())
        try:
            self._guest.tick(seconds=decision.seconds, tokens=decision.tokens)
        finally:
            self._measure(piece)
            self._charge(piece)
            self._piece = None
        if piece.error is not None:
            raise piece.error

    def _admit(self, serving: ServingState, next_work: NextWork, now: float) -> AdmissionDecision:
        """The heartbeat tells of it."""
        self._decision = decision = self._admission.admit(serving, next_work, now=now)
        if decision.hold_reason is not None:
            self._held_back[decision.hold_reason.value] = self._held_back.get(decision.hold_reason.value, 0) + 1
        return decision

    def _measure(self, piece: GuestPiece) -> None:
        """A request that came since the look before has waited for as long."""
        now, computed = time.monotonic(), time.thread_time()
        self._longest = max(self._longest, now - piece.polled_at)
        self._computed = max(self._computed, computed - piece.thread_seconds)
        piece.polled_at, piece.thread_seconds = now, computed

    def _charge(self, piece: GuestPiece) -> None:
        """Charge the guest for what was done of it."""
        seconds = piece.polled_at - piece.charged_at
        self._admission.on_guest_run(held=piece.held, seconds=seconds)
        piece.seconds_left -= seconds

    def _yield_to_serving(self) -> None:
        """Between two layers of a step of the guest's: who has come is served before it goes on.

        Raises ServingFailed.
        """
        piece = self._piece
        if piece is None or piece.uninterruptible:
            return
        self._measure(piece)
        if not self._view.has_unread:
            return
        self._charge(piece)
        with self._guest.as_host():
            piece.uninterruptible = not self._serve_within(piece)
        piece.charged_at = piece.polled_at = time.monotonic()
        piece.thread_seconds = time.thread_time()

    def _serve_within(self, piece: GuestPiece) -> bool:
        """Serve until the guest may go on; whether it may stand still again. Raises ServingFailed."""
        core = self._core
        while core.is_running():
            core.process_input_queue_block = False
            _run_serving(self._take_input)
            try:
                if not self._guest.make_room_mid_step():
                    piece.held = self._view.state().held
                    return False
                began = time.monotonic()
                _run_serving(piece.serve)
                ended = time.monotonic()
                self._view.on_step(began, ended)
                serving = self._view.state()
                decision = self._admit(serving, NextWork(WorkKind.ATOMIC, max(0.0, piece.seconds_left)), ended)
            except Exception as error:  # noqa: BLE001  whatever was not foreseen, serving goes on
                piece.error = error
                return False
            held = decision.hold_reason is not None
            piece.held, stands = serving.held, self._guest.tick_mid_step(blocked=held)
            if not (held and stands and (serving.queued or core.has_work())):
                return not held
        return False

    def _serving_stats(self) -> ServingStats:
        """How serving stood when it was looked at since this was last asked, if it was, and what came of it."""
        running, waiting = self._core.scheduler.get_request_counts()
        decision, self._decision, learned = self._decision, None, self._admission
        held_back, self._held_back = self._held_back, {}
        longest, computed = self._longest, self._computed
        self._longest = self._computed = 0.0
        return ServingStats(
            running=running,
            waiting=waiting,
            prefill_headroom=decision.prefill_headroom if decision else None,
            decode_headroom=decision.decode_headroom if decision else None,
            longest_seconds=longest,
            computed_seconds=computed,
            guest_error=learned.guest.error,
            prefill_error=learned.serving.prefill.error,
            decode_error=learned.serving.decode.error,
            held_back=held_back,
        )


def interleave(core: Any, config: LendConfig, page: StatusPage, log: Logger) -> None:
    """Give a guest its turns in the loop of `core`, an EngineCoreProc. Raises UsageError."""
    process_input_queue, process_engine_step = core._process_input_queue, core._process_engine_step

    def wake() -> None:
        core.process_input_queue_block = False  # first: the loop may be about to sleep
        core.input_queue.put((EngineCoreRequestType.WAKEUP, None))

    size = core.vllm_config.parallel_config.world_size
    driver = TpDriver(core.model_executor, size) if size > 1 else None
    if driver is not None:
        page.set_ranks(driver.process_ids(watched=bool(config.pulse)))
    listener = SidecarListener(Path(config.socket), wake, heartbeat_seconds=config.heartbeat_seconds, log=log)
    interleaver = StepInterleaver(core, config, listener, page, log, driver)

    def take_input() -> None:
        core.process_input_queue_block = idle = not interleaver.guest_ready
        if idle:
            listener.arm_wakeup()
            if interleaver.guest_ready:  # an order that came meanwhile has had its wake already
                core.process_input_queue_block = False
        process_input_queue()

    core._process_input_queue = take_input
    core._process_engine_step = lambda: interleaver.step(process_engine_step)
