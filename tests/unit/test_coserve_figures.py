"""Figures that the co-serving benchmark derives from its windows."""

import math
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.check import Check
from bench.coserve import in_rotation, run_rounds
from bench.coserving.arms import ALONE, ARMS, Arm, Promise
from bench.coserving.clients import RolloutResult
from bench.coserving.curve import draw
from bench.coserving.figures import attainment, covered, harvest, latency, ratio, summary
from bench.coserving.pace import LEAST, MOST, PaceError, search
from bench.coserving.results import checks, published_ratios, standings, worst
from bench.coserving.server import Server, ServerError
from bench.coserving.windows import Budgets, Window, busy, figures, flaw, late
from bench.percentiles import percentile
from rose.workers.loadgen.requests import StreamedCompletion

times = st.lists(st.floats(0, 100), min_size=1, max_size=50)
BUDGETS = Budgets(ttft=0.1, tpot=0.02)


@given(times, st.floats(0, 100))
def test_percentile_is_the_smallest_sufficient_measured_value(values: list[float], percent: float) -> None:
    found = percentile(values, percent)
    assert found in values
    assert sum(value <= found for value in values) >= percent / 100 * len(values) - 1e-9
    assert sum(value < found for value in values) < max(1, percent / 100 * len(values))


def test_empty_window_has_no_percentile_and_keeps_every_budget() -> None:
    assert math.isnan(percentile([], 99))
    assert attainment([], 1.0, failed=0) == 1.0


def test_failed_request_misses_every_budget() -> None:
    assert attainment([0.1, 0.3], 0.2, failed=2) == 0.25


def test_time_per_token_is_the_mean_after_the_first() -> None:
    found = latency(10.0, [10.5, 10.6, 10.9], [1, 1, 3])
    assert (found.ttft, found.tpot) == (0.5, pytest.approx(0.1))
    assert latency(10.0, [10.5], [1]).tpot is None


def test_overlapping_intervals_are_counted_once() -> None:
    assert covered([(5, 7), (1, 3), (2, 4), (2, 3), (9, 99), (-5, 0.5)], 0, 10) == pytest.approx(0.65)


@given(st.lists(st.tuples(st.floats(-5, 15), st.floats(-5, 15)), max_size=20))
def test_share_lies_between_0_and_1(intervals: list[tuple[float, float]]) -> None:
    assert 0 <= covered(intervals, 0, 10) <= 1 + 1e-9


def test_summary_omits_unmeasured_values() -> None:
    found = summary([3.0, math.nan, 1.0, 2.0])
    assert (found.median, found.low, found.high, found.windows) == (2.0, 1.0, 3.0, 3)
    assert summary([math.nan]).windows == 0


@pytest.mark.parametrize(
    ("arm", "resolved"), [(1.05, False), (1.11, True), (0.95, False), (0.85, True), (math.nan, False)]
)
def test_margin_within_the_noise_of_serving_alone_is_unresolved(arm: float, resolved: bool) -> None:
    assert ratio(arm, 1.0, 0.9).resolved is resolved
    assert not ratio(arm, 1.0, math.nan).resolved
    assert math.isnan(ratio(arm, 0.0, 0.0).value)


def test_harvest_is_relative_to_the_time_that_serving_leaves() -> None:
    assert harvest(300, 500, 0.25) == pytest.approx(0.8)
    assert math.isnan(harvest(1, 500, 1.0))


@pytest.mark.parametrize("busy_of", [lambda held: 1 - math.exp(-held), lambda held: min(1.0, held)])
@given(service=st.floats(0.01, 20), held=st.floats(0.05, 2))
def test_request_rate_is_found_if_the_busy_share_grows_with_it(
    busy_of: Callable[[float], float], service: float, held: float
) -> None:
    request_rate = search(lambda request_rate: busy_of(request_rate * service), held / service)
    assert LEAST <= busy_of(request_rate * service) <= MOST


def test_search_ends_if_no_request_rate_fits() -> None:
    with pytest.raises(PaceError, match="give one"):
        search(lambda request_rate: 0.9, 1.0)


def answer(due: float, wait: float, *, tokens: int = 5, gap: float = 0.01, error: str = "") -> StreamedCompletion:
    moments = [due + wait + gap * i for i in range(tokens)]
    return StreamedCompletion(
        due=due,
        sent=due,
        prompt_tokens=64,
        tokens=tokens,
        moments=moments,
        counts=[1] * tokens,
        cached_tokens=32,
        queue_seconds=wait / 2,
        prefill_seconds=wait / 4,
        decode_seconds=gap * (tokens - 1),
        error=error,
    )


def window(arm: str, number: int, wait: float, *, thrown: str = "", guests: int = 0) -> Window:
    """Return a window of ten seconds with one request each. Guests get the given tokens each second, before and after
    the window too."""
    seconds = [100.5 + i for i in range(-3, 13)] if guests else []
    return Window(
        arm=arm,
        round=number,
        start=100.0,
        seconds=10.0,
        answers=[answer(100.0 + i, wait) for i in range(10)],
        ticks=[0.001] * 100,
        rolled=RolloutResult(seconds, [guests] * len(seconds), []),
        server={"vllm:num_preemptions": 2.0},
        thrown=thrown,
    )


def test_window_has_the_expected_figures() -> None:
    found = figures(window("cap", 0, 0.04, guests=50), BUDGETS)
    assert found["ttft_p50_ms"] == pytest.approx(40)
    assert found["tpot_p99_ms"] == pytest.approx(10)
    assert found["gap_p99_ms"] == pytest.approx(10)
    assert (found["ttft_attainment"], found["tpot_attainment"]) == (1.0, 1.0)
    assert found["serving_tokens_per_second"] == pytest.approx(5)
    assert found["guest_tokens_per_second"] == pytest.approx(50), "those that came within the window, no others"
    assert found["busy"] == pytest.approx(0.07), "the engine's own time: three quarters of the wait, and the decode"
    assert found["prefix_hit_rate"] == 0.5
    assert found["preemptions"] == 2


def test_burst_bound_includes_the_wait_for_a_guest_step() -> None:
    """vLLM starts to count the queue time of a request when its loop accepts the request, which is after the guest's
    step."""
    alone, strict = window("alone", 0, 0.04), window("strict", 0, 0.04)
    held_up = [msgspec.structs.replace(each, moments=[at + 0.03 for at in each.moments]) for each in strict.answers]
    arms = [arm for arm in ARMS if arm.name in ("alone", "strict")]
    found = checks(arms, standings(arms, [alone, replace(strict, answers=held_up)], BUDGETS))
    [burst] = [check for check in found if check.name == "burst_to_yield"]
    assert burst.value == pytest.approx(30) and not burst.met


def test_longest_guest_piece_is_the_maximum_of_all_windows() -> None:
    windows = [window("strict", number, 0.04, guests=5) for number in range(3)]
    for each, longest in zip(windows, (0.01, 0.01, 0.5), strict=True):
        each.rolled.longest_seconds = [0.001, longest]
    arms = [arm for arm in ARMS if arm.name == "strict"]
    [found] = [check for check in checks(arms, standings(arms, windows, BUDGETS)) if check.name == "yield"]
    assert found.value == pytest.approx(500) and not found.met


def promised(names: Sequence[str], windows: Sequence[Window]) -> dict[str, Check]:
    arms = [arm for arm in ARMS if arm.name in names]
    return {check.name: check for check in checks(arms, standings(arms, windows, BUDGETS))}


def test_arm_that_was_not_requested_breaks_no_promise() -> None:
    alone, strict = window("alone", 0, 0.04), window("strict", 0, 0.04, guests=5)
    assert "harvest" not in promised(["alone", "strict"], [alone, strict])
    assert "ttft" not in promised(["strict"], [strict])
    guest = window("guest", 0, 0.04, guests=9)
    assert not math.isnan(promised(["alone", "guest", "strict"], [alone, guest, strict])["harvest"].value)


def test_missing_requested_arm_is_a_broken_promise() -> None:
    alone, strict, slo = (window(name, 0, 0.04, guests=5) for name in ("alone", "strict", "slo"))
    guest = window("guest", 0, 0.04, guests=9, thrown="late")
    assert not promised(["alone", "guest", "strict"], [alone, guest, strict])["harvest"].met
    assert not promised(["alone", "strict"], [window("alone", 0, 0.04, thrown="late"), strict])["ttft"].met
    never_ran = window("strict", 0, 0.04, guests=0)
    never_ran.rolled.longest_seconds = []
    assert not promised(["alone", "strict"], [alone, never_ran])["yield"].met
    assert not promised(["alone", "strict", "slo"], [alone, never_ran, slo])["slo_harvest"].met


def test_serving_without_prefix_hits_loses_no_prefix_hits() -> None:
    alone, strict = (window(name, 0, 0.04, guests=5) for name in ("alone", "strict"))
    assert "prefix_hits" in promised(["alone", "strict"], [alone, strict])
    found_none = replace(alone, answers=[msgspec.structs.replace(each, cached_tokens=0) for each in alone.answers])
    assert "prefix_hits" not in promised(["alone", "strict"], [found_none, strict])


def test_failed_request_counts_in_no_latency() -> None:
    some = window("alone", 0, 0.04)
    broken = Window(
        "alone", 0, 100.0, 10.0, [*some.answers, answer(109.5, 60.0, error="gone")], [], some.rolled, some.server
    )
    found = figures(broken, BUDGETS)
    assert found["failed"] == 1
    assert found["ttft_p99_ms"] == pytest.approx(40)
    assert found["ttft_attainment"] == pytest.approx(10 / 11)


def test_failed_request_breaks_a_promise_without_moving_a_percentile() -> None:
    alone, strict = window("alone", 0, 0.04), window("strict", 0, 0.04)
    failing = replace(strict, answers=[*strict.answers, answer(109.5, 60.0, error="gone")])
    arms = [arm for arm in ARMS if arm.name in ("alone", "strict")]
    found = {check.name: check for check in checks(arms, standings(arms, [alone, strict, failing], BUDGETS))}
    assert found["ttft"].met and found["tpot"].met
    assert found["failed"].value == 1 and not found["failed"].met


@pytest.mark.parametrize("arms", [("guest",), ("alone", "guest", "strict")])
def test_chart_is_drawn_for_any_measurement(arms: tuple[str, ...], tmp_path: Path) -> None:
    alone = replace(window("guest", 0, 0.04, guests=70), answers=[])
    windows = [window("alone", 0, 0.04), alone, window("strict", 0, 0.05, guests=60)]
    chosen = [arm for arm in ARMS if arm.name in arms]
    draw(standings(chosen, windows, BUDGETS), tmp_path / "curve.html")
    assert ('"text":["strict"]' in (tmp_path / "curve.html").read_text()) is ("strict" in arms)


def test_window_without_users_has_only_guests() -> None:
    some = window("rollouts", 0, 0.04, guests=50)
    found = figures(Window("rollouts", 0, 100.0, 10.0, [], [], some.rolled, some.server), BUDGETS)
    assert found["guest_tokens_per_second"] == pytest.approx(50)
    assert math.isnan(found["ttft_p99_ms"])
    assert found["busy"] == 0


def test_client_lateness_is_the_larger_of_requests_and_timer() -> None:
    some = window("alone", 0, 0.04)
    assert late(some) == 0.001
    behind = [StreamedCompletion(due=1.0, sent=1.5, prompt_tokens=1)]
    assert late(Window("alone", 0, 0.0, 2.0, behind, [0.001] * 999, some.rolled, some.server)) == 0.5


def test_rejected_window_has_a_reason() -> None:
    def flaw_of(some: Window, *, guests: bool = False, made: int = 50) -> str:
        counters = {"vllm:generation_tokens": float(made)}
        return flaw(replace(some, server=counters), guests=guests, most_late=0.01)

    some = window("alone", 0, 0.04)
    assert flaw_of(some) == ""
    assert "500.0 ms late" in flaw_of(replace(some, ticks=[0.5]))
    assert "made 51 tokens, its clients got 50" in flaw_of(some, made=51)
    assert flaw_of(some, made=51, guests=True) == ""
    refused = replace(some, rolled=RolloutResult([], [], ["status 400", "status 500"]))
    assert flaw_of(refused, guests=True) == "a rollout failed: status 400"


def test_ended_server_is_reported_with_its_last_log_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("a\nno such flag\n\n")
    process = subprocess.Popen(["false"])
    process.wait()
    with pytest.raises(ServerError, match="status 1: no such flag"):
        Server("http://127.0.0.1:1", process, log).check()


def run_of(again: float) -> list[Window]:
    windows = []
    for number in range(3):
        windows += [
            window("alone", number, 0.04),
            window("again", number, 0.04 * again),
            window("rollouts", number, 0.04, guests=100),
            window("cap", number, 0.05, guests=60),
        ]
    return [*windows, window("alone", 3, 9.0, thrown="late")]


def test_comparison_is_with_serving_alone_and_omits_discarded_windows() -> None:
    found = standings(ARMS, run_of(1.3), BUDGETS)
    assert set(found) == {"alone", "again", "rollouts", "cap"}
    assert (found["alone"].windows, found["alone"].thrown, found["cap"].thrown) == (3, 1, 0)
    assert found["alone"].value("ttft_p99_ms") == pytest.approx(40)
    assert not found["alone"].ratios
    assert found["cap"].value("ttft_p99_ms_ratio") == pytest.approx(1.25)
    assert not found["cap"].ratios["ttft_p99_ms"].resolved
    assert standings(ARMS, run_of(1.1), BUDGETS)["cap"].ratios["ttft_p99_ms"].resolved
    assert found["cap"].harvest == pytest.approx(0.6 / (1 - busy(window("alone", 0, 0.04))))
    assert math.isnan(found["alone"].harvest)


def test_checked_promise_tells_whether_its_margin_is_resolved() -> None:
    promise = Promise("ttft", "ttft_p99_ms_ratio", 1.1, "max", "serving alone")
    arms = [Arm(ALONE), Arm("again"), Arm("cap", promises=(promise,)), Arm("absent", promises=(promise,))]
    enough, found = checks(arms, standings(arms, run_of(1.1), BUDGETS))
    assert (enough.name, enough.value, enough.details) == ("requests", 0, {"arm": "absent"})
    assert checks(arms[:3], standings(arms, run_of(1.1), BUDGETS))[0].value == 30
    assert (found.name, found.value, found.met) == ("ttft", 1.25, False)
    assert found.details["margin"] == "resolved"


def test_published_llm_d_figures_are_compared_as_ratios() -> None:
    best = published_ratios()["llm-d: cap"]
    assert (best["ttft_p99_ms"], best["gap_p99_ms"]) == (pytest.approx(2.16, abs=0.01), pytest.approx(2.42, abs=0.01))


def test_worst_window_attributes_its_wait() -> None:
    rows = worst(run_of(1.1))
    assert {row["arm"] for row in rows} == {"alone", "again", "rollouts", "cap"}
    row = rows[0]
    assert row["ttft"] == pytest.approx(40)
    assert (row["queue"], row["prefill"], row["outside"]) == (pytest.approx(20), pytest.approx(10), pytest.approx(10))


def test_every_round_has_every_arm_and_rotates_the_first() -> None:
    assert {in_rotation(ARMS, number)[0].name for number in range(len(ARMS))} == {arm.name for arm in ARMS}
    assert all(set(in_rotation(ARMS, number)) == set(ARMS) for number in range(9))
    there, back = in_rotation(ARMS, 0), in_rotation(ARMS, 1)
    assert not {*pairwise(there)} & {*pairwise(back)}, "no arm always follows the same one"


def test_discarded_window_is_repeated_and_reported() -> None:
    arms, counters, tries = [Arm("alone"), Arm("cap")], list[str](), iter(["late", "", "", "late", "late", "late", ""])

    def run(arm: Arm, number: int) -> Window:
        return window(arm.name, number, 0.04, thrown=next(tries))

    windows = run_rounds(arms, 2, run, counters.append)
    assert [(each.arm, each.round, each.thrown) for each in windows] == [
        ("alone", 0, "late"),
        ("alone", 0, ""),
        ("cap", 0, ""),
        ("cap", 1, "late"),
        ("cap", 1, "late"),
        ("cap", 1, "late"),
        ("alone", 1, ""),
    ]
    assert len(counters) == 4
