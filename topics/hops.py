"""The hops of a trajectory, as spans of its trace: what each record that is written, or applied, says of itself.

Keeps true
- Names and attributes are those of OpenTelemetry's conventions for messaging and generative AI; what they have no word
  for begins with `rose.`.
- No token and no text of a turn is in them, only counts; of what failed they say why, as its record does.
- A span has the times of the process that tells it, in unix seconds. It never ends after it is told, nor begins after
  its end, whatever a record says.

Pure: `now` is handed in.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from schemas.arrays import count
from schemas.record import Record
from schemas.samples import Sample, SampleOutcome
from schemas.traces import (
    TRAJECTORY,
    dispatch_span,
    execution_span,
    request_span,
    result_span,
    span_of,
)
from schemas.turns import TurnDispatch, TurnOutcome, TurnRequest, TurnResult

Value = str | int | float | tuple[str, ...]


class Kind(Enum):
    """By OpenTelemetry's names."""

    INTERNAL = "INTERNAL"
    PRODUCER = "PRODUCER"
    CONSUMER = "CONSUMER"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One span."""

    trajectory_id: str
    span: str
    under: str
    """The span that this one is under; empty for the trajectory's own."""
    name: str
    kind: Kind = Kind.INTERNAL
    begins: float
    ends: float
    attributes: Mapping[str, Value] = field(default_factory=dict)
    failure: str = ""
    """Why it is one; empty when it is none."""


def written(record: Record, topic: str, now: float) -> Iterator[Hop]:
    """The hops that end with this record's being written into the topic; of most records none."""
    match record:
        case TurnRequest():
            yield _sent(record.trajectory_id, record, topic, TRAJECTORY, record.requested_at, now, turn=record.turn)
        case TurnDispatch():
            request = record.request
            said: dict[str, Value] = {"turn": request.turn, "attempt": record.attempt, "worker": record.worker}
            under, begins = request_span(request.turn), record.queued_at or record.dispatched_at
            yield _sent(request.trajectory_id, record, topic, under, begins, min(record.dispatched_at, now), **said)
        case TurnResult():
            yield _execution(record, now)
        case Sample():
            yield _trajectory(record, now)
            yield _sent(record.trajectory_id, record, topic, TRAJECTORY, record.completed_at, now)
        case SampleOutcome():
            said = {"outcome": record.outcome.value, "step": record.step}
            yield _sent(record.trajectory_id, record, topic, TRAJECTORY, now, now, **said)


def applied(result: TurnResult, topic: str, *, began: float, now: float) -> Hop:
    """The environment worker's: it took a completed turn from the topic, and its environment has stepped."""
    return Hop(
        trajectory_id=result.trajectory_id,
        span=result_span(result.turn, result.attempt),
        under=execution_span(result.turn, result.attempt),
        name=f"process {topic}",
        kind=Kind.CONSUMER,
        begins=min(began, now),
        ends=now,
        attributes=_messaging(result.trajectory_id, topic, "process", turn=result.turn, attempt=result.attempt),
    )


def _sent(trajectory_id: str, record: Record, topic: str, under: str, begins: float, ends: float, **said: Value) -> Hop:
    return Hop(
        trajectory_id=trajectory_id,
        span=span_of(record),
        under=under,
        name=f"send {topic}",
        kind=Kind.PRODUCER,
        begins=min(begins, ends),
        ends=ends,
        attributes=_messaging(trajectory_id, topic, "send", **said),
    )


def _messaging(trajectory_id: str, topic: str, operation: str, **said: Value) -> dict[str, Value]:
    return {
        "messaging.system": "kafka",
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.name": topic,
        "messaging.message.conversation_id": trajectory_id,
        **{f"rose.{name}": value for name, value in said.items()},
    }


def _execution(result: TurnResult, now: float) -> Hop:
    """What an executor made of a dispatch; of a turn that the router gave up, that it did."""
    times = result.times
    ends = min(times.finished_at or now, now)
    begins = min(times.received_at or ends, ends)
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "vllm",
        "gen_ai.conversation.id": result.trajectory_id,
        "gen_ai.usage.input_tokens": result.context_tokens,
        "gen_ai.usage.output_tokens": count(result.tokens),
        "gen_ai.usage.cache_read.input_tokens": result.cached_tokens,
        "rose.turn": result.turn,
        "rose.attempt": result.attempt,
        "rose.outcome": result.outcome.value,
    }
    if result.finish_reason:
        attributes["gen_ai.response.finish_reasons"] = (result.finish_reason,)
    if times.first_token_at:
        attributes["gen_ai.response.time_to_first_chunk"] = max(0.0, times.first_token_at - begins)
    if result.spans:
        attributes["rose.policy_version"] = result.spans[-1].version
    if result.worker is not None:
        attributes["rose.worker"] = result.worker
    given_up = result.worker is None
    turn, attempt = result.turn, result.attempt
    return Hop(
        trajectory_id=result.trajectory_id,
        span=span_of(result),
        under=request_span(turn) if given_up else dispatch_span(turn, attempt),
        name="text_completion",
        begins=begins,
        ends=ends,
        attributes=attributes,
        failure=result.reason if result.outcome is TurnOutcome.FAILED else "",
    )


def _trajectory(sample: Sample, now: float) -> Hop:
    asked = [turn.times.requested_at for turn in sample.turns if turn.times.requested_at]
    begins = min(asked, default=sample.completed_at)
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": sample.environment,
        "gen_ai.conversation.id": sample.trajectory_id,
        "gen_ai.request.model": sample.model_id,
        "rose.group_id": sample.group_id,
        "rose.turns": len(sample.turns),
    }
    if sample.success is not None:
        attributes["rose.success"] = str(sample.success).lower()
    if sample.reward is not None:
        attributes["gen_ai.evaluation.name"] = "reward"
        attributes["gen_ai.evaluation.score.value"] = sample.reward
    return Hop(
        trajectory_id=sample.trajectory_id,
        span=TRAJECTORY,
        under="",
        name=f"invoke_agent {sample.environment}",
        begins=min(begins, now),
        ends=now,
        attributes=attributes,
        failure=sample.failure,
    )
