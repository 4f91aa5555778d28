"""Traces of trajectories by OpenTelemetry's protocol, where a collector is named; off, a look at `exporter` is all.

Keeps true
- Nothing of OpenTelemetry is imported unless traces are exported.
- Nobody waits for a collector: spans go out on a thread of their own, and what finds no room there is dropped. A
  process that ends gives them CLOSE_SECONDS.
- The same trajectories are chosen in every process.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import TYPE_CHECKING

import structlog

from schemas.errors import UsageError
from schemas.record import Record
from schemas.traces import span_id, trace_id
from schemas.turns import TurnResult
from topics.hops import Hop, Kind, applied, written

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Of the environment: where OpenTelemetry's own variables name a collector."""

TRACES_PATH = "/v1/traces"

MISSING = "OpenTelemetry is not installed: pip install 'rose-rollouts[otel]'"

CLOSE_SECONDS = 5.0
"""For what is left at the end: OpenTelemetry's own 30 s are more than a role may take to leave."""

NANOSECONDS = 1_000_000_000


class Exporter:
    """Sends hops to a collector."""

    def __init__(self, endpoint: str, ratio: float, *, service: str, instance: str) -> None:
        """`endpoint`: the collector's base URL; empty leaves it to OpenTelemetry's variables. Raises ImportError."""
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._span, self._trace = ReadableSpan, trace
        self._scope = InstrumentationScope("rose")
        self._resource = Resource.create({"service.name": service, "service.instance.id": instance})
        self._most = int(ratio * 2**64)
        url = endpoint.rstrip("/") + TRACES_PATH if endpoint else None
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=url))

    def wrote(self, record: Record, topic: str) -> None:
        """A record was handed to the broker."""
        for hop in written(record, topic, time.time()):
            self._tell(hop)

    def applied(self, result: TurnResult, topic: str, *, began: float) -> None:
        """A completed turn was applied."""
        self._tell(applied(result, topic, began=began, now=time.time()))

    def close(self) -> None:
        """Send what is left, for CLOSE_SECONDS at most; the rest is dropped."""
        closing = Thread(target=self._processor.shutdown, name="last-spans", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            structlog.get_logger("tracing").warning("spans dropped", reason="their collector does not answer")

    def _tell(self, hop: Hop) -> None:
        trace = int(trace_id(hop.trajectory_id), 16)
        if trace & (2**64 - 1) >= self._most:
            return
        under = self._context(hop, trace, hop.under) if hop.under else None
        links = [self._trace.Link(under)] if under is not None and hop.kind is Kind.CONSUMER else []
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
                status=self._trace.Status(code, hop.failure or None),
                start_time=int(hop.begins * NANOSECONDS),
                end_time=int(hop.ends * NANOSECONDS),
                instrumentation_scope=self._scope,
            )
        )

    def _context(self, hop: Hop, trace: int, span: str) -> "SpanContext":
        flags = self._trace.TraceFlags(self._trace.TraceFlags.SAMPLED)
        own = int(span_id(hop.trajectory_id, span), 16)
        return self._trace.SpanContext(trace, own, is_remote=True, trace_flags=flags)


exporter: Exporter | None = None
"""This process's; None while nothing is traced."""


@contextmanager
def traced(endpoint: str, ratio: float, *, role: str) -> Iterator[None]:
    """Export this process's hops for as long as this runs, where a collector is named.

    `endpoint` is the configuration's. Raises UsageError where it is set and OpenTelemetry is not installed, or for
    variables that OpenTelemetry does not take.
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
        structlog.get_logger("tracing").warning("no traces are exported", reason=MISSING)
    except ValueError as error:
        raise UsageError(f"OpenTelemetry does not take its variables OTEL_*: {error}") from None
    try:
        yield
    finally:
        ended, exporter = exporter, None
        if ended is not None:
            ended.close()
