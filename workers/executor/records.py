"""The records that an executor writes: results of turns and heartbeats. Pure: the time is a parameter.

Keeps true
- A result names the turn, the attempt and the incarnation of the executor. A result holds the whole turn so far: the
  tokens that earlier attempts sampled, then the tokens that this attempt sampled.
- The heartbeats of one incarnation are numbered without a gap, and list every turn whose answer is not on the log.
"""

from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from rose.schemas.arrays import count
from rose.schemas.heartbeats import TTL_SECONDS, ExecutorState, Hardware, SlackHeartbeat, Tenant, WorkerClass
from rose.schemas.limits import MAX_SPANS
from rose.schemas.prompts import Sampling
from rose.schemas.turns import (
    MAX_WORKER_CLASSES,
    Part,
    Refusal,
    TurnDispatch,
    TurnOutcome,
    TurnResult,
    TurnTimes,
)
from rose.workers.executor.inbox import Inbox, packed_hashes
from rose.workers.executor.ipc.messages import EngineStatus, TurnFinished


def resumed_context(dispatch: TurnDispatch, context: bytes) -> bytes:
    """Return the packed tokens that the engine prefills: the turn's context, then the tokens of earlier attempts."""
    return context if dispatch.partial is None else context + dispatch.partial.tokens


def remaining_sampling(dispatch: TurnDispatch) -> Sampling:
    """Return the sampling parameters of the rest of the turn. An engine refuses a turn without tokens to sample."""
    sampling, partial = dispatch.request.sampling, dispatch.partial
    if partial is None:
        return sampling
    return msgspec.structs.replace(sampling, max_tokens=sampling.max_tokens - count(partial.tokens))


def dispatch_error(dispatch: TurnDispatch, *, homes: int) -> str | None:
    """Return why this dispatch cannot be answered; None if it can. `homes`: number of home partitions."""
    if dispatch.home >= homes:
        return f"its answer is awaited in home {dispatch.home}, and there are {homes}"
    if not dispatch.cut and dispatch.request.validation_error:
        return f"the turn request contradicts itself: {dispatch.request.validation_error}"
    partial = dispatch.partial
    if partial is None:
        return None
    if partial.validation_error:
        return f"the partial turn is malformed: {partial.validation_error}"
    if len(partial.spans) >= MAX_SPANS or len(partial.device_seconds) >= MAX_WORKER_CLASSES:
        return (
            f"the partial turn has {len(partial.spans)} spans and {len(partial.device_seconds)} worker classes, and "
            f"the continuation needs one more of each: {MAX_SPANS} and {MAX_WORKER_CLASSES} are the most"
        )
    return None


def concatenate_parts(earlier: Part | None, rest: Part) -> Part:
    """Return the turn so far: `earlier`, then `rest`. Device seconds are added by worker class."""
    return rest if earlier is None else earlier.followed_by(rest)


MAX_REASON_CHARACTERS = 4_096
"""Longest reason in a record, in characters."""


@dataclass(frozen=True, slots=True)
class ExecutorIncarnation:
    """One start of one executor."""

    worker: str
    worker_class: WorkerClass
    incarnation: int


def finished_result(
    start: ExecutorIncarnation,
    dispatch: TurnDispatch,
    finished: TurnFinished,
    outcome: TurnOutcome,
    reason: str,
    *,
    received_at: float,
) -> TurnResult:
    """Return the result of a turn that the engine has finished or aborted: tokens, times and cost.

    `outcome`: COMPLETED, or PREEMPTED with a `reason`. `received_at`: unix seconds, when the turn came to the inbox.
    """
    turn = finished.turn
    sampled = Part(**turn.sampled.record_fields(), device_seconds={start.worker_class.value: finished.device_seconds})
    times = msgspec.structs.replace(
        _times(dispatch, received_at, turn.times.finished_at),
        scheduled_at=turn.times.scheduled_at,
        first_token_at=turn.times.first_token_at,
    )
    return msgspec.structs.replace(
        _result(start, dispatch, outcome, reason, times),
        **concatenate_parts(dispatch.partial, sampled).record_fields(),
        finish_reason=turn.finish_reason if outcome is TurnOutcome.COMPLETED else "",
        context_tokens=turn.context_tokens,
        cached_tokens=turn.cached_tokens,
    )


def refused_result(
    start: ExecutorIncarnation,
    dispatch: TurnDispatch,
    reason: str,
    refusal: Refusal | None,
    *,
    now: float,
    ran: TurnResult | None = None,
) -> TurnResult:
    """Return a REFUSED result without tokens. `now`: unix seconds.

    `ran`: the result that cannot be used, if the engine has run the turn. Its device seconds are kept.
    """
    result = _result(start, dispatch, TurnOutcome.REFUSED, reason, _times(dispatch, now, now))
    if ran is not None:
        seconds, context = ran.device_seconds, ran.context_tokens
        result = msgspec.structs.replace(result, device_seconds=seconds, context_tokens=context)
    return msgspec.structs.replace(result, refusal=refusal)


def _times(dispatch: TurnDispatch, received_at: float, finished_at: float) -> TurnTimes:
    return TurnTimes(
        requested_at=dispatch.request.requested_at,
        queued_at=dispatch.queued_at,
        dispatched_at=dispatch.dispatched_at,
        received_at=received_at,
        finished_at=finished_at,
    )


def _result(
    start: ExecutorIncarnation, dispatch: TurnDispatch, outcome: TurnOutcome, reason: str, times: TurnTimes
) -> TurnResult:
    request = dispatch.request
    return TurnResult(
        trajectory_id=request.trajectory_id,
        group_id=request.group_id,
        home=dispatch.home,
        turn=request.turn,
        attempt=dispatch.attempt,
        outcome=outcome,
        reason=reason[:MAX_REASON_CHARACTERS],
        worker=start.worker,
        incarnation=start.incarnation,
        times=times,
    )


MAX_VERSIONS_BEHIND = 1
"""An executor that is at most so many versions behind the log is ready: the newest version may be in transfer."""


def health_summary(version: int, newest: int, refused: str, *, pause_reason: str | None) -> tuple[str, bool]:
    """Return the executor's health as a sentence, and whether it takes turns with a current version.

    `version`: the serving version, negative for none. `newest`: the newest version on the log, -1 for none. `refused`:
    why the newest version was refused, empty if it was not.
    """
    if pause_reason:
        return f"takes no turns: {pause_reason}", False
    if refused:
        return f"serves version {version}, and refuses version {newest}: {refused}", False
    if version < 0:
        return "waits for a first policy version", False
    if newest - version > MAX_VERSIONS_BEHIND:
        return f"serves version {version}, the newest on the log is {newest}", False
    return f"serves version {version}", True


class HeartbeatWriter:
    """Makes the heartbeats of one incarnation of an executor."""

    def __init__(self, incarnation: ExecutorIncarnation, slot: int, *, by_grant: bool = False) -> None:
        self._incarnation = incarnation
        self._slot = slot
        self._by_grant = by_grant
        self._sequence = 0
        self._cuts = 0

    def on_status(self, status: EngineStatus) -> None:
        """Add up what an engine status counts since the status before. Call it once for each status."""
        if status.lending is not None:
            self._cuts += status.lending.cuts

    def next_heartbeat(
        self,
        status: EngineStatus,
        inbox: Inbox,
        *,
        state: ExecutorState,
        version: int,
        pause_reason: str | None,
        now: float,
        turns: Collection[int] | None = None,
        refused: tuple[int, str] | None = None,
        swap_seconds: float = 0.0,
    ) -> SlackHeartbeat:
        """Return the next heartbeat.

        `turns`: `held_hash` of the turns to list; None lists the turns of `inbox`. `pause_reason`: why no turns are
        taken, None if turns are taken. `now`: unix seconds. `refused`: the newest version that was refused, and why.
        `swap_seconds`: how long turns waited for the latest version swap.
        """
        refused_version, refused_reason = refused or (-1, "")
        serving = status.serving
        heartbeat = SlackHeartbeat(
            worker=self._incarnation.worker,
            incarnation=self._incarnation.incarnation,
            slot=self._slot,
            sequence=self._sequence,
            worker_class=self._incarnation.worker_class,
            state=state,
            policy_version=version,
            hardware=Hardware(
                device=status.device,
                prefill_tokens_per_second=status.prefill_tokens_per_second,
                decode_tokens_per_second=status.decode_tokens_per_second,
            ),
            kv_bytes_total=status.kv_bytes_total,
            kv_bytes_free=status.kv_bytes_free,
            kv_bytes_per_token=status.kv_bytes_per_token,
            rollout=Tenant(running=status.running, waiting=status.waiting),
            serving=Tenant(running=serving.running, waiting=serving.waiting) if serving else Tenant(),
            prefill_headroom_seconds=serving.prefill_headroom if serving else None,
            decode_headroom_seconds=serving.decode_headroom if serving else None,
            max_turns=inbox.max_turns,
            token_budget=inbox.token_budget,
            ttl_seconds=TTL_SECONDS,
            holds=packed_hashes(inbox.listed_hashes if turns is None else turns),
            refused_version=refused_version,
            refused_reason=refused_reason[:MAX_REASON_CHARACTERS],
            paused_reason=(pause_reason or "")[:MAX_REASON_CHARACTERS],
            sent_at=now,
            swap_seconds=swap_seconds,
            cuts=self._cuts,
            frozen=status.lending is not None and status.lending.frozen,
            seeded=status.seeded,
            by_grant=self._by_grant,
            devices=status.devices,
        )
        self._sequence += 1
        return heartbeat
