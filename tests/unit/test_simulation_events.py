"""The event queue keeps its order; a histogram of latencies keeps its error; users arrive as their scenario says."""

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.pipeline.simulation.engine import EngineRequest
from rose.pipeline.simulation.events import EventQueue, Stalled
from rose.pipeline.simulation.latency_histogram import LEAST_SECONDS, WIDTH, LatencyHistogram
from rose.pipeline.simulation.scenario import Spike, Users
from rose.pipeline.simulation.users import MINUTE, PEAK_EVERY_SECONDS, Arrivals, least_loaded, mean_length
from tests.support.simulation_fixtures import small_cost


@given(st.lists(st.floats(0.0, 5.0) | st.sampled_from([1.0, 2.0, -3.0]), max_size=30))
def test_events_run_by_time_and_those_of_one_time_in_the_order_of_scheduling(times: list[float]) -> None:
    events, ran = EventQueue(), list[tuple[float, int]]()
    for number, at in enumerate(times):
        events.at(at, lambda number=number: ran.append((events.now, number)))  # type: ignore[misc]
    events.run_until(lambda: len(ran) == len(times), latest=5.0)
    assert ran == sorted((max(0.0, at), number) for number, at in enumerate(times))
    assert events.handled == len(times)


def test_event_of_the_past_runs_now_and_an_infinite_time_never() -> None:
    events, ran = EventQueue(), list[float]()
    events.at(math.inf, lambda: ran.append(math.inf))
    events.at(2.0, lambda: events.at(1.0, lambda: ran.append(events.now)))
    events.repeat(3.0, lambda: ran.append(events.now), first=0.5)
    events.run_until(lambda: len(ran) == 4, latest=10.0)
    assert ran == [0.5, 2.0, 3.5, 6.5]


def test_simulation_without_progress_ends_in_one_sentence() -> None:
    events = EventQueue()
    with pytest.raises(Stalled, match="makes no progress"):
        events.run_until(lambda: False, latest=10.0)
    events.repeat(1.0, lambda: None)
    with pytest.raises(Stalled, match="after 10 simulated seconds"):
        events.run_until(lambda: False, latest=10.0)


@given(st.lists(st.tuples(st.floats(LEAST_SECONDS, 1e4), st.integers(1, 50)), min_size=1, max_size=60))
def test_percentile_is_off_by_at_most_half_of_a_bucket(values: list[tuple[float, int]]) -> None:
    histogram = LatencyHistogram()
    for seconds, weight in values:
        histogram.add(seconds, weight)
    ordered = sorted(seconds for seconds, weight in values for _ in range(weight))
    assert histogram.count == len(ordered) and histogram.mean() == pytest.approx(sum(ordered) / len(ordered))
    for number in range(1, 101):
        exact = ordered[max(0, -(-number * len(ordered) // 100) - 1)]
        assert histogram.percentile(number / 100) == pytest.approx(exact, rel=WIDTH / 2 + 1e-6)


def test_share_that_ends_with_a_bucket_does_not_reach_into_the_next() -> None:
    histogram = LatencyHistogram()
    histogram.add(1.0, 84)
    histogram.add(2.0, 66)
    assert histogram.percentile(0.56) == pytest.approx(1.0, rel=WIDTH)


def test_histogram_without_latencies_is_zero() -> None:
    assert (LatencyHistogram().mean(), LatencyHistogram().percentile(0.99)) == (0.0, 0.0)


USERS = Users(busy=0.5, minute_peak=1.7, second_peak=4.2)
COST = small_cost()
ENGINES = 200


def arrivals(users: Users, seed: int, seconds: int = 2 * PEAK_EVERY_SECONDS) -> tuple[Arrivals, list[EngineRequest]]:
    events, found = EventQueue(), list[EngineRequest]()
    arrivals = Arrivals(users, COST, ENGINES, seed)
    arrivals.start(events, found.append)
    events.run_until(lambda: events.now >= seconds, latest=seconds)
    return arrivals, found


@pytest.mark.parametrize("seed", [0, 1, 4])
def test_largest_minute_and_second_have_the_stated_ratio_to_the_mean(seed: int) -> None:
    rates, found = arrivals(USERS, seed)
    by_second, by_minute = Counter[int](), Counter[int]()
    for each in found:
        by_second[int(each.arrived_at)] += 1
        by_minute[int(each.arrived_at) // MINUTE] += 1
    mean = len(found) / (2 * PEAK_EVERY_SECONDS)
    assert mean == pytest.approx(rates.requests_per_second, rel=0.02)
    assert max(by_minute.values()) / MINUTE / mean == pytest.approx(USERS.minute_peak, rel=0.03)
    assert max(by_second.values()) / mean == pytest.approx(USERS.second_peak, rel=0.15)
    assert [each.arrived_at for each in found] == sorted(each.arrived_at for each in found)


def test_users_of_a_seed_are_the_same_and_of_another_seed_others() -> None:
    first = arrivals(USERS, 3, 60)[1]
    assert first == arrivals(USERS, 3, 60)[1] != arrivals(USERS, 4, 60)[1]


def test_spike_multiplies_the_rate_for_its_time() -> None:
    spike = Spike(at_seconds=10.0, for_seconds=20.0, factor=3.0)
    spiking = Users(busy=0.5, minute_peak=1.0, second_peak=1.0, spikes=(spike,))
    found = Counter(10 <= each.arrived_at < 30 for each in arrivals(spiking, 0, 50)[1])
    assert found[True] / found[False] == pytest.approx(2.0, rel=0.15)


@pytest.mark.parametrize(("median", "spread", "most"), [(1000, 0.9, 16_384), (20_000, 1.5, 16_384), (300, 0.0, 200)])
def test_mean_length_is_that_of_lengths_that_are_cut_off(median: int, spread: float, most: int) -> None:
    draw = random.Random(5)
    drawn = [min(most, median * math.exp(draw.gauss(0.0, spread))) for _ in range(100_000)]
    assert mean_length(median, spread, most) == pytest.approx(math.fsum(drawn) / len(drawn), rel=0.01)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=9), st.integers(0, 50))
def test_user_goes_to_a_server_with_the_fewest_requests_and_none_is_preferred(requests: list[int], turn: int) -> None:
    chosen = {least_loaded(requests, turn + more) for more in range(len(requests))}
    assert chosen == {place for place, many in enumerate(requests) if many == min(requests)}
