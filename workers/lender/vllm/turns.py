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

from workers.executor.want import Want, Work
from workers.executor.words import Slack
from workers.lender.admission import Admission, Answer, Serving
from workers.lender.config import LendConfig
from workers.lender.feeder import Feeder
from workers.lender.pulse import Pulse
from workers.lender.vllm.guest import Guest
from workers.lender.vllm.ranks import Ranks
from workers.lender.vllm.serving import ServingView
from workers.lender.vllm.serving_memory import ServingMemory


class ServingFailed(BaseException):
    """A step of serving's failed between two layers of the guest's: whatever the guest does with what fails in its own,
    this passes through.
    """


@dataclass(slots=True)
class Piece:
    """Of the guest's work, while it has the thread. Seconds."""

    serve: Callable[[], bool]
    """Serving's step."""
    held: int
    """Requests that serving holds, as of the last look at them."""
    left: float
    """Of what was planned, after that which admission has been told of."""
    began: float
    """Of what admission has not been told of yet."""
    looked: float
    """When it was last seen whether somebody has come."""
    computed: float
    """By this thread, until then."""
    whole: bool = False
    """It does not stand still any more."""
    trouble: Exception | None = None
    """What was not foreseen of serving while it stood still."""


def _serving(act: Callable[[], object]) -> None:
    """Raises ServingFailed."""
    try:
        act()
    except Exception as error:
        raise ServingFailed from error


class Turns:
    """Who computes next: after each step of serving's, the guest if admission lets it."""

    def __init__(
        self, core: Any, config: LendConfig, feeder: Feeder, pulse: Pulse, log: Logger, ranks: Ranks | None = None
    ) -> None:
        self._core = core
        self._take_input: Callable[[], None] = core._process_input_queue
        self._look_seconds = config.heartbeat_seconds
        self._looks_at = 0.0
        """Of a guest that wants nothing, when it is asked again whether it might."""
        self._admission = Admission(config.promise, serving_step_tokens=core.scheduler.max_num_scheduled_tokens)
        self._view = ServingView(core, self._admission)
        told = self._admission.guest, self._slack
        self._guest = Guest(config, feeder, pulse, *told, ServingMemory(core), log, self._let_in, ranks)
        self._log = log
        self._over = False
        """What serving does was not understood: nothing is lent any more."""
        self._halted = False
        """The guest was held back by requests that no step of serving's moves, as those of a server that is paused."""
        self._held_back: dict[str, int] = {}
        self._longest = self._computed = 0.0
        self._piece: Piece | None = None
        """Of the guest's, while it has one."""
        self._answer: Answer | None = None
        """The newest since this was last told of: what was found long ago says nothing of serving now."""

    @property
    def wanted(self) -> bool:
        """Whether the guest has something to do, and may be let without that something arrives first."""
        return not self._over and not self._halted and self._guest.busy

    def step(self, process_engine_step: Callable[[], bool]) -> bool:
        """Room for serving's step, the step, then the guest's piece if it may have one. Raises what serving's step
        raises.
        """
        if self._over:
            return process_engine_step()
        self._guest.make_room()
        began = time.monotonic()
        executed = process_engine_step()
        ended = time.monotonic()
        try:
            self._view.stepped(began, ended)
            self._halted = False
            if self._guest.busy and self._core.is_running():
                self._offer(process_engine_step)
            else:
                self._guest.beat(held=not self._might())
        except ServingFailed as failed:
            error = failed.__cause__
            assert error is not None
            raise error from error.__cause__
        except Exception as error:  # noqa: BLE001  serving goes on whatever of it was not foreseen
            self._over = True
            self._log.exception("rose: this server lends no more")
            self._guest.drop(error)
        return executed

    def _might(self) -> bool:
        """Whether a guest that wants nothing might compute, as far as that is looked at: now and then."""
        now = time.monotonic()
        if now < self._looks_at or not self._core.is_running():
            return False
        self._looks_at = now + self._look_seconds
        return self._admission.admit(self._view.holds(), Want(Work.STEP, 0.0), now=now).hold is None

    def _offer(self, process_engine_step: Callable[[], bool]) -> None:
        now = time.monotonic()
        serving = self._view.holds()
        want = self._guest.want
        answer = self._admit(serving, want, now)
        if answer.hold is not None:
            self._halted = not serving.queued and not self._core.has_work()
            self._guest.beat(held=True)
            return
        left = min(want.seconds, answer.seconds)
        if want.work is Work.STEP and self._admission.guest.known:
            left = min(left, self._admission.guest.cautious_seconds(answer.tokens))
        piece = self._piece = Piece(process_engine_step, serving.held, left, now, now, time.thread_time())
        try:
            self._guest.tick(seconds=answer.seconds, tokens=answer.tokens)
        finally:
            self._look(piece)
            self._tell(piece)
            self._piece = None
        if piece.trouble is not None:
            raise piece.trouble

    def _admit(self, serving: Serving, want: Want, now: float) -> Answer:
        """The heartbeat tells of it."""
        self._answer = answer = self._admission.admit(serving, want, now=now)
        if answer.hold is not None:
            self._held_back[answer.hold.value] = self._held_back.get(answer.hold.value, 0) + 1
        return answer

    def _look(self, piece: Piece) -> None:
        """A request that came since the look before has waited for as long."""
        now, computed = time.monotonic(), time.thread_time()
        self._longest = max(self._longest, now - piece.looked)
        self._computed = max(self._computed, computed - piece.computed)
        piece.looked, piece.computed = now, computed

    def _tell(self, piece: Piece) -> None:
        """Charge the guest for what was done of it."""
        seconds = piece.looked - piece.began
        self._admission.ran(held=piece.held, seconds=seconds)
        piece.left -= seconds

    def _let_in(self) -> None:
        """Between two layers of a step of the guest's: who has come is served before it goes on.

        Raises ServingFailed.
        """
        piece = self._piece
        if piece is None or piece.whole:
            return
        self._look(piece)
        if not self._view.unread:
            return
        self._tell(piece)
        with self._guest.aside():
            piece.whole = not self._serve_within(piece)
        piece.began = piece.looked = time.monotonic()
        piece.computed = time.thread_time()

    def _serve_within(self, piece: Piece) -> bool:
        """Serve until the guest may go on; whether it may stand still again. Raises ServingFailed."""
        core = self._core
        while core.is_running():
            core.process_input_queue_block = False
            _serving(self._take_input)
            try:
                if not self._guest.make_room_within():
                    piece.held = self._view.holds().held
                    return False
                began = time.monotonic()
                _serving(piece.serve)
                ended = time.monotonic()
                self._view.stepped(began, ended)
                serving = self._view.holds()
                answer = self._admit(serving, Want(Work.PIECE, max(0.0, piece.left)), ended)
            except Exception as error:  # noqa: BLE001  whatever was not foreseen, serving goes on
                piece.trouble = error
                return False
            held = answer.hold is not None
            piece.held, stands = serving.held, self._guest.stands(held=held)
            if not (held and stands and (serving.queued or core.has_work())):
                return not held
        return False

    def _slack(self) -> Slack:
        """How serving stood when it was looked at since this was last asked, if it was, and what came of it."""
        running, waiting = self._core.scheduler.get_request_counts()
        answer, self._answer, learned = self._answer, None, self._admission
        held_back, self._held_back = self._held_back, {}
        longest, computed = self._longest, self._computed
        self._longest = self._computed = 0.0
        return Slack(
            running=running,
            waiting=waiting,
            prefill_headroom=answer.prefill_headroom if answer else None,
            decode_headroom=answer.decode_headroom if answer else None,
            longest_seconds=longest,
            computed_seconds=computed,
            guest_error=learned.guest.error,
            prefill_error=learned.serving.prefill.error,
            decode_error=learned.serving.decode.error,
            held_back=held_back,
        )


def lend(core: Any, config: LendConfig, pulse: Pulse, log: Logger) -> None:
    """Give a guest its turns in the loop of `core`, an EngineCoreProc. Raises UsageError."""
    process_input_queue, process_engine_step = core._process_input_queue, core._process_engine_step

    def wake() -> None:
        core.process_input_queue_block = False  # first: the loop may be about to sleep
        core.input_queue.put((EngineCoreRequestType.WAKEUP, None))

    size = core.vllm_config.parallel_config.world_size
    ranks = Ranks(core.model_executor, size) if size > 1 else None
    if ranks is not None:
        pulse.has_ranks(ranks.processes(watched=bool(config.pulse)))
    feeder = Feeder(Path(config.socket), wake, beat_seconds=config.heartbeat_seconds, log=log)
    turns = Turns(core, config, feeder, pulse, log, ranks)

    def take_input() -> None:
        core.process_input_queue_block = idle = not turns.wanted
        if idle:
            feeder.arm()
            if turns.wanted:  # an order that came meanwhile has had its wake already
                core.process_input_queue_block = False
        process_input_queue()

    core._process_input_queue = take_input
    core._process_engine_step = lambda: turns.step(process_engine_step)
