"""The cost of a run: every device second has one fate, one class and one step."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.pipeline.accounting.cost import (
    Answer,
    Attempt,
    CostReport,
    Fate,
    HeldDevices,
    TrainerStep,
    Usage,
    cost_of,
    fate_of,
)
from rose.pipeline.accounting.prices import HOUR_SECONDS, DeviceClass, Prices
from rose.schemas.samples import Outcome

PRICES = Prices(currency="USD", dedicated=2.0, borrowed=1.0, trainer=4.0, dedicated_by_device={"H20": 0.5})
SECONDS = st.floats(0, 1e6)
NAMES = [f"g:{number}" for number in range(6)]
DEVICES = st.sampled_from(["H800", "H20"])
LENDING = st.sampled_from([DeviceClass.DEDICATED, DeviceClass.BORROWED])


@st.composite
def usages(draw: st.DrawFn) -> Usage:
    attempts = st.builds(Attempt, st.sampled_from(NAMES), LENDING, DEVICES, SECONDS, st.booleans(), SECONDS)
    answers = st.builds(
        Answer, st.sampled_from(Outcome), st.none() | st.booleans(), st.integers(1, 4), st.floats(0, 1e6)
    )
    spans = st.tuples(SECONDS, SECONDS).map(sorted)
    held = st.builds(lambda device, count, span: HeldDevices(device, count, *span), DEVICES, st.integers(1, 8), spans)
    trainer = st.builds(TrainerStep, SECONDS, SECONDS, SECONDS, st.integers(1, 8))
    return Usage(
        attempts=draw(st.lists(attempts, max_size=20)),
        answers=draw(st.dictionaries(st.sampled_from(NAMES), answers)),
        held=draw(st.lists(held, max_size=5)),
        trainer=draw(st.none() | st.lists(trainer, max_size=5)),
        unknown_attempts=draw(st.integers(0, 3)),
    )


def seconds_of(report: CostReport, fate: Fate) -> float:
    return sum(line.device_seconds for line in report.lines if line.fate == fate.value)


@given(usages())
def test_all_device_time_is_counted_once_by_fate_and_once_by_step(usage: Usage) -> None:
    report = cost_of(usage, PRICES)
    work = sum(attempt.device_seconds for attempt in usage.attempts)
    trained = sum(each.devices * (each.training_seconds + each.waiting_seconds) for each in usage.trainer or ())
    idle = seconds_of(report, Fate.IDLE)
    assert report.device_seconds == pytest.approx(work + idle + trained)
    assert sum(step.device_seconds for step in report.steps) == pytest.approx(report.device_seconds)
    assert sum(step.cost or 0.0 for step in report.steps) == pytest.approx(report.cost)
    assert sum(line.attempts for line in report.lines) == len(usage.attempts)
    assert sum(step.correct for step in report.steps) == report.correct
    assert sum(step.trained for step in report.steps) == report.trained


def test_device_that_was_held_for_no_time_to_speak_of_costs_the_time_of_its_attempts() -> None:
    attempt = Attempt("g:0", DeviceClass.DEDICATED, "H800", 2.0, True, 1.0)
    report = cost_of(Usage([attempt], {}, [HeldDevices("H800", 1, 0.0, 1e-308)], None), PRICES)
    assert report.device_seconds == sum(step.device_seconds for step in report.steps) == 2.0


@given(usages())
def test_dedicated_device_costs_for_the_whole_time_that_it_is_held(usage: Usage) -> None:
    report = cost_of(usage, PRICES)
    for device in ("H800", "H20"):
        held = sum(each.devices * (each.end - each.begin) for each in usage.held if each.device == device)
        dedicated = [line for line in report.lines if (line.device_class, line.device) == ("dedicated", device)]
        busy = sum(line.device_seconds for line in dedicated if line.fate != Fate.IDLE.value)
        assert sum(line.device_seconds for line in dedicated) == pytest.approx(max(held, busy))


@given(usages())
def test_device_time_by_fate_is_that_of_the_attempts_of_the_fate(usage: Usage) -> None:
    report = cost_of(usage, Prices())
    for fate in set(Fate) - {Fate.IDLE, Fate.TRAINING, Fate.WAITING}:
        own = [each.device_seconds for each in usage.attempts if fate_of(each, usage.answers) is fate]
        assert seconds_of(report, fate) == pytest.approx(sum(own))
    assert report.cost is None and {step.cost for step in report.steps} <= {None}


def test_example_of_the_module() -> None:
    hour = HOUR_SECONDS
    report = cost_of(
        Usage(
            attempts=[
                Attempt("g:0", DeviceClass.DEDICATED, "H800", 6 * hour, True, 6 * hour),
                Attempt("g:1", DeviceClass.DEDICATED, "H800", 1 * hour, True, 7 * hour),
                Attempt("g:0", DeviceClass.BORROWED, "H800", 1 * hour, False, 1 * hour),
                Attempt("g:0", DeviceClass.BORROWED, "H800", 2 * hour, True, 3 * hour),
            ],
            answers={
                "g:0": Answer(Outcome.TRAINED, True, 1, 8 * hour),
                "g:1": Answer(Outcome.STALE, True, 1, 8 * hour),
            },
            held=[HeldDevices("H800", 1, 0.0, 10 * hour)],
            trainer=None,
            unknown_attempts=3,
        ),
        PRICES,
    )
    costs = {(line.device_class, line.fate): line.cost for line in report.lines}
    assert costs == pytest.approx(
        {
            ("dedicated", "correct"): 12.0,
            ("dedicated", "stale"): 2.0,
            ("dedicated", "idle"): 6.0,
            ("borrowed", "correct"): 2.0,
            ("borrowed", "lost"): 1.0,
        }
    )
    assert (report.cost, report.cost_per_correct, report.cost_per_trained) == pytest.approx((23.0, 23.0, 23.0))
    assert (report.correct, report.trained, report.unknown_attempts, report.trainer_known) == (1, 1, 3, False)
    # The device is held for two hours after the only step has ended.
    assert [(step.step, step.cost) for step in report.steps] == [(1, pytest.approx(19.0)), (None, pytest.approx(4.0))]


def test_filtered_answer_is_correct_and_an_unjudged_one_is_counted_apart() -> None:
    answers = {
        "g:0": Answer(Outcome.FILTERED, True, 1, 1.0),
        "g:1": Answer(Outcome.TRAINED, None, 1, 1.0),
        "g:2": Answer(Outcome.SUPERSEDED, True, 1, 1.0),
    }
    report = cost_of(Usage([], answers, [], []), PRICES)
    assert (report.correct, report.trained, report.unjudged) == (1, 1, 1)


@pytest.mark.parametrize("outcome", [Outcome.EVALUATED, Outcome.INFRA_FAILED])
def test_step_ends_when_the_trainer_settles_it_whenever_evaluations_of_its_version_do(outcome: Outcome) -> None:
    held = [HeldDevices("H800", 1, 0.0, 300.0)]
    trained = {f"g{step}:0": Answer(Outcome.TRAINED, True, step, 100.0 * step) for step in (1, 2, 3)}
    evaluated = {
        f"evaluation:held-out:5f3a91c0:{version}:0:0:0": Answer(outcome, True, version, at)
        for version, at in ((0, 50.0), (1, 250.0), (3, 400.0))
    }
    steps = cost_of(Usage([], trained | evaluated, held, None), PRICES).steps
    assert [(each.step, each.device_seconds, each.correct) for each in steps] == [(1, 100, 1), (2, 100, 1), (3, 100, 1)]


def test_price_of_a_device_by_name_replaces_that_of_its_class() -> None:
    held = [HeldDevices("H20", 2, 0.0, HOUR_SECONDS), HeldDevices("H800", 1, 0.0, HOUR_SECONDS)]
    report = cost_of(Usage([], {}, held, [TrainerStep(10.0, 900.0, 900.0, 2)]), PRICES)
    assert {(line.device, line.fate): line.cost for line in report.lines} == pytest.approx(
        {("H20", "idle"): 1.0, ("H800", "idle"): 2.0, ("", "training"): 2.0, ("", "waiting"): 2.0}
    )


def test_report_in_json_has_no_infinite_number_without_answers() -> None:
    report = cost_of(Usage([], {}, [], None), PRICES)
    assert (report.cost, report.cost_per_correct, report.device_seconds_per_correct) == (0.0, None, None)
    assert msgspec.json.decode(msgspec.json.encode(report), type=CostReport) == report
