"""What an executor says of a turn, as records. Pure: the time is handed in.

Keeps true: an answer names the turn, the attempt and the start of the executor that it is of, and is of the whole
turn so far: what was sampled here, behind what attempts before this one had sampled.
"""

from dataclasses import dataclass

import msgspec

from schemas.slack import WorkerClass
from schemas.turns import Part, Refusal, TurnDispatch, TurnOutcome, TurnResult, TurnTimes
from workers.executor.parts import joined
from workers.executor.words import Done

MOST_CHARACTERS = 4_096
"""Of a reason in a record."""


@dataclass(frozen=True, slots=True)
class Start:
    """One start of one executor."""

    worker: str
    worker_class: WorkerClass
    incarnation: int


def ended(
    start: Start, dispatch: TurnDispatch, done: Done, outcome: TurnOutcome, reason: str, *, received_at: float
) -> TurnResult:
    """COMPLETED, or PREEMPTED for a reason: what was sampled, when, and at what cost."""
    sampled = Part(
        tokens=done.tokens,
        logprobs=done.logprobs,
        spans=done.spans,
        device_seconds={start.worker_class.value: done.device_seconds},
    )
    whole = joined(dispatch.begun, sampled)
    times = msgspec.structs.replace(
        _times(dispatch, received_at, done.finished_at),
        scheduled_at=done.scheduled_at,
        first_token_at=done.first_token_at,
    )
    return msgspec.structs.replace(
        _answer(start, dispatch, outcome, reason, times),
        tokens=whole.tokens,
        logprobs=whole.logprobs,
        finish_reason=done.finish_reason if outcome is TurnOutcome.COMPLETED else "",
        spans=whole.spans,
        context_tokens=done.context_tokens,
        cached_tokens=done.cached_tokens,
        device_seconds=whole.device_seconds,
    )


def refused(start: Start, dispatch: TurnDispatch, reason: str, refusal: Refusal | None, *, now: float) -> TurnResult:
    """REFUSED: nothing was sampled here."""
    answer = _answer(start, dispatch, TurnOutcome.REFUSED, reason, _times(dispatch, now, now))
    return msgspec.structs.replace(answer, refusal=refusal)


def _times(dispatch: TurnDispatch, received_at: float, finished_at: float) -> TurnTimes:
    return TurnTimes(
        requested_at=dispatch.request.requested_at,
        queued_at=dispatch.queued_at,
        dispatched_at=dispatch.dispatched_at,
        received_at=received_at,
        finished_at=finished_at,
    )


def _answer(start: Start, dispatch: TurnDispatch, outcome: TurnOutcome, reason: str, times: TurnTimes) -> TurnResult:
    request = dispatch.request
    return TurnResult(
        trajectory_id=request.trajectory_id,
        group_id=request.group_id,
        home=dispatch.home,
        turn=request.turn,
        attempt=dispatch.attempt,
        outcome=outcome,
        reason=reason[:MOST_CHARACTERS],
        worker=start.worker,
        incarnation=start.incarnation,
        times=times,
    )
