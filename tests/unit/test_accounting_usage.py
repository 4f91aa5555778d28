"""The usage of a run from its records: the device time of each attempt, and whether its tokens were used."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.pipeline.accounting.cost import Fate, HeldDevices, TrainerStep, fate_of
from rose.pipeline.accounting.prices import DeviceClass
from rose.pipeline.accounting.usage import UsageLedger
from rose.schemas.arrays import pack_tokens
from rose.schemas.heartbeats import Hardware, SlackHeartbeat, WorkerClass
from rose.schemas.prompts import Sampling
from rose.schemas.record import Record
from rose.schemas.samples import Ending, Outcome, Sample, SampleOutcome, SampleTurn
from rose.schemas.turns import Refusal, TurnOutcome, TurnResult, TurnTimes
from rose.workers.trainer.metrics import StepLine
from tests.golden.examples import EXAMPLES

CONTEXT_TOKENS = 10
WORKERS = {"executor-0": "dedicated", "lender-0": "serving"}
COMPLETED, PREEMPTED, REFUSED, FAILED = (
    TurnOutcome.COMPLETED,
    TurnOutcome.PREEMPTED,
    TurnOutcome.REFUSED,
    TurnOutcome.FAILED,
)
HEARTBEAT = next(example for example in EXAMPLES if isinstance(example, SlackHeartbeat))
SAMPLE = next(example for example in EXAMPLES if isinstance(example, Sample))


def result(
    attempt: int,
    outcome: TurnOutcome,
    seconds: dict[str, float],
    *,
    tokens: int = 0,
    earlier: int = 0,
    worker: str | None = "executor-0",
    started: bool = True,
) -> TurnResult:
    """Return a result of turn 0 of `g:0`, which ended at second `attempt + 1`. `earlier`: tokens that it began with."""
    return TurnResult(
        trajectory_id="g:0",
        group_id="g",
        home=0,
        turn=0,
        attempt=attempt,
        outcome=outcome,
        worker=worker,
        incarnation=1,
        tokens=pack_tokens([1] * tokens),
        context_tokens=CONTEXT_TOKENS + earlier if started else 0,
        times=TurnTimes(received_at=attempt + 0.5, finished_at=attempt + 1.0),
        device_seconds=seconds,
    )


def sample_of(*applied: TurnResult, success: bool | None = True) -> Sample:
    turns = tuple(
        SampleTurn(
            turn=each.turn,
            attempt=each.attempt,
            worker=each.worker or "",
            sampling=Sampling(),
            start=CONTEXT_TOKENS,
            end=CONTEXT_TOKENS + 1,
            cached_tokens=0,
            times=each.times,
            environment_seconds=0.0,
        )
        for each in applied
    )
    return msgspec.structs.replace(SAMPLE, trajectory_id="g:0", turns=turns, success=success, failure="")


def heartbeat(
    worker: str, at: float, *, device: str = "H800", devices: int = 1, incarnation: int = 1
) -> SlackHeartbeat:
    hardware = Hardware(device=device, prefill_tokens_per_second=1.0, decode_tokens_per_second=1.0)
    return msgspec.structs.replace(
        HEARTBEAT,
        worker=worker,
        incarnation=incarnation,
        worker_class=WorkerClass(WORKERS[worker]),
        hardware=hardware,
        sent_at=at,
        devices=devices,
    )


def ledger_of(*records: Record) -> UsageLedger:
    ledger = UsageLedger()
    for record in records:
        ledger.add(record)
    return ledger


def attempts_of(*records: Record) -> tuple[list[tuple[DeviceClass, float, bool]], int]:
    """Return class, device seconds and use of each attempt, and the number of unknown attempts."""
    usage = ledger_of(*records).usage(None)
    return [(each.device_class, each.device_seconds, each.kept) for each in usage.attempts], usage.unknown_attempts


class Play(NamedTuple):
    """One attempt at a turn as it happened."""

    worker: str
    seconds: float
    sampled: int
    end: str
    """`completed`, `preempted`, `aborted` before its start, or `lost` with its executor."""


PLAYS = st.builds(
    Play,
    st.sampled_from(sorted(WORKERS)),
    st.floats(0.01, 100),
    st.integers(0, 3),
    st.sampled_from(["completed", "preempted", "aborted", "lost"]),
)


@given(st.lists(PLAYS, min_size=1, max_size=8))
def test_device_time_of_attempts_is_what_each_of_them_took(plays: Sequence[Play]) -> None:
    records: list[TurnResult] = []
    expected: list[tuple[DeviceClass, float]] = []
    lineage: dict[int, frozenset[int]] = {}
    partial, from_partial = 0, frozenset[int]()
    seconds: dict[str, float] = {}
    for attempt, play in enumerate(plays):
        if play.end == "lost":
            continue
        name, aborted = WORKERS[play.worker], play.end == "aborted"
        took, sampled = (0.0, 0) if aborted else (play.seconds, play.sampled + (play.end == "completed"))
        so_far = {**seconds, name: seconds.get(name, 0.0) + took}
        outcome = COMPLETED if play.end == "completed" else PREEMPTED
        records.append(
            result(
                attempt,
                outcome,
                so_far,
                tokens=partial + sampled,
                earlier=partial,
                worker=play.worker,
                started=not aborted,
            )
        )
        expected.append((DeviceClass.BORROWED if name == "serving" else DeviceClass.DEDICATED, took))
        lineage[attempt] = from_partial | {attempt}
        if outcome is PREEMPTED and sampled:  # longer than all before: the router keeps this partial turn
            partial, seconds, from_partial = partial + sampled, so_far, lineage[attempt]
    found, unknown = attempts_of(*records)
    assert [seconds for _, seconds, _ in found] == pytest.approx([took for _, took in expected])
    assert all(mine is theirs for (mine, took, _), (theirs, _) in zip(found, expected, strict=True) if took)
    known = [record.attempt for record in records]
    assert unknown == (max(known) + 1 - len(known) if known else 0)
    completed = [record for record in records if record.outcome is COMPLETED]
    kept = {attempt for attempt, (_, _, used) in zip(known, found, strict=True) if used}
    assert kept == (lineage[completed[0].attempt] if completed else from_partial)


def test_attempt_that_a_sample_does_not_name_is_lost() -> None:
    late = result(0, COMPLETED, {"serving": 2.0}, tokens=4, worker="lender-0")
    applied = result(1, COMPLETED, {"dedicated": 3.0}, tokens=4)
    assert attempts_of(late, applied, sample_of(applied)) == (
        [(DeviceClass.BORROWED, 2.0, False), (DeviceClass.DEDICATED, 3.0, True)],
        0,
    )


def test_attempts_have_one_order_whatever_the_hashes_of_their_names() -> None:
    names = [f"group-{number}:0" for number in (7, 3, 11, 2, 5, 13, 1, 17)]
    ledger = UsageLedger()
    for name in names:
        ledger.add(msgspec.structs.replace(result(0, COMPLETED, {"dedicated": 3.0}, tokens=4), trajectory_id=name))
    assert [attempt.trajectory_id for attempt in ledger.usage(None).attempts] == sorted(names)


def test_duplicate_result_counts_once() -> None:
    applied = result(0, COMPLETED, {"dedicated": 3.0}, tokens=4)
    assert attempts_of(applied, applied, sample_of(applied)) == ([(DeviceClass.DEDICATED, 3.0, True)], 0)


def test_attempt_whose_earlier_part_is_not_on_the_log_has_an_unknown_time() -> None:
    applied = result(1, COMPLETED, {"serving": 1.0, "dedicated": 3.0}, tokens=9, earlier=4)
    assert attempts_of(applied, sample_of(applied)) == ([], 2)


def test_applied_turn_without_a_result_on_the_log_has_an_unknown_time() -> None:
    assert attempts_of(sample_of(result(0, COMPLETED, {"dedicated": 3.0}, tokens=4))) == ([], 1)


def test_result_that_an_engine_computed_and_that_was_refused_is_lost_work() -> None:
    refused = result(0, REFUSED, {"dedicated": 1.5})
    room = msgspec.structs.replace(result(1, REFUSED, {}, started=False), refusal=Refusal.ROOM)
    given_up = result(2, FAILED, {}, worker=None, started=False)
    assert attempts_of(refused, room, given_up) == ([(DeviceClass.DEDICATED, 1.5, False)], 0)


def test_turn_that_was_stopped_as_its_trajectory_ended_early_has_the_fate_of_the_trajectory() -> None:
    surplus = msgspec.structs.replace(sample_of(), reward=None, success=None, ended=Ending.SURPLUS)
    outcome = SampleOutcome(
        trajectory_id="g:0", group_id="g", outcome=Outcome.SURPLUS, step=3, policy_version=2, recorded_at=9.0
    )
    preempted = result(0, PREEMPTED, {"dedicated": 1.0}, tokens=2)
    stopped = result(1, PREEMPTED, {"dedicated": 1.5}, tokens=3, earlier=2)
    usage = ledger_of(preempted, stopped, surplus, outcome, heartbeat("executor-0", 2.0)).usage(None)
    assert [fate_of(each, usage.answers) for each in usage.attempts] == [Fate.SURPLUS, Fate.SURPLUS]


def test_dedicated_executor_is_held_from_its_first_to_its_last_record_in_each_start() -> None:
    usage = ledger_of(
        heartbeat("executor-0", 0.25, devices=4),
        heartbeat("executor-0", 0.75, devices=4),
        result(1, COMPLETED, {"dedicated": 0.5}, tokens=1),
        heartbeat("executor-0", 50.0, devices=4, incarnation=2),
        heartbeat("executor-0", 60.0, devices=4, incarnation=2),
        heartbeat("lender-0", 0.0),
        heartbeat("lender-0", 90.0, device="none"),
    ).usage(None)
    assert usage.held == [HeldDevices("H800", 4, 0.25, 2.0), HeldDevices("H800", 4, 50.0, 60.0)]
    assert usage.assumed_devices == 0
    assert usage.trainer is None


def test_executor_without_heartbeats_is_held_while_it_has_results_and_its_devices_are_assumed() -> None:
    usage = ledger_of(
        result(0, PREEMPTED, {"dedicated": 0.5}, tokens=1),
        result(1, PREEMPTED, {"dedicated": 0.75}, tokens=2, earlier=1),
        result(2, COMPLETED, {"dedicated": 0.75, "serving": 0.25}, tokens=3, earlier=2, worker="lender-0"),
        heartbeat("lender-0", 0.0),
    ).usage(None)
    assert usage.held == [HeldDevices("unknown", 1, 0.5, 2.0)]
    assert usage.assumed_devices == 1
    assert [each.device for each in usage.attempts] == ["unknown", "unknown", "H800"]


def test_executor_that_only_refused_is_not_held() -> None:
    refused = msgspec.structs.replace(result(0, REFUSED, {}, worker="lender-0", started=False), refusal=Refusal.ROOM)
    assert ledger_of(refused).usage(None).held == []


def test_answers_and_steps_of_the_trainer_are_those_of_the_log() -> None:
    outcome = SampleOutcome(
        trajectory_id="g:0", group_id="g", outcome=Outcome.TRAINED, step=3, policy_version=2, recorded_at=9.0
    )
    line = StepLine(
        step=3,
        version=3,
        groups=1,
        groups_filtered=0,
        outcomes={},
        reward_mean=None,
        success_rate=None,
        staleness_mean=None,
        staleness_max=None,
        waiting_seconds=4.0,
        training_seconds=2.0,
        publishing_seconds=1.0,
        checkpoint_seconds=0.5,
        ended_at=9.0,
        devices=8,
    )
    applied = result(0, COMPLETED, {"dedicated": 3.0}, tokens=4)
    usage = ledger_of(applied, outcome, sample_of(applied, success=False)).usage([msgspec.to_builtins(line)])
    assert usage.answers["g:0"] == (Outcome.TRAINED, False, 3, 9.0)
    assert usage.trainer == [TrainerStep(ended_at=9.0, training_seconds=2.0, waiting_seconds=5.5, devices=8)]
