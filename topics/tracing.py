"""Traces of trajectories, exported over OTLP if a collector is configured.

A record that is written, or a result that is applied, ends spans in the trace of its trajectory.

Keeps true
- OpenTelemetry is imported only if traces are exported.
- No process waits for a collector: a thread of its own sends spans, and drops spans when its queue is full. A process
  that ends waits for the thread for CLOSE_SECONDS at most.
- Every process samples the same trajectories.
- Names and attributes follow OpenTelemetry's conventions for messaging and generative AI; other names begin with
  `rose.`.
- Spans carry counts, never tokens or text. A failed span carries the reason that its record carries.
- The times of a span are unix seconds of the process that exports it. A span never ends after it is exported, nor
  begins after its end, whatever a record says.

`spans_of_written` and `span_of_applied` are pure: `now` is an argument.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import TYPE_CHECKING

import structlog

from rose.schemas.errors import UsageError
from rose.schemas.record import Record
from rose.schemas.trace_context import span_id, trace_id
from rose.schemas.turns import TurnResult

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from rose.schemas.arrays import count
from rose.schemas.samples import Sample, SampleOutcome
from rose.schemas.trace_context import (
    TRAJECTORY,
    dispatch_span,
    execution_span,
    request_span,
    result_span,
    span_of,
)
from rose.schemas.turns import TurnDispatch, TurnOutcome, TurnRequest

AttributeValue = str | int | float | tuple[str, ...]


class SpanKind(Enum):
    """Kinds of spans, by OpenTelemetry's names."""

    INTERNAL = "INTERNAL"
    PRODUCER = "PRODUCER"
    CONSUMER = "CONSUMER"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpan:
    """One span of a trajectory's trace. Times are unix seconds."""

    trajectory_id: str
    span: str
    parent: str
    """The parent span; empty for the span of the trajectory."""
    name: str
    kind: SpanKind = SpanKind.INTERNAL
    begins: float
    ends: float
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    failure: str | None = None
    """Reason of the failure; None if the span has not failed."""


def spans_of_written(record: Record, topic: str, now: float) -> Iterator[TraceSpan]:
    """The spans that end when this record is written to the topic; none for most records, and none for withdrawals.

    `topic`: name on the broker. `now`: unix seconds.
    """
    match record:
        case TurnRequest(withdrawn=False):
            yield _producer_span(
                record.trajectory_id, record, topic, TRAJECTORY, record.requested_at, now, turn=record.turn
            )
        case TurnDispatch(withdrawn=False):
            request = record.request
            span: dict[str, AttributeValue] = {"turn": request.turn, "attempt": record.attempt, "worker": record.worker}
            parent, begins = request_span(request.turn), record.queued_at or record.dispatched_at
            yield _producer_span(
                request.trajectory_id, record, topic, parent, begins, min(record.dispatched_at, now), **span
            )
        case TurnResult():
            yield _execution_span(record, now)
        case Sample():
            yield _trajectory_span(record, now)
            yield _producer_span(record.trajectory_id, record, topic, TRAJECTORY, record.completed_at, now)
        case SampleOutcome():
            span = {"outcome": record.outcome.value, "step": record.step}
            yield _producer_span(record.trajectory_id, record, topic, TRAJECTORY, now, now, **span)


def span_of_applied(result: TurnResult, topic: str, *, began: float, now: float) -> TraceSpan:
    """The span in which an environment worker applies a completed turn: from its read to the end of the step.

    `topic`: name on the broker. `began`, `now`: begin and end in unix seconds.
    """
    return TraceSpan(
        trajectory_id=result.trajectory_id,
        span=result_span(result.turn, result.attempt),
        parent=execution_span(result.turn, result.attempt),
        name=f"process {topic}",
        kind=SpanKind.CONSUMER,
        begins=min(began, now),
        ends=now,
        attributes=_messaging_attributes(
            result.trajectory_id, topic, "process", turn=result.turn, attempt=result.attempt
        ),
    )


def _producer_span(
    trajectory_id: str,
    record: Record,
    topic: str,
    parent: str,
    begins: float,
    ends: float,
    **attributes: AttributeValue,
) -> TraceSpan:
    return TraceSpan(
        trajectory_id=trajectory_id,
        span=span_of(record),
        parent=parent,
        name=f"send {topic}",
        kind=SpanKind.PRODUCER,
        begins=min(begins, ends),
        ends=ends,
        attributes=_messaging_attributes(trajectory_id, topic, "send", **attributes),
    )


def _messaging_attributes(
    trajectory_id: str, topic: str, operation: str, **attributes: AttributeValue
) -> dict[str, AttributeValue]:
    return {
        "messaging.system": "kafka",
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.name": topic,
        "messaging.message.conversation_id": trajectory_id,
        **{f"rose.{name}": value for name, value in attributes.items()},
    }


def _execution_span(result: TurnResult, now: float) -> TraceSpan:
    """The span of an execution, or of a turn that the router failed."""
    times = result.times
    ends = min(times.finished_at or now, now)
    begins = min(times.received_at or ends, ends)
    attributes: dict[str, AttributeValue] = {
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
    return TraceSpan(
        trajectory_id=result.trajectory_id,
        span=span_of(result),
        parent=request_span(turn) if given_up else dispatch_span(turn, attempt),
        name="text_completion",
        begins=begins,
        ends=ends,
        attributes=attributes,
        failure=result.reason if result.outcome is TurnOutcome.FAILED else None,
    )


def _trajectory_span(sample: Sample, now: float) -> TraceSpan:
    requested = [turn.times.requested_at for turn in sample.turns if turn.times.requested_at]
    begins = min(requested, default=sample.completed_at)
    attributes: dict[str, AttributeValue] = {
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
    return TraceSpan(
        trajectory_id=sample.trajectory_id,
        span=TRAJECTORY,
        parent="",
        name=f"invoke_agent {sample.environment}",
        begins=min(begins, now),
        ends=now,
        attributes=attributes,
        failure=sample.failure or None,
    )


ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""OpenTelemetry's environment variables that name a collector."""

TRACES_PATH = "/v1/traces"

MISSING = "OpenTelemetry is not installed: pip install 'rose-rollouts[otel]'"

CLOSE_SECONDS = 5.0
"""How long the end of a process waits for its last spans. OpenTelemetry's default of 30 s is longer than a role may
take to end."""

NANOSECONDS = 1_000_000_000


class Exporter:
    """Sends spans to a collector."""

    def __init__(self, endpoint: str, ratio: float, *, service: str, instance: str) -> None:
        """`endpoint`: the collector's base URL; if empty, OpenTelemetry's variables name it.

        `ratio`: fraction of the trajectories that are traced. Raises ImportError if OpenTelemetry is not installed.
        """
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._span, self._trace = ReadableSpan, trace
        self._scope = InstrumentationScope("rose")
        self._resource = Resource.create({"service.name": service, "service.instance.id": instance})
        self._max_trace_number = int(ratio * 2**64)
        url = endpoint.rstrip("/") + TRACES_PATH if endpoint else None
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=url))

    def on_written(self, record: Record, topic: str) -> None:
        """Export the spans that end because a record was given to the producer."""
        for hop in spans_of_written(record, topic, time.time()):
            self._export(hop)

    def on_applied(self, result: TurnResult, topic: str, *, began: float) -> None:
        """Export the span of a completed turn that was applied. `began`: unix seconds."""
        self._export(span_of_applied(result, topic, began=began, now=time.time()))

    def close(self) -> None:
        """Send the remaining spans for CLOSE_SECONDS at most, and drop the others."""
        closing = Thread(target=self._processor.shutdown, name="last-spans", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            structlog.get_logger("tracing").warning("spans_dropped", reason="their collector does not answer")

    def _export(self, hop: TraceSpan) -> None:
        trace = int(trace_id(hop.trajectory_id), 16)
        if trace & (2**64 - 1) >= self._max_trace_number:
            return
        under = self._context(hop, trace, hop.parent) if hop.parent else None
        links = [self._trace.Link(under)] if under is not None and hop.kind is SpanKind.CONSUMER else []
        code = self._trace.StatusCode.ERROR if hop.failure else self._trace.StatusCode.UNSET
        self._processor.on_end(
            self._span(
                name=hop.name,
                context=self._context(hop, trace, hop.span),
                parent=under,
                resource=self._resource,
                attributes=hop.attributes,
                links=links,
                kind=self._trace.SpanKind[hop.kind.value],
                status=self._trace.Status(code, hop.failure),
                start_time=int(hop.begins * NANOSECONDS),
                end_time=int(hop.ends * NANOSECONDS),
                instrumentation_scope=self._scope,
            )
        )

    def _context(self, hop: TraceSpan, trace: int, span: str) -> "SpanContext":
        flags = self._trace.TraceFlags(self._trace.TraceFlags.SAMPLED)
        own = int(span_id(hop.trajectory_id, span), 16)
        return self._trace.SpanContext(trace, own, is_remote=True, trace_flags=flags)


exporter: Exporter | None = None
"""The exporter of this process; None while traces are not exported."""


@contextmanager
def export_traces(endpoint: str, ratio: float, *, role: str) -> Iterator[None]:
    """Export this process's spans for the duration of the context, if a collector is named.

    `endpoint`: the configured collector, or empty. `ratio`: fraction of the trajectories that are traced. Raises
    UsageError if `endpoint` is set and OpenTelemetry is not installed, or for variables that OpenTelemetry refuses.
    """
    global exporter
    if not endpoint and not any(map(os.environ.get, ENDPOINTS)):
        yield
        return
    try:
        exporter = Exporter(endpoint, ratio, service=f"rose-{role.rpartition('-')[0] or role}", instance=role)
    except ImportError:
        if endpoint:
            raise UsageError(f"tracing.endpoint is set, and {MISSING}") from None
        structlog.get_logger("tracing").warning("traces_not_exported", reason=MISSING)
    except ValueError as error:
        raise UsageError(f"OpenTelemetry does not take its variables OTEL_*: {error}") from None
    try:
        yield
    finally:
        ended, exporter = exporter, None
        if ended is not None:
            ended.close()
