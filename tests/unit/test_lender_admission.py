"""Admission: serving's promise holds for every admitted step, and an idle server always lends."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.schemas.errors import UsageError
from rose.workers.executor.ipc.messages import NextWork, WorkKind
from rose.workers.lender.admission import (
    MIN_USEFUL_SHARE,
    SLO,
    STRICT,
    Admission,
    AdmissionDecision,
    ArrivalRate,
    HoldReason,
    OccupancyGuard,
    Promise,
    ServingState,
)

STEP_TOKENS = 512
NOW = 1000.0
EXACT = 1e-6
"""Tolerance of float sums, in seconds."""


def step(seconds: float) -> NextWork:
    return NextWork(WorkKind.STEP, seconds)


def admission(dial: float = SLO, *, ttft: float = 0.5, tpot: float = 0.05, longest: float = 0.02) -> Admission:
    promise = Promise(ttft_seconds=ttft, tpot_seconds=tpot, yield_seconds=longest, dial=dial)
    return Admission(promise, serving_step_tokens=STEP_TOKENS)


def taught(admission: Admission, *, steps: int = 400, held: int = 8) -> Admission:
    """Return a trained admission: serving steps of 2 ms and 0.02 ms a token, guest steps of 4 ms and 0.1 ms a token."""
    for number in range(steps):
        prompt = 200 if number % 10 == 0 else 0
        admission.on_serving_step(
            prompt_tokens=prompt, decoding=held, held=held, seconds=0.002 + 0.00002 * (prompt + held)
        )
        tokens = 1 + number % 64
        admission.guest.observe(tokens, 0.004 + 0.0001 * tokens)
    return admission


seconds = st.floats(1e-6, 1.0)
histories = st.lists(
    st.one_of(
        st.tuples(st.just("served"), st.integers(0, 600), st.integers(0, 64), seconds),
        st.tuples(st.just("ran"), st.integers(0, 600), st.integers(0, 64), seconds),
        st.tuples(st.just("arrived"), st.integers(1, 4000), st.integers(0, 1), seconds),
    ),
    max_size=60,
)
moments = st.builds(
    ServingState,
    prefills=st.lists(st.tuples(st.floats(NOW - 0.4, NOW), st.integers(1, 2000)), max_size=5),
    last_tokens=st.lists(st.floats(NOW - 0.04, NOW), max_size=40),
    waiting=st.sampled_from([0, 0, 0, 2]),
    queued=st.sampled_from([False, False, True]),
)
dials = st.one_of(st.just(STRICT), st.just(1.0), st.floats(0, 1))


def after(history: list[tuple[str, int, int, float]], subject: Admission) -> Admission:
    now = NOW - 10.0
    for what, tokens, held, duration in history:
        now += 10.0 / 60
        if what == "served":
            subject.on_serving_step(prompt_tokens=tokens, decoding=held, held=held + (tokens > 0), seconds=duration)
        elif what == "ran":
            subject.guest.observe(tokens, duration)
            subject.on_guest_run(held=held, seconds=duration)
        else:
            subject.on_arrival(tokens, now)
    return subject


@given(histories, dials, st.floats(0, 10))
def test_idle_serving_always_admits_one_bounded_step(
    history: list[tuple[str, int, int, float]], dial: float, wanted_seconds: float
) -> None:
    subject = after(history, admission(dial))
    answer = subject.admit(ServingState(), step(wanted_seconds), now=NOW)
    assert answer.hold_reason is None and answer.tokens >= 1
    assert answer.seconds == subject.promise.yield_seconds
    assert answer.tokens == 1 or subject.guest.cautious_seconds(answer.tokens) <= answer.seconds + EXACT


@given(histories, moments, st.floats(0, 0.1), st.booleans())
def test_strict_dial_admits_nothing_while_serving_has_work(
    history: list[tuple[str, int, int, float]], serving: ServingState, wanted_seconds: float, well_known: bool
) -> None:
    subject = taught(admission(STRICT)) if well_known else after(history, admission(STRICT))
    answer = subject.admit(serving, step(wanted_seconds), now=NOW)
    if serving.held or serving.waiting or serving.queued:
        assert (answer.seconds, answer.tokens) == (0.0, 0) and answer.hold_reason is not None
    else:
        assert answer.hold_reason is None


@given(moments, dials, st.floats(0, 0.05), st.lists(st.integers(1, 800), max_size=20), st.floats(0.01, 1))
def test_admitted_step_violates_no_predicted_deadline(
    serving: ServingState, dial: float, wanted_seconds: float, prompts: list[int], tpot: float
) -> None:
    subject = taught(admission(dial, tpot=tpot))
    for tokens in prompts:
        subject.on_arrival(tokens, NOW - 0.1)
    answer = subject.admit(serving, step(wanted_seconds), now=NOW)
    assert answer.seconds <= subject.promise.yield_seconds
    if answer.hold_reason is not None:
        assert (answer.seconds, answer.tokens) == (0.0, 0)
        return
    assert not serving.waiting and not serving.queued
    assert answer.tokens == 1 or subject.guest.cautious_seconds(answer.tokens) <= answer.seconds + EXACT
    if not serving.held:
        return
    ends, decoding, cost = NOW + answer.seconds, len(serving.last_tokens), subject.serving
    before = 0
    for arrived, tokens in serving.prefills:
        before += tokens
        assert ends + cost.prefill_seconds(before, decoding) <= arrived + subject.promise.ttft_seconds + EXACT
    newcomers = ArrivalRate()
    for tokens in prompts:
        newcomers.on_arrival(tokens, NOW - 0.1)
    before += newcomers.expected_tokens(subject.promise.yield_seconds, NOW)
    assert answer.seconds + cost.prefill_seconds(before, decoding) <= subject.promise.ttft_seconds + EXACT
    for last in serving.last_tokens:
        assert ends + cost.step_seconds(before, decoding) <= last + subject.promise.tpot_seconds + EXACT


def test_slo_dial_lends_within_the_slack_and_names_the_limit() -> None:
    decoding = ServingState(last_tokens=[NOW] * 8)
    subject = taught(admission())
    answer = subject.admit(decoding, step(0.01), now=NOW)
    assert answer.hold_reason is None and answer.tokens > 10 and answer.decode_headroom is not None

    def hold(serving: ServingState, wanted_seconds: float = 0.01) -> HoldReason | None:
        return subject.admit(serving, step(wanted_seconds), now=NOW).hold_reason

    assert hold(ServingState(last_tokens=[NOW], waiting=1)) is HoldReason.WAITING
    assert hold(ServingState(last_tokens=[NOW], queued=True)) is HoldReason.WAITING
    assert hold(ServingState(last_tokens=[NOW, NOW - 0.049])) is HoldReason.DECODE
    assert hold(ServingState(prefills=[(NOW - 0.499, 100)])) is HoldReason.PREFILL
    subject.on_guest_run(held=8, seconds=0.02)
    assert hold(decoding) is HoldReason.OCCUPANCY


@given(st.integers(1, 40), st.sampled_from(WorkKind), st.floats(0, 1), st.floats(0, 0.001))
def test_never_idle_serving_with_slack_starts_to_lend(
    held: int, work: WorkKind, wanted_seconds: float, after: float
) -> None:
    """Nothing is known of the guest: its build, the staging of its version, and its first step."""
    slo, strict, queued = admission(), admission(STRICT), admission()
    answers = []
    for subject in (slo, strict, queued):
        for number in range(400):
            subject.on_guest_run(held=0, seconds=0.0)
            decoding = 1 + number % held
            seconds = 0.002 + 0.00002 * decoding + after * (number % 2)
            subject.on_serving_step(prompt_tokens=0, decoding=decoding, held=held, seconds=seconds)
        moment = ServingState(last_tokens=[NOW] * held, waiting=int(subject is queued))
        answers.append(subject.admit(moment, NextWork(work, wanted_seconds), now=NOW))
    assert [answer.hold_reason for answer in answers] == [None, HoldReason.OCCUPANCY, HoldReason.WAITING]
    assert (answers[0].tokens > 0) is (work is WorkKind.STEP), (
        "a step that has no price yet is of one token, and asked for"
    )


@pytest.mark.parametrize("work", [WorkKind.STEP, WorkKind.ATOMIC])
def test_never_idle_serving_with_a_budget_below_the_yield_bound_lends_its_slack(
    work: WorkKind,
) -> None:
    subject, now, answers = admission(0.5, tpot=0.018), NOW, list[AdmissionDecision]()
    for _ in range(1000):
        subject.on_serving_step(prompt_tokens=0, decoding=4, held=4, seconds=0.003)
        now += 0.003
        answers.append(subject.admit(ServingState(last_tokens=[now] * 4), NextWork(work, 0.02), now=now))
        if answers[-1].hold_reason is None:
            subject.on_guest_run(held=4, seconds=0.01)
    lent = [answer.seconds for answer in answers if answer.hold_reason is None]
    assert lent and max(lent) < 0.018 - 0.003


@pytest.mark.parametrize("slow", [1.0, 2.5])
def test_guest_of_never_idle_serving_continues_after_first_and_slow_steps(slow: float) -> None:
    """The guest's steps take more than half of the yield bound, and for a while more than all of it."""
    subject, draw, now, lent = admission(0.5, ttft=2.0, tpot=0.3), random.Random(1), NOW, [0, 0, 0]
    for number in range(20_000):
        part = 0 if number < 2000 else 1 if number < 2500 else 2
        seconds = 0.03 * draw.uniform(0.97, 1.03)
        subject.on_serving_step(prompt_tokens=0, decoding=8, held=8, seconds=seconds)
        now += seconds
        wanted_seconds = step(subject.guest.cautious_seconds(16))
        answer = subject.admit(ServingState(last_tokens=[now] * 8), wanted_seconds, now=now)
        if answer.hold_reason is None:
            tokens = min(16, answer.tokens)
            taken = (slow if part == 1 else 1.0) * (0.01 + 0.0002 * tokens) * draw.uniform(0.97, 1.03)
            subject.guest.observe(tokens, taken)
            subject.on_guest_run(held=8, seconds=taken)
            now += taken
            lent[part] += 1
    assert lent[0] > 1000 and lent[2] > 10_000


def test_guest_with_steps_over_the_yield_bound_is_rarely_tried_beside_serving() -> None:
    subject, now, tried = taught(admission(0.5, ttft=2.0, tpot=0.3)), NOW, 0
    for _ in range(200):
        subject.guest.observe(1, 0.05)
    for _ in range(10_000):
        subject.on_serving_step(prompt_tokens=0, decoding=8, held=8, seconds=0.03)
        now += 0.03
        if subject.admit(ServingState(last_tokens=[now] * 8), step(0.05), now=now).hold_reason is None:
            subject.guest.observe(1, 0.05)
            subject.on_guest_run(held=8, seconds=0.05)
            tried += 1
    assert 1 <= tried <= 12


@pytest.mark.parametrize(
    ("budgets", "reason"), [({"ttft": 0.03}, HoldReason.PREFILL), ({"tpot": 0.012}, HoldReason.DECODE)]
)
def test_expected_prompt_arrivals_reduce_the_slack(budgets: dict[str, float], reason: HoldReason) -> None:
    """The held requests alone would miss no deadline."""
    decoding = ServingState(last_tokens=[NOW] * 8)
    subject = taught(admission(1.0, **budgets))
    assert subject.admit(decoding, step(0.005), now=NOW).hold_reason is None
    for number in range(50):
        subject.on_arrival(500, NOW - 0.5 + number / 100)
    assert subject.admit(decoding, step(0.005), now=NOW).hold_reason is reason


def test_slack_below_the_fixed_cost_admits_nothing() -> None:
    late = ServingState(last_tokens=[NOW - 0.04] * 8)
    subject = taught(admission(1.0))
    headroom = subject.admit(late, step(0.0), now=NOW).decode_headroom
    assert headroom is not None
    assert subject.admit(late, step(0.99 * headroom / MIN_USEFUL_SHARE), now=NOW).hold_reason is None
    assert subject.admit(late, step(1.01 * headroom / MIN_USEFUL_SHARE), now=NOW).hold_reason is HoldReason.DECODE
    assert subject.admit(late, NextWork(WorkKind.ATOMIC, 0.99 * headroom), now=NOW).hold_reason is None
    assert subject.admit(late, NextWork(WorkKind.ATOMIC, 1.01 * headroom), now=NOW).hold_reason is HoldReason.DECODE


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 200), st.integers(1, 40))
def test_higher_dial_never_admits_less(low: float, high: float, steps: int, held: int) -> None:
    low, high = sorted((low, high))
    moment = ServingState(last_tokens=[NOW] * held)
    less, more = (
        taught(admission(dial), steps=steps, held=held).admit(moment, step(0.004), now=NOW) for dial in (low, high)
    )
    assert less.seconds <= more.seconds


@given(
    st.floats(0, 0.95),
    st.lists(st.tuples(st.integers(1, 50), st.floats(0, 0.01), st.floats(0, 1), st.booleans()), max_size=100),
)
def test_guest_occupancy_stays_within_the_credit_of_serving_steps(
    dial: float, history: list[tuple[int, float, float, bool]]
) -> None:
    """The bound holds over any part of a history: requests x seconds of guests against those of serving's fixed
    cost."""
    longest = 0.02
    guard, earned, spent = OccupancyGuard(dial=dial, longest_seconds=longest), 0.0, 0.0
    most = 0.0
    """Credit that guests may have spent by now, by the tightest part of the history so far."""
    for held, fixed, share, wants in history:
        guard.on_serving_step(held, fixed)
        earned += held * fixed * dial / (1 - dial)
        if wants and guard.available_seconds(held) > 0:
            spend = min(guard.available_seconds(held), longest) * share
            guard.on_guest_run(held, spend)
            spent += held * spend
        most = min(most, spent - earned + held * longest)
        assert spent - earned <= most + EXACT


@pytest.mark.parametrize("after", [0.0, 0.001], ids=["warm", "cold"])
@pytest.mark.parametrize("every", [2, 6])
def test_delay_of_the_next_serving_step_is_charged_to_the_guest(after: float, every: int) -> None:
    """Steps take 2 ms and 0.1 ms a token. Before some steps the guest has computed, and these take longer."""
    subject, draw, fixed, guests = admission(), random.Random(3), 0.0, 0.0
    for number in range(4000):
        held, guest = draw.randint(1, 20), number % every == 0
        if guest:
            taken = max(0.0, min(subject._occupancy.available_seconds(held), 0.02))
            subject.on_guest_run(held=held, seconds=taken)
        seconds = (0.002 + 0.0001 * held) * draw.uniform(0.95, 1.05) + after * guest
        subject.on_serving_step(prompt_tokens=0, decoding=held, held=held, seconds=seconds)
        if number >= 2000:
            fixed += held * 0.002
            guests += held * (taken + after) if guest else 0.0
    assert subject.serving.decode.seconds(10) == pytest.approx(0.003, rel=0.05)
    assert subject.serving.after_guest_seconds == pytest.approx(after, abs=0.0002)
    assert guests < 1.05 * fixed


def test_never_idle_serving_lends_again_after_a_process_halt_in_a_guest_step() -> None:
    subject, now, steps = taught(admission()), NOW, 0
    subject.on_guest_run(held=8, seconds=600.0)
    while steps < 20_000:
        subject.on_serving_step(prompt_tokens=0, decoding=8, held=8, seconds=0.002)
        now, steps = now + 0.002, steps + 1
        if subject.admit(ServingState(last_tokens=[now] * 8), step(0.005), now=now).hold_reason is None:
            break
    assert 1000 < steps < 10_000, "a second of it is paid for, as a guest's own long step would be"


def test_never_idle_serving_lends_again_after_a_slow_period() -> None:
    """Serving steps take 30 ms, and twice as long while another process uses the machine, which is not the guest's
    delay."""
    subject, draw, now, lent = taught(admission(0.5, ttft=2.0, tpot=0.3)), random.Random(1), NOW, 0
    for number in range(10_000):
        seconds = (0.06 if 2000 <= number < 4000 else 0.03) * draw.uniform(0.97, 1.03)
        subject.on_serving_step(prompt_tokens=0, decoding=8, held=8, seconds=seconds)
        now += seconds
        if subject.admit(ServingState(last_tokens=[now] * 8), step(0.008), now=now).hold_reason is None:
            subject.on_guest_run(held=8, seconds=0.006)
            now += 0.006
            lent += number >= 9000
    assert lent > 900 and subject.serving.after_guest_seconds < 0.002


def test_unused_credit_does_not_accumulate() -> None:
    guard = OccupancyGuard(dial=0.5, longest_seconds=0.02)
    for _ in range(1000):
        guard.on_serving_step(10, 0.002)
    assert guard.available_seconds(10) == pytest.approx(0.02)
    guard.on_guest_run(10, 0.02)
    assert guard.available_seconds(10) == pytest.approx(0.0)


@pytest.mark.parametrize("wrong", [{"dial": -0.1}, {"dial": 1.1}, {"ttft": 0.0}, {"tpot": math.inf}, {"longest": 0.6}])
def test_impossible_promise_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        admission(**wrong)
