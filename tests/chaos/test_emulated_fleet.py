"""Executors join and leave during steps, stop, fall silent, freeze, lend and take back: no turn is lost or doubled.

The executors are emulated (`bench.fleet`: the executor's contract on the real bus). Router, environment worker, control
app and broker are real. ROSE_CHAOS_SEED repeats a seed.
"""

import os
import random
from collections import Counter
from pathlib import Path

import pytest

from bench.fleet.engine import Lengths, Rates, sampled_of
from bench.fleet.executor import ExecutorSpec, NoteKind
from bench.fleet.fleet import NAME, Action, Line, Plan, PlannedAction, Serving
from bench.fleet.rollout import job_of, rollout
from bench.fleet.users import ServingRates
from rose.pipeline.audit import audit_log
from rose.schemas.arrays import ITEM_BYTES
from rose.schemas.prompts import Prompt
from rose.schemas.samples import Sample
from rose.topics.settings import BusSettings
from rose.workers.loadgen.config import TRACE_FILE
from tests.support.brokers import EMBEDDED, EXTERNAL, KAFKA, KINDS, start

FRESH_SEED = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID")).randrange(2**20)
SEED = int(os.environ.get("ROSE_CHAOS_SEED", FRESH_SEED))

RATES = Rates(prefill_tokens_per_second=2000.0, decode_tokens_per_second=12.0, max_turns=2, kv_tokens=1024)
LENGTHS = Lengths(median_tokens=14.0, trajectory_sigma=0.3, turn_sigma=0.5, token=21)
SERVING = Serving(
    trace=str(TRACE_FILE),
    rates=ServingRates(prefill_tokens_per_second=8000.0, tpot_seconds=0.03),
    speed=8.0,
    kv_bytes=30_000,
    headroom=0.2,
    quiet_seconds=10.0,
)
CONTROL = {"lease_seconds": 6.0, "dwell_seconds": 2.0, "idle_seconds": 2.0, "margin_seconds": 0.5}

GROUP_SIZE = 8
FAULTS_SECONDS = 25.0
"""Time of faults from the first prompt on."""

UNTOUCHED = 1
"""Number of dedicated executors without faults, so that no work waits forever."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(EXTERNAL in KINDS, reason="it wants a broker of its own"),
]


def specs_of(executors: int) -> tuple[ExecutorSpec, ...]:
    """Every second one lends; inboxes are shared by two."""
    return tuple(
        ExecutorSpec(
            name=f"emulated-{number}",
            slot=number // 2,
            rates=RATES,
            lends=number % 2 == 1,
            kv_bytes_per_token=16,
            wake_seconds=0.5,
        )
        for number in range(executors)
    )


def draw(dice: random.Random, spec: tuple[ExecutorSpec, ...]) -> tuple[PlannedAction, ...]:
    """Return the planned actions. Dedicated executors join late, so that lenders are needed. Most executors leave in
    one of three ways and come back, some of them at once.
    """
    actions: list[PlannedAction] = []
    for each in spec[UNTOUCHED:]:
        at = dice.uniform(3.0, 8.0)
        if not each.lends:
            actions.append(PlannedAction(at=at, worker=each.name, action=Action.START))
        action = dice.choice((Action.STOP, Action.KILL, Action.FREEZE, None))
        if action is None:
            continue
        at += dice.uniform(1.0, FAULTS_SECONDS - 16.0)
        actions.append(PlannedAction(at=at, worker=each.name, action=action))
        back = Action.THAW if action is Action.FREEZE else Action.START
        actions.append(PlannedAction(at=at + dice.choice((0.3, 1.0, 3.0, 7.0)), worker=each.name, action=back))
    return tuple(actions)


@pytest.mark.parametrize(
    ("kind", "executors", "groups"),
    [(EMBEDDED, 24, 12), (KAFKA, 64, 40)],
)
def test_executors_that_join_and_leave_during_steps_lose_and_double_nothing(
    kind: str, executors: int, groups: int, tmp_path: Path
) -> None:
    print(f"ROSE_CHAOS_SEED={SEED}")
    spec = specs_of(executors)
    actions = draw(random.Random(SEED), spec)
    prompts = [
        Prompt(group_id=f"g{number}", group_size=GROUP_SIZE, environment="calculator", seed=number)
        for number in range(groups)
    ]
    with start(kind, tmp_path / "broker") as broker:
        settings = broker.settings("emulated.")
        plan = Plan(
            bus=settings,
            job=job_of(settings),
            executors=spec,
            lengths=LENGTHS,
            serving=SERVING,
            actions=actions,
            journal=str(tmp_path / "journal.jsonl"),
        )
        with rollout(settings, plan, tmp_path / "roles", groups=groups, control=CONTROL) as running:
            running.submit(prompts)
            running.until(lambda: len(running.trainer.completed) == groups * GROUP_SIZE)
            samples = list(running.trainer.samples)
            lines = running.fleet.stop()
        check_log(settings, groups * GROUP_SIZE)
    tell(lines)
    check_samples(samples)
    done = Counter(line.what for line in lines)
    assert not done[NoteKind.OVERFILLED.value], "an executor was sent more than it offered"
    assert done[Action.KILL.value] + done[Action.STOP.value] + done[Action.FREEZE.value] >= executors // 4
    assert done[NoteKind.FIRST.value], "lenders lent"


def check_log(settings: BusSettings, trajectories: int) -> None:
    audit = audit_log(settings)
    assert (audit.lost, audit.doubled, audit.unasked) == ((), (), ())
    assert audit.clean and audit.requested == audit.settled == trajectories
    assert audit.infra_failed == 0, "an executor that leaves is no failure of a trajectory"


def check_samples(samples: list[Sample]) -> None:
    """Check that each turn is in its sample once, with the tokens of all its parts."""
    assert len({sample.trajectory_id for sample in samples}) == len(samples)
    for sample in samples:
        assert [turn.turn for turn in sample.turns] == list(range(len(sample.turns)))
        for turn in sample.turns:
            whole, _ = sampled_of(sample.trajectory_id, turn.turn, turn.sampling, LENGTHS)
            assert sample.tokens[ITEM_BYTES * turn.start : ITEM_BYTES * turn.end] == whole


def tell(lines: list[Line]) -> None:
    counts = {line.what: line.reason for line in lines if line.worker == NAME}
    print(counts, dict(Counter(line.what for line in lines if line.worker != NAME)))
