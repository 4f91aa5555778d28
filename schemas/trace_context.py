"""The place of a record in the trace of its trajectory: trace and span ids.

Keeps true
- A trace is a trajectory, a span a hop of it: request -> dispatch -> execution -> result, under the trajectory, and at
  its end the sample and its outcome.
- Ids follow from what a record names: every process derives the same ones, nothing is passed on, and what is written
  twice is one span.

Pure.
"""

import hashlib

from rose.schemas.record import Record
from rose.schemas.samples import Sample, SampleOutcome
from rose.schemas.turns import TurnDispatch, TurnRequest, TurnResult

TRAJECTORY = "trajectory"
"""Name of the root span of a trajectory."""

SAMPLE = "sample"
OUTCOME = "outcome"


def request_span(turn: int) -> str:
    """Return the name of the span of the environment worker that requests the turn."""
    return f"request/{turn}"


def dispatch_span(turn: int, attempt: int) -> str:
    """Return the name of the span of the router that sends an attempt to an executor."""
    return f"dispatch/{turn}/{attempt}"


def execution_span(turn: int, attempt: int) -> str:
    """Return the name of the span of the executor that runs the attempt and writes its result."""
    return f"execution/{turn}/{attempt}"


def result_span(turn: int, attempt: int) -> str:
    """Return the name of the span of the environment worker that applies the result."""
    return f"result/{turn}/{attempt}"


def span_of(record: Record) -> str:
    """Return the name of the span that writes this record; for a record without span, its schema."""
    match record:
        case TurnRequest():
            return request_span(record.turn)
        case TurnDispatch():
            return dispatch_span(record.request.turn, record.attempt)
        case TurnResult():
            return execution_span(record.turn, record.attempt)
        case Sample():
            return SAMPLE
        case SampleOutcome():
            return OUTCOME
        case _:
            return record.SCHEMA


def trace_id(trajectory_id: str) -> str:
    """Return the trace id of a trajectory, 32 hexadecimal digits."""
    return hashlib.blake2b(trajectory_id.encode(), digest_size=16).hexdigest()


def span_id(trajectory_id: str, span: str) -> str:
    """Return the id of a span, 16 hexadecimal digits."""
    return hashlib.blake2b(f"{trajectory_id}/{span}".encode(), digest_size=8).hexdigest()


def traceparent(trajectory_id: str, span: str) -> str:
    """Return the W3C trace context of a span."""
    return f"00-{trace_id(trajectory_id)}-{span_id(trajectory_id, span)}-01"
