"""A run with a collector: one trace per trajectory, with every span of every turn."""

from collections import Counter

import pytest

from tests.support.brokers import EMBEDDED
from tests.support.otlp_collector import Received, collector
from tests.support.rose_command import TRAJECTORIES, Rose, small

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(900)]

REQUESTED, DISPATCHED, COMPLETED = (f"rose.turns.{event}.v1" for event in ("requested", "dispatched", "completed"))
ROOT, REQUEST, DISPATCH = "invoke_agent calculator", f"send {REQUESTED}", f"send {DISPATCHED}"
EXECUTION, RESULT = "text_completion", f"process {COMPLETED}"
SAMPLE, OUTCOME = "send rose.samples.completed.v1", "send rose.samples.outcomes.v1"

UNDER = {
    REQUEST: ROOT,
    DISPATCH: REQUEST,
    EXECUTION: DISPATCH,
    RESULT: EXECUTION,
    SAMPLE: ROOT,
    OUTCOME: ROOT,
}
SERVICES = {
    ROOT: "rose-environment",
    REQUEST: "rose-environment",
    DISPATCH: "rose-router",
    EXECUTION: "rose-executor",
    RESULT: "rose-environment",
    SAMPLE: "rose-environment",
    OUTCOME: "rose-trainer",
}


@pytest.mark.parametrize("broker_kind", [EMBEDDED], indirect=True)
def test_trajectory_is_one_trace_with_all_its_spans(rose: Rose) -> None:
    with collector() as found:
        rose("demo", *small(run__executors=1), "--set", f"tracing.endpoint={found.endpoint}")
    traces = found.traces
    assert len(traces) == TRAJECTORIES
    for spans in traces.values():
        check(spans)


def check(spans: list[Received]) -> None:
    by_id = {span.span: span for span in spans}
    names = Counter(span.name for span in spans)
    assert {span.name: span.service for span in spans} == SERVICES
    assert (names[ROOT], names[SAMPLE], names[OUTCOME]) == (1, 1, 1)
    assert names[REQUEST] == names[RESULT] >= 1, "each turn that was asked for was applied, once"
    assert len({span.attributes.get("gen_ai.conversation.id") for span in spans} - {None}) == 1
    for span in spans:
        assert span.begins <= span.ends
        under = by_id[span.under].name if span.under else ""
        assert under == UNDER.get(span.name, ""), span
        assert span.links == ((span.under,) if span.kind == "SPAN_KIND_CONSUMER" else ())
