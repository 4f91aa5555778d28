"""Interleaves guest pieces with serving steps in the serving engine's loop. See `attach`.

Keeps true
- A request that arrives during a guest step in this process waits for one layer of the step, its logits or its
  sampling; on a GPU for two layers, one that computes and one in the queue (`guest_device`). Between two of these the
  step is paused until admission would allow the rest of it, and serving steps run as if there was no guest step.
- During the pause the guest's statuses go on, and serving gets the KV memory that it needs. If serving's memory needs
  an abort of a guest turn, a turn is to be aborted, or the guest is to be suspended, the pause ends, because none of
  these is possible within a step. The step then runs to its end without a further pause.
- Errors of serving are raised where they would be raised without a guest.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from logging import Logger
from pathlib import Path
from typing import Any

from rose.workers.executor.ipc.messages import NextWork, ServingStats, WorkKind
from rose.workers.lender.admission import Admission, AdmissionDecision, ServingState
from rose.workers.lender.config import LendConfig
from rose.workers.lender.sidecar_link import SidecarListener
from rose.workers.lender.status_page import StatusPage
from rose.workers.lender.vllm.guest import Guest
from rose.workers.lender.vllm.guest_build import GuestBuild
from rose.workers.lender.vllm.guest_device import guest_device
from rose.workers.lender.vllm.kv_sharing import ServingMemory
from rose.workers.lender.vllm.tp_driver import TpDriver


class ServingFailed(BaseException):
    """A serving step failed between two layers of a guest step.

    A BaseException, so that it passes through the guest's handlers of Exception.
    """


@dataclass(slots=True)
class GuestPiece:
    """One bounded piece of guest work, while the guest has the thread. Times are monotonic seconds."""

    serve: Callable[[], bool]
    """Runs a serving step."""
    held: int
    """Requests that serving held at the last check."""
    seconds_left: float
    """Planned seconds that were not charged yet."""
    charged_at: float
    """Start of the work that was not charged yet."""
    polled_at: float
    """Time of the last check for new requests."""
    thread_seconds: float
    """CPU time of this thread at the last check."""
    uninterruptible: bool = False
    """Whether the piece must run to its end without a pause."""
    error: Exception | None = None
    """Unexpected exception of the interleaver during a pause."""


def _run_serving(action: Callable[[], object]) -> None:
    """Run `action`. Raises ServingFailed if it raises an Exception."""
    try:
        action()
    except Exception as error:
        raise ServingFailed from error


class ServingView:
    """Serving's side of admission: reports every serving step to admission, and reads the requests of serving.

    Serving's scheduling is not changed: `schedule` is called unchanged, and its result is kept. Each serving step takes
    longer by one access to each request in its batch.

    Times are seconds of time.monotonic(). vLLM gives a request's arrival by the wall clock of the same host; an arrival
    is never later than now, even if the wall clock was set. A request that serving has preempted computes its tokens
    again, and its steps cost as much as those of a prompt.

    With async scheduling a step starts one batch and ends with the result of an earlier batch. The time of a step then
    says nothing about its batch, and nothing is reported.
    """

    def __init__(self, core: Any, admission: Admission) -> None:
        """`core`: an EngineCoreProc."""
        self._in_flight = core.batch_queue
        """Batches in flight; None without async scheduling."""
        self._scheduler = core.scheduler
        self._unread = core.input_queue.queue
        """The queue's own deque, which can be read without a lock."""
        self._admission = admission
        self._scheduled: Any = None
        """vLLM's SchedulerOutput of the current step."""
        self._last: dict[str, float] = {}
        """Time of the latest token, by request with at least one token."""
        schedule = core.scheduler.schedule

        def noted(*arguments: Any) -> Any:
            self._scheduled = schedule(*arguments)
            return self._scheduled

        if self._in_flight is None:
            core.scheduler.schedule = noted

    def on_step(self, began: float, ended: float) -> None:
        """Report a serving step to admission. Does nothing if the step computed no tokens. Times are monotonic."""
        scheduled, self._scheduled = self._scheduled, None
        if scheduled is not None and scheduled.total_num_scheduled_tokens:
            self._served(scheduled, began, ended)
        elif self._last and not self._scheduler.has_requests():
            self._last.clear()

    @property
    def has_unread(self) -> bool:
        """Whether serving's input queue holds an unread message."""
        return bool(self._unread)

    def state(self) -> ServingState:
        """Return the requests that serving holds now."""
        running, waiting = self._scheduler.running, self._scheduler.get_request_counts()[1]
        if self._in_flight is not None:
            return ServingState(
                waiting=waiting,
                queued=self.has_unread,
                overlaps=bool(running or self._in_flight),
                ending=self._is_ending,
            )
        first = [request for request in running if request.request_id not in self._last]
        if waiting:
            first += self._scheduler.waiting
        now = time.monotonic()
        behind = time.time() - now
        return ServingState(
            prefills=[
                (min(now, request.arrival_time - behind), max(0, request.num_tokens - request.num_computed_tokens))
                for request in first
            ],
            last_tokens=[at for request in running if (at := self._last.get(request.request_id)) is not None],
            waiting=waiting,
            queued=self.has_unread,
            ending=self._is_ending,
        )

    @property
    def _is_ending(self) -> bool:
        """Whether serving computes no request and holds none that waits, and has still a step to make."""
        return not any(self._scheduler.get_request_counts()) and bool(self._scheduler.has_requests())

    def _served(self, scheduled: Any, began: float, ended: float) -> None:
        for request in scheduled.scheduled_new_reqs:
            self._admission.on_arrival(request.prompt_len - request.num_computed_tokens, began)
        counts = scheduled.num_scheduled_tokens
        decoding = sum(count == 1 and name in self._last for name, count in counts.items())
        self._admission.on_serving_step(
            prompt_tokens=scheduled.total_num_scheduled_tokens - decoding,
            decoding=decoding,
            held=len(counts) + self._scheduler.get_request_counts()[1],
            seconds=ended - began,
        )
        for name in counts:
            request = self._scheduler.requests.get(name)
            if request is None:
                self._last.pop(name, None)
            elif request.num_output_tokens:
                self._last[name] = ended
        if len(self._last) > len(self._scheduler.requests):  # some were aborted
            self._last = {name: at for name, at in self._last.items() if name in self._scheduler.requests}


class StepInterleaver:
    """Runs a guest piece after each serving step if admission allows it, and serving steps within guest steps."""

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
        """When admission is next asked for a guest without work."""
        self._admission = Admission(config.promise, serving_step_tokens=core.scheduler.max_num_scheduled_tokens)
        self._view = ServingView(core, self._admission)
        cost, memory = self._admission.guest, ServingMemory(core)
        start_build = partial(GuestBuild, config, memory, cost, self._yield_to_serving, driver, guest_device(), log)
        self._guest = Guest(config, listener, page, cost, self._serving_stats, log, start_build)
        self._log = log
        self._disabled = False
        """Whether lending has ended because of an unexpected error about serving."""
        self._stalled = False
        """Whether requests hold the guest back that no serving step advances, as in a paused server."""
        self._held_back: dict[str, int] = {}
        self._longest = self._computed = 0.0
        self._piece: GuestPiece | None = None
        """The current guest piece."""
        self._decision: AdmissionDecision | None = None
        """The newest decision since the last status; an older one says nothing about serving now."""

    @property
    def guest_ready(self) -> bool:
        """Whether the guest has work, and may compute without another message to serving first."""
        return not self._disabled and not self._stalled and self._guest.busy

    @property
    def has_guest(self) -> bool:
        """Whether there is a guest, with or without a sidecar."""
        return self._guest.exists

    def step(self, process_engine_step: Callable[[], bool]) -> bool:
        """Give serving its memory, run its step, then a guest piece if admission allows one.

        Return what serving's step returns. Raises what serving's step raises.
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
        except Exception as error:  # noqa: BLE001  serving continues after any error of the lender
            self._disabled = True
            self._log.exception("rose: lending_disabled")
            self._guest.drop(error)
        return executed

    def _guest_may_compute(self) -> bool:
        """Whether a guest without work might compute. Asks admission at most once per heartbeat; False in between."""
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
        """Ask admission, and record the decision for the next status."""
        self._decision = decision = self._admission.admit(serving, next_work, now=now)
        if decision.hold_reason is not None:
            self._held_back[decision.hold_reason.value] = self._held_back.get(decision.hold_reason.value, 0) + 1
        return decision

    def _measure(self, piece: GuestPiece) -> None:
        """Record the time since the last check for new requests: the longest that a new request has waited."""
        now, computed = time.monotonic(), time.thread_time()
        self._longest = max(self._longest, now - piece.polled_at)
        self._computed = max(self._computed, computed - piece.thread_seconds)
        piece.polled_at, piece.thread_seconds = now, computed

    def _charge(self, piece: GuestPiece) -> None:
        """Charge the guest for the work since the last charge."""
        seconds = piece.polled_at - piece.charged_at
        self._admission.on_guest_run(held=piece.held, seconds=seconds)
        piece.seconds_left -= seconds

    def _yield_to_serving(self) -> None:
        """Serve new requests between two layers of a guest step, before the step continues. Raises ServingFailed."""
        piece = self._piece
        if piece is None or piece.uninterruptible:
            return
        self._measure(piece)
        if not self._view.has_unread:
            return
        with self._guest.as_host():
            self._measure(piece)  # again: on a GPU the thread has waited for the layer that was launched
            self._charge(piece)
            piece.uninterruptible = not self._serve_within(piece)
        piece.charged_at = piece.polled_at = time.monotonic()
        piece.thread_seconds = time.thread_time()

    def _serve_within(self, piece: GuestPiece) -> bool:
        """Serve until the guest may continue. Return whether its step may be paused again. Raises ServingFailed."""
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
            except Exception as error:  # noqa: BLE001  serving continues after any error of the lender
                piece.error = error
                return False
            held = decision.hold_reason is not None
            piece.held, stands = serving.held, self._guest.tick_mid_step(blocked=held)
            if not (held and stands and (serving.queued or core.has_work())):
                return not held
        return False

    def _serving_stats(self) -> ServingStats:
        """Return serving's load, slack and prediction errors, and the guest's work since the last call."""
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


def interleave(core: Any, config: LendConfig, page: StatusPage, wake: Callable[[], None], log: Logger) -> None:
    """Interleave a guest with the loop of `core`, an EngineCoreProc. Raises UsageError.

    `wake`: ends the loop's wait for input.
    """
    process_input_queue, process_engine_step = core._process_input_queue, core._process_engine_step
    size = core.vllm_config.parallel_config.world_size
    driver = TpDriver(core.model_executor, size) if size > 1 else None
    if driver is not None:
        page.set_ranks(driver.process_ids(watched=bool(config.pulse)))
    listener = SidecarListener(Path(config.socket), wake, heartbeat_seconds=config.heartbeat_seconds, log=log)
    interleaver = StepInterleaver(core, config, listener, page, log, driver)

    def take_input() -> None:
        core.process_input_queue_block = idle = not interleaver.guest_ready
        if idle:
            listener.arm_wakeup(has_guest=interleaver.has_guest)
            if interleaver.guest_ready:  # the wake-up for a command that has just come may be over
                core.process_input_queue_block = False
        process_input_queue()

    core._process_input_queue = take_input
    core._process_engine_step = lambda: interleaver.step(process_engine_step)
