"""A trace collector: OTLP over HTTP, decoded with OpenTelemetry's own messages."""

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True, slots=True)
class Received:
    """One received span."""

    trace: str
    span: str
    under: str
    name: str
    kind: str
    service: str
    begins: int
    ends: int
    failed: bool
    links: tuple[str, ...]
    attributes: dict[str, Any]


@dataclass(slots=True)
class Collector:
    """All received spans."""

    endpoint: str
    spans: list[Received] = field(default_factory=list)

    @property
    def traces(self) -> dict[str, list[Received]]:
        """Return the spans by trace; a span received twice counts once."""
        found: dict[str, dict[str, Received]] = {}
        for span in self.spans:
            found.setdefault(span.trace, {})[span.span] = span
        return {trace: list(spans.values()) for trace, spans in found.items()}


def _received(body: bytes) -> Iterator[Received]:
    for group in ExportTraceServiceRequest.FromString(body).resource_spans:
        of = {each.key: each.value.string_value for each in group.resource.attributes}
        for scope in group.scope_spans:
            for span in scope.spans:
                yield Received(
                    trace=span.trace_id.hex(),
                    span=span.span_id.hex(),
                    under=span.parent_span_id.hex(),
                    name=span.name,
                    kind=span.SpanKind.Name(span.kind),
                    service=of["service.name"],
                    begins=span.start_time_unix_nano,
                    ends=span.end_time_unix_nano,
                    failed=span.status.code == span.status.STATUS_CODE_ERROR,
                    links=tuple(link.span_id.hex() for link in span.links),
                    attributes={each.key: _plain(each.value) for each in span.attributes},
                )


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(each) for each in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def collector() -> Iterator[Collector]:
    """Run a collector on loopback for the duration of the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            found.spans.extend(_received(body))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Collector(f"http://127.0.0.1:{server.server_port}")
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()
