"""The engine in closed form equals an engine that computes one step after the other, whatever happens to it."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.pipeline.simulation.engine import Engine, EngineRequest, EngineResult
from rose.pipeline.simulation.prefix_cache import Segment
from tests.support.simulation_fixtures import BLOCK, NaiveEngine, small_cost

KV_TOKENS = 400
COST = small_cost(KV_TOKENS)
STEP = COST.step_seconds(decoding=1, context_tokens=100)

SHARED: tuple[tuple[Segment, ...], ...] = (
    (),
    (Segment("system prompt", BLOCK),),
    (Segment("system prompt", BLOCK), Segment("task", 2 * BLOCK)),
    (Segment("another prompt", 3 * BLOCK),),
)

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "add", "abort", "pause", "resume", "drop"]),
        st.floats(0.0, 30.0),  # time since the action before, in steps
        st.integers(0, 5),  # number of the own segment, or of the request to abort
        st.integers(0, 3),  # which shared segments come before
        st.integers(1, 150),  # tokens of the own segment
        st.integers(1, 60),  # tokens to sample
    ),
    max_size=25,
)


class Both:
    """Does the same to the engine and to the naive engine, and compares them."""

    def __init__(self, max_running: int, step_tokens: int) -> None:
        self.engine = Engine(COST, max_running=max_running, step_tokens=step_tokens, kv_tokens=KV_TOKENS)
        self.naive = NaiveEngine(COST, max_running, step_tokens, KV_TOKENS)
        self.results: list[EngineResult] = []
        self.added: list[str] = []

    def advance(self, now: float) -> None:
        ended = self.engine.advance(now)
        expected = self.naive.advance(now)
        assert {each.request.name for each in ended} == {each.request.name for each in expected}
        by_name = {each.request.name: each for each in expected}
        for each in ended:
            assert each.sampled_tokens == each.request.new_tokens
            self.same(each, by_name[each.request.name])
        assert self.engine.held_tokens + self.engine.cache.tokens - self.engine.cache.used_tokens <= KV_TOKENS
        assert self.engine.held_tokens <= self.engine.kv_tokens
        assert self.engine.preempted == self.naive.preempted

    def same(self, result: EngineResult, expected: EngineResult) -> None:
        assert result.request is expected.request
        assert (result.sampled_tokens, result.cached_tokens) == (expected.sampled_tokens, expected.cached_tokens)
        times = (result.scheduled_at, result.first_token_at, result.finished_at, result.device_seconds)
        expected_times = (
            expected.scheduled_at,
            expected.first_token_at,
            expected.finished_at,
            expected.device_seconds,
        )
        assert times == pytest.approx(expected_times, abs=1e-6)
        self.results.append(result)

    def act(self, action: tuple[Any, ...], now: float) -> None:
        what, _, number, shared, tokens, new = action
        engine, naive = self.engine, self.naive
        if what == "add":
            name = f"request {len(self.added)}"
            segments = SHARED[shared]
            # a segment that belongs to one request has one request at a time
            busy = {run.request.segments[-1].name for run in (*naive.running, *naive.waiting)}
            own = f"own {number} after {shared}"
            request = EngineRequest(name, (*segments, Segment(name if own in busy else own, tokens)), new, now)
            engine.add(request, now)
            naive.add(request, now)
            self.added.append(name)
        elif what == "abort" and engine.requests:
            name = engine.names()[number % engine.requests]
            self.same(engine.abort(name, now), naive.abort(name, now))
        elif what == "pause" and not engine.paused:
            engine.pause(now)
            naive.pause(now)
        elif what == "resume" and engine.paused:
            engine.resume(now)
            naive.resume(now)
        elif what == "drop":
            engine.drop_cache()
            naive.drop_cache()


@settings(max_examples=400, deadline=None)
@given(ACTIONS, st.integers(1, 6), st.sampled_from([7, 16, 64, 1000]))
def test_engine_in_closed_form_equals_an_engine_that_computes_each_step(
    actions: list[tuple[Any, ...]], max_running: int, step_tokens: int
) -> None:
    both, now = Both(max_running, max(step_tokens, max_running + 1)), 0.0
    for action in actions:
        now += action[1] * STEP
        both.advance(now)
        both.act(action, now)
    if both.engine.paused:
        both.act(("resume", 0, 0, 0, 0, 0), now)
    while both.engine.requests:
        assert both.engine.next_at < math.inf, "an engine with requests goes on"
        both.advance(both.engine.next_at)
    assert sorted(each.request.name for each in both.results) == sorted(both.added), "each request left once"
    both.advance(both.engine.next_at if both.engine.plan.steps else now)
    assert both.engine.busy_seconds == pytest.approx(both.naive.busy_seconds, abs=1e-6)
    charged = sum(each.device_seconds for each in both.results)
    assert charged + both.naive.lost_seconds == pytest.approx(both.engine.busy_seconds, abs=1e-6)
    assert both.engine.held_tokens == 0


def request(name: str, tokens: int, new: int, *shared: Segment, at: float = 0.0) -> EngineRequest:
    return EngineRequest(name, (*shared, Segment(name, tokens)), new, at)


def drained(engine: Engine) -> list[EngineResult]:
    results: list[EngineResult] = []
    while engine.requests:
        results += engine.advance(engine.next_at)
    return results


def engine_of(kv_tokens: int = KV_TOKENS) -> Engine:
    return Engine(COST, max_running=8, step_tokens=64, kv_tokens=kv_tokens)


@settings(max_examples=50, deadline=None)
@given(st.floats(0.001, 2.0), st.floats(0.001, 100.0))
def test_pause_shifts_what_comes_later_by_exactly_its_length(at: float, length: float) -> None:
    runs = []
    for pause in (0.0, length):
        engine = engine_of()
        for number in range(4):
            engine.add(request(f"request {number}", 60, 50), 0.0)
        ended = engine.advance(at)
        engine.pause(at)
        assert engine.next_at == math.inf and engine.advance(at + pause) == []
        engine.resume(at + pause)
        runs.append((ended, drained(engine), engine.busy_seconds))
    (before, after, busy), (paused_before, paused_after, paused_busy) = runs
    assert before == paused_before and busy == pytest.approx(paused_busy)
    assert [each.finished_at + length for each in after] == pytest.approx([each.finished_at for each in paused_after])


def test_gaps_between_tokens_include_a_pause_and_count_every_later_token() -> None:
    engine = engine_of()
    engine.add(request("a", 10, 30), 0.0)
    engine.advance(0.1)
    engine.pause(0.1)
    engine.resume(5.1)
    drained(engine)
    assert engine.token_gaps.count == 29
    assert engine.token_gaps.percentile(1.0) == pytest.approx(5.0, rel=0.02)


def test_gap_between_two_tokens_includes_the_wait_of_a_preempted_request() -> None:
    engine = Engine(small_cost(400), max_running=4, step_tokens=512, kv_tokens=400)
    for number in range(4):
        engine.add(EngineRequest(f"r{number}", (Segment(f"r{number}", 64),), 200, 0.0), 0.0)
    ended = []
    while engine.requests:
        ended += engine.advance(engine.next_at)
    assert engine.preempted > 0 and len(ended) == 4
    assert engine.token_gaps.count == sum(result.sampled_tokens - 1 for result in ended)
    seconds = sum(result.finished_at - result.first_token_at for result in ended)
    assert engine.token_gaps.total_seconds == pytest.approx(seconds)


def test_tokens_of_a_context_that_another_request_computes_in_the_same_step_are_reused() -> None:
    engine, prompt = engine_of(), Segment("prompt", 2 * BLOCK)
    engine.add(request("other", 5, 3), 0.0)
    for name in "ab":
        engine.add(request(name, 4, 1, prompt), 0.0)
    cached = {each.request.name: each.cached_tokens for each in drained(engine)}
    assert cached == {"other": 0, "a": 0, "b": 2 * BLOCK}


def test_last_context_token_is_computed_even_if_all_its_blocks_are_cached() -> None:
    engine, prompt = engine_of(), Segment("prompt", BLOCK)
    cached = []
    for _ in range(2):
        engine.add(request("a", 3 * BLOCK, 17, prompt), 0.0)
        cached += [each.cached_tokens for each in drained(engine)]
    assert cached == [0, 3 * BLOCK]


def test_request_that_began_before_the_cache_was_dropped_leaves_nothing_to_reuse() -> None:
    engine, prompt = engine_of(), Segment("prompt", 2 * BLOCK)
    engine.add(request("a", 40, 20, prompt), 0.0)
    engine.advance(2 * STEP)
    held = engine.held_tokens
    engine.drop_cache()
    assert engine.held_tokens == held, "the running request still holds its memory"
    drained(engine)
    engine.add(request("a", 60, 1, prompt), 10.0)
    assert [each.cached_tokens for each in drained(engine)] == [0]


def test_lowered_limit_evicts_prefixes_and_keeps_running_requests() -> None:
    engine = engine_of()
    engine.add(request("a", 100, 2), 0.0)
    drained(engine)
    engine.add(request("b", 100, 40), 1.0)
    engine.advance(1.0 + 5 * STEP)
    engine.limit_kv(50, 1.0 + 5 * STEP)
    assert engine.held_tokens > engine.kv_tokens and engine.cache.tokens == 0
    assert [each.sampled_tokens for each in drained(engine)] == [40]


def test_request_that_can_never_run_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 401 KV tokens, and there are 400"):
        engine_of().add(request("big", 390, 11), 0.0)
    with pytest.raises(KeyError):
        engine_of().abort("unknown", 0.0)


def test_layer_under_way_is_never_longer_than_one_layer_of_its_step() -> None:
    engine = engine_of()
    assert engine.layer_remaining(0.0) == 0.0
    engine.add(request("a", 30, 50), 0.0)
    layer = engine.plan.first_seconds / COST.layers
    remaining = [engine.layer_remaining(layer * (number + 0.25)) for number in range(COST.layers)]
    assert remaining == pytest.approx([0.75 * layer] * COST.layers)
