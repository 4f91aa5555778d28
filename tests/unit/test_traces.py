"""A trajectory is one trace, and its records are its spans."""

import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from rose.schemas.record import Record
from rose.schemas.samples import Sample, SampleOutcome
from rose.schemas.trace_context import TRAJECTORY, span_id, span_of, trace_id, traceparent
from rose.schemas.turns import TurnDispatch, TurnOutcome, TurnRequest, TurnResult, TurnTimes
from rose.schemas.wire import TRACE_HEADER, encode, headers_of
from rose.topics import tracing
from rose.topics.tracing import SpanKind, span_of_applied, spans_of_written
from tests.golden.examples import EXAMPLES
from tests.support.otlp_collector import collector

ROOT = Path(__file__).parents[2]
TOPIC = "rose.turns.completed.v1"

R = TypeVar("R", bound=Record)


def example(kind: type[R], **changes: object) -> R:
    (found,) = [each for each in EXAMPLES if type(each) is kind]
    return msgspec.structs.replace(found, **changes)


def test_every_process_derives_the_same_trace_id_and_distinct_span_ids() -> None:
    request = example(TurnRequest)
    name = request.trajectory_id
    dispatch = example(TurnDispatch)
    again = msgspec.structs.replace(dispatch, attempt=dispatch.attempt + 1)
    parents = [traceparent(name, span_of(each)) for each in (request, dispatch, again)]
    assert len({parent.split("-")[1] for parent in parents}) == 1
    assert len({parent.split("-")[2] for parent in parents}) == 3
    assert parents[0].split("-")[1] != traceparent("another", span_of(request)).split("-")[1]
    assert (TRACE_HEADER, parents[0].encode()) in headers_of(request, name)


def test_trace_id_follows_the_documented_formula() -> None:
    assert trace_id("g-1:3") == "8933e23f096354354b79898ece4f1d4c", "b2sum -l 128"


def test_spans_are_nested_and_have_their_durations() -> None:
    times = TurnTimes(received_at=10.0, first_token_at=10.5, finished_at=12.0)
    request = example(TurnRequest, requested_at=1.0)
    dispatch = example(TurnDispatch, queued_at=2.0, dispatched_at=3.0)
    key = {"trajectory_id": request.trajectory_id, "turn": request.turn, "attempt": dispatch.attempt}
    result = example(TurnResult, **key, times=times, worker="executor-0", outcome=TurnOutcome.COMPLETED)
    (request_span,) = spans_of_written(request, TOPIC, 1.5)
    (sent,) = spans_of_written(dispatch, TOPIC, 9.0)
    (ran,) = spans_of_written(result, TOPIC, 13.0)
    taken = span_of_applied(result, TOPIC, began=14.0, now=15.0)
    assert [hop.parent for hop in (request_span, sent, ran, taken)] == [
        TRAJECTORY,
        request_span.span,
        sent.span,
        ran.span,
    ]
    assert [(hop.begins, hop.ends) for hop in (request_span, sent, ran, taken)] == [
        (1, 1.5),
        (2, 3),
        (10, 12),
        (14, 15),
    ]
    assert [hop.kind for hop in (request_span, sent, ran, taken)] == [
        SpanKind.PRODUCER,
        SpanKind.PRODUCER,
        SpanKind.INTERNAL,
        SpanKind.CONSUMER,
    ]
    assert ran.attributes["gen_ai.usage.output_tokens"] == len(result.tokens) // 4
    assert ran.attributes["gen_ai.response.time_to_first_chunk"] == 0.5
    assert (request_span.name, taken.name) == (f"send {TOPIC}", f"process {TOPIC}")


def test_turn_failed_by_the_router_has_a_failed_span_under_its_request() -> None:
    result = example(TurnResult, worker=None, outcome=TurnOutcome.FAILED, reason="patience ran out")
    (hop,) = spans_of_written(result, TOPIC, 5.0)
    assert hop.parent == f"request/{result.turn}"
    assert hop.failure == "patience ran out"


def test_end_of_a_trajectory_has_its_own_span_and_the_sample_span() -> None:
    sample = example(Sample)
    whole, sent = spans_of_written(sample, TOPIC, sample.completed_at + 1)
    assert (whole.span, whole.parent, sent.parent) == (TRAJECTORY, "", TRAJECTORY)
    assert whole.begins <= sent.begins <= whole.ends
    outcome = example(SampleOutcome)
    (settled,) = spans_of_written(outcome, TOPIC, 5.0)
    assert settled.attributes["rose.outcome"] == outcome.outcome.value


def test_collector_receives_spans_with_the_ids_of_the_headers() -> None:
    request, sample = example(TurnRequest), example(Sample, failure="the environment ended", reward=None)
    with collector() as found:
        with tracing.export_traces(found.endpoint, 1.0, role="environment-0"):
            assert tracing.exporter is not None
            tracing.exporter.on_written(request, TOPIC)
            tracing.exporter.on_written(sample, TOPIC)
        assert tracing.exporter is None
    request_span = next(span for span in found.spans if span.trace == trace_id(request.trajectory_id))
    header = dict(headers_of(request, request.trajectory_id))[TRACE_HEADER].decode()
    assert header == f"00-{request_span.trace}-{request_span.span}-01"
    assert request_span.under == span_id(request.trajectory_id, TRAJECTORY)
    assert (request_span.kind, request_span.service) == ("SPAN_KIND_PRODUCER", "rose-environment")
    assert request_span.attributes["messaging.message.conversation_id"] == request.trajectory_id
    (whole,) = [span for span in found.spans if not span.under]
    assert whole.failed and whole.name == f"invoke_agent {sample.environment}"


def test_process_does_not_wait_for_a_silent_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "CLOSE_SECONDS", 0.05)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "2")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with tracing.export_traces(endpoint, 1.0, role="router-0"):
            assert tracing.exporter is not None
            tracing.exporter.on_written(example(TurnRequest), TOPIC)
        (sending,) = [thread for thread in threading.enumerate() if thread.name == "last-spans"]
    sending.join()


def test_forged_timestamp_does_not_spoil_other_spans() -> None:
    request, sample = example(TurnRequest), example(Sample)
    times = TurnTimes(**dict.fromkeys(TurnTimes.__struct_fields__, 253_402_300_799.0))
    turns = tuple(msgspec.structs.replace(turn, times=times) for turn in sample.turns)
    with collector() as found, tracing.export_traces(found.endpoint, 1.0, role="environment-0"):
        assert tracing.exporter is not None
        tracing.exporter.on_written(request, TOPIC)
        tracing.exporter.on_written(msgspec.structs.replace(sample, turns=turns, completed_at=times.applied_at), TOPIC)
        tracing.exporter.on_written(example(TurnResult, times=times), TOPIC)
        tracing.exporter.on_applied(example(TurnResult, times=times), TOPIC, began=times.applied_at)
    assert len(found.spans) == 5
    assert all(span.begins <= span.ends < 2**62 for span in found.spans)


def test_sampled_trajectories_are_traced_completely() -> None:
    names = [f"group:{index}" for index in range(200)]
    with collector() as found, tracing.export_traces(found.endpoint, 0.5, role="router-0"):
        assert tracing.exporter is not None
        for name in names:
            request = example(TurnRequest, trajectory_id=name)
            tracing.exporter.on_written(request, TOPIC)
            dispatch = example(TurnDispatch, request_wire=msgspec.Raw(encode(request)))
            tracing.exporter.on_written(dispatch, TOPIC)
    assert {len(spans) for spans in found.traces.values()} == {2}
    assert 60 < len(found.traces) < 140


def test_process_without_traces_imports_no_tracing_library() -> None:
    found = "import sys, rose.pipeline.cli.roles, rose.topics.writer; print('opentelemetry' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", found], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def test_withdrawal_of_a_turn_has_no_span_under_the_id_of_its_request() -> None:
    request = example(TurnRequest)
    assert span_of(request) == span_of(msgspec.structs.replace(request, withdrawn=True))
    assert not list(spans_of_written(msgspec.structs.replace(request, withdrawn=True), TOPIC, 5.0))
    assert not list(spans_of_written(example(TurnDispatch, withdrawn=True), TOPIC, 5.0))
