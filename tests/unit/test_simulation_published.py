"""The simulator agrees with closed forms and with a plain LRU cache."""

import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.simulation_published import (
    ENGINES,
    HIT_TOLERANCE,
    PROFILES,
    PUBLISHED_HITS,
    SHAPES,
    TOLERANCE,
    Turns,
    closed_form,
    hit_rate,
    rollout_of,
    rollout_seconds,
)
from rose.pipeline.simulation.cost_model import load_profile
from rose.workers.loadgen.traces import read_trace

TRACE = os.environ.get("ROSE_MOONCAKE_TRACE", "")
PUBLISHED_REQUESTS = 23_608

needs_trace = pytest.mark.skipif(not TRACE, reason="ROSE_MOONCAKE_TRACE names no trace of Mooncake")


def plain_hit_rate(rows: Iterable[Sequence[int]], most_blocks: int | None) -> float:
    """Return the hit rate of a list of blocks by their last use, of one request the beginning last."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = total = 0
    for blocks in rows:
        total += len(blocks)
        hits += next((place for place, block in enumerate(blocks) if block not in cached), len(blocks))
        for block in reversed(blocks):
            cached[block] = None
            cached.move_to_end(block)
        while most_blocks is not None and len(cached) > most_blocks:
            cached.popitem(last=False)
    return hits / total


CONTEXTS = st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True)


@given(st.lists(CONTEXTS, min_size=1, max_size=40), st.one_of(st.none(), st.integers(6, 40)))
def test_prefix_cache_hits_as_a_plain_lru_cache(rows: list[list[int]], most_blocks: int | None) -> None:
    assert hit_rate(rows, most_blocks) == plain_hit_rate(rows, most_blocks)


@needs_trace
@pytest.mark.parametrize("blocks", PUBLISHED_HITS)
def test_prefix_cache_hits_on_a_trace_as_a_plain_lru_cache(blocks: int | None) -> None:
    rows = [arrival.blocks for arrival in read_trace(TRACE)]
    assert hit_rate(rows, blocks) == plain_hit_rate(rows, blocks)


@needs_trace
@pytest.mark.parametrize(("blocks", "published"), PUBLISHED_HITS.items())
def test_hit_rates_are_those_published_for_the_full_trace(blocks: int | None, published: float) -> None:
    rows = [arrival.blocks for arrival in read_trace(TRACE)]
    if len(rows) != PUBLISHED_REQUESTS:
        pytest.skip(f"{Path(TRACE).name} has {len(rows)} requests, and the published trace {PUBLISHED_REQUESTS}")
    assert hit_rate(rows, blocks) == pytest.approx(published, abs=HIT_TOLERANCE)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.sampled} sampled")
def test_rollout_of_equal_trajectories_takes_the_time_of_the_closed_form(shape: Turns) -> None:
    scenario = rollout_of(PROFILES[0], ENGINES[0], shape, "session")
    expected = closed_form(scenario, load_profile(PROFILES[0]), shape)
    assert rollout_seconds(scenario) == pytest.approx(expected, rel=TOLERANCE)
