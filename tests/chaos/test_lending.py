"""Faults of the run around a lending server, and of its guest, do not reach the users of the server.

ROSE_CHAOS_SEED repeats a seed.
"""

import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose.pipeline.audit import audit_log
from rose.schemas.turns import TurnOutcome, TurnResult
from rose.topics.catalog import COMPLETED
from rose.topics.reader import Reader
from rose.topics.records import EndOfPartition, Envelope
from rose.topics.settings import BusSettings
from rose.workers.loadgen.requests import read_request_log
from tests.chaos.lending import LENDER_NAME, CoreResources, Run
from tests.support.brokers import EMBEDDED, EXTERNAL, KAFKA, KINDS, start

TRAFFIC_SECONDS = 600.0
"""Duration of the user traffic, with a fault every few seconds."""

WAKES = 10

GROWN_BYTES = 8 << 20
"""Memory that ten wakes and parks may leave in the engine core: half of the cache of one guest."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.timeout(3 * TRAFFIC_SECONDS + 1800),
    pytest.mark.skipif(EXTERNAL in KINDS, reason="it kills its broker"),
]

OURS = re.compile(r"rose:|/workers/|/schemas/")
"""Pattern of error lines that are not vLLM's alone."""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    seed = int(os.environ.get("ROSE_CHAOS_SEED", random.SystemRandom().randrange(2**32)))
    print(f"ROSE_CHAOS_SEED={seed}")
    kind = KAFKA if os.environ.get("KAFKA_HOME") else EMBEDDED
    with start(kind, tmp_path / "broker") as broker:
        running = Run(tmp_path, broker, broker.settings("faults."), seed)
        try:
            running.prepare()
            yield running
        finally:
            running.close()


def test_faults_of_run_and_guest_do_not_reach_users_of_a_lending_server(run: Run) -> None:
    run.gather()
    began = time.time()
    run.rage(TRAFFIC_SECONDS)
    run.guest_faults.unlink()
    run.until_guest("built")
    run.park()
    left = [run.left()]
    for _ in range(WAKES):
        run.wake()
        run.park()
        left.append(run.left())
    errors = list(run.serving_troubles())
    status = run.leave()
    tell(run, began, left)

    assert errors == []
    since = list(run.serving_troubles())  # a stopping vLLM may report the engine that it ends as dead
    assert [line for line in since if OURS.search(line)] == []
    waits = read_request_log(run.folder / "faults")
    assert [each.error for each in waits if each.error] == []
    assert len(waits) > TRAFFIC_SECONDS / 2, "there was traffic"
    assert status["lender"] == 0

    assert left[WAKES].threads <= left[2].threads
    assert left[WAKES].descriptors <= left[2].descriptors
    assert left[WAKES].resident_bytes - left[2].resident_bytes < GROWN_BYTES

    assert min(run.faults.values()) >= 3 and len(run.faults) == 3
    assert run.count_logged("guest_dropped") >= 3
    assert run.count_logged("version_refused") >= 1
    assert results(run.settings)[LENDER_NAME, TurnOutcome.COMPLETED] > 100
    if not run.broker.embedded:  # the embedded broker loses unsaved records when killed
        audit = audit_log(run.settings)
        assert (audit.lost, audit.doubled, audit.unasked) == ((), (), ())


def tell(run: Run, began: float, left: list[CoreResources]) -> None:
    waits = read_request_log(run.folder / "faults")
    first = sorted(each.first_token_seconds for each in waits if each.first_token_seconds is not None)
    lines = [
        f"{run.broker.name}, seed {run.seed}: {time.time() - began:.0f} s, {dict(run.faults)}, "
        f"{run.count_logged('guest_dropped')} guests dropped, {run.count_logged('guest_built')} built, "
        f"{run.log('trainer').read_text().count('spoilt version')} versions spoilt, "
        f"{run.count_logged('version_refused')} refused by the lender",
        f"{len(waits)} requests, {sum(bool(each.error) for each in waits)} failed, "
        f"TTFT p50 {first[len(first) // 2]:.3f} s, p99 {first[len(first) * 99 // 100]:.3f} s",
        f"turns: { {f'{worker} {outcome.value}': many for (worker, outcome), many in results(run.settings).items()} }",
        *map(str, left),
        *run.ended,
    ]
    print(*lines, sep="\n", file=sys.__stderr__)


def results(settings: BusSettings) -> Counter[tuple[str | None, TurnOutcome]]:
    """Return the number of turns by worker and outcome."""
    reader, found = (
        Reader(settings, "chaos", group="chaos", report_ends=True),
        Counter[tuple[str | None, TurnOutcome]](),
    )
    left = {(COMPLETED, home) for home in range(2)}
    reader.assign(dict.fromkeys(left, 0))
    while left:
        for item in reader.read(500, 1.0):
            if isinstance(item, EndOfPartition):
                left.discard((item.topic, item.partition))
            elif isinstance(item, Envelope) and isinstance(item.record, TurnResult):
                found[item.record.worker, item.record.outcome] += 1
    reader.close()
    return found
