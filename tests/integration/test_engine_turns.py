"""The engine's turns against transformers: sampling, ends, refusals and reported load."""

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rose.schemas.prompts import Sampling
from rose.schemas.sampled_tokens import VersionSpan
from rose.workers.executor.vllm.types import EngineBroken, EngineRefusal
from tests.support.engine_fixtures import (
    BLOCK,
    MAX_MODEL_LEN,
    MAX_RUNNING,
    TOLERANCE,
    EngineFixture,
    contexts_of,
    difference,
    sampled_logprobs,
    started_engine,
    tokens_of,
)
from tests.support.policy_folders import VOCABULARY, tensors_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineFixture]:
    with started_engine(tmp_path_factory.mktemp("policy"), tied=True) as engine_fixture:
        yield engine_fixture


@pytest.fixture
def engine_fixture(started: EngineFixture) -> Iterator[EngineFixture]:
    yield started
    started.clear()


def test_logprobs_match_the_sampled_distribution(engine_fixture: EngineFixture) -> None:
    context = contexts_of(random.Random(11), 40)
    for temperature in (0.5, 1.7):
        turn = engine_fixture.run(context, max_tokens=30, temperature=temperature)
        assert difference(engine_fixture.model, context, turn, temperature) < TOLERANCE

    greedy = engine_fixture.run(context, max_tokens=30, temperature=0.0)
    assert difference(engine_fixture.model, context, greedy) < TOLERANCE

    nucleus = engine_fixture.run(context, max_tokens=30, top_p=0.6)
    with torch.no_grad():
        logits = engine_fixture.model(input_ids=torch.tensor([[*context, *tokens_of(nucleus)]])).logits[
            0, len(context) - 1 : -1
        ]
    probabilities, order = torch.softmax(logits, -1).sort(-1, descending=True)
    kept = probabilities.cumsum(-1) - probabilities < 0.6
    for row, token in enumerate(tokens_of(nucleus)):
        place = int((order[row] == token).nonzero())
        assert kept[row, place]
        expected = (probabilities[row, place] / probabilities[row][kept[row]].sum()).log()
        assert abs(float(expected) - sampled_logprobs(nucleus)[row]) < TOLERANCE


def test_token_frequencies_match_their_logprobs(engine_fixture: EngineFixture) -> None:
    context = contexts_of(random.Random(12), 2 * BLOCK + 1)
    turns = 4000
    for i in range(turns):
        engine_fixture.add(str(i), context, max_tokens=1, temperature=1.5)
    counts = torch.zeros(VOCABULARY)
    for turn in engine_fixture.drain().values():
        counts[tokens_of(turn)[0]] += 1
    with torch.no_grad():
        expected = turns * torch.softmax(
            engine_fixture.model(input_ids=torch.tensor([context])).logits[0, -1] / 1.5, -1
        )
    common = expected >= 5
    chi_square = float(((counts - expected)[common] ** 2 / expected[common]).sum())
    freedom = int(common.sum())
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5, "more than five standard deviations away"


def test_seed_determines_the_tokens_under_any_load(engine_fixture: EngineFixture) -> None:
    rng = random.Random(13)
    context = contexts_of(rng, 50)
    alone = engine_fixture.run(context, max_tokens=30, seed=5)
    for i in range(6):
        engine_fixture.add(f"other{i}", contexts_of(rng, 20), max_tokens=25)
    engine_fixture.add("seeded", context, max_tokens=30, seed=5)
    engine_fixture.add("unseeded", context, max_tokens=30)
    done = engine_fixture.drain()
    assert tokens_of(done["seeded"]) == tokens_of(alone)
    assert tokens_of(done["unseeded"]) != tokens_of(alone)


def test_seeded_turn_with_chunked_prefill_samples_the_same_tokens(engine_fixture: EngineFixture) -> None:
    rng = random.Random(18)
    context = contexts_of(rng, 200)
    whole = engine_fixture.run(context, max_tokens=20, seed=6)
    engine_fixture.engine.swap(
        engine_fixture.engine.version + 1, tensors_of(engine_fixture.model).items()
    )  # forgets the prefix and not the weights
    for i in range(2):
        engine_fixture.add(f"t{i}", contexts_of(rng, 200), max_tokens=20, seed=i)
    engine_fixture.add("cut", context, max_tokens=20, seed=6)
    assert engine_fixture.engine.step().tokens == 512, "three prefills of 200 fit in one step"
    cut = engine_fixture.drain()["cut"]
    assert tokens_of(cut) == tokens_of(whole)
    assert difference(engine_fixture.model, context, cut) < TOLERANCE


def test_turn_ends_at_a_stop_token_its_limit_or_a_full_context(engine_fixture: EngineFixture) -> None:
    context = contexts_of(random.Random(14), 40)
    turn = engine_fixture.run(context, max_tokens=30, seed=3)
    assert (turn.finish_reason, len(tokens_of(turn)), turn.context_tokens) == ("length", 30, 40)

    stop = tokens_of(turn)[12]
    stopped = engine_fixture.run(context, max_tokens=30, seed=3, stop_token_ids=(stop,))
    assert stopped.finish_reason == "stop"
    assert tokens_of(stopped) == tokens_of(turn)[: tokens_of(turn).index(stop) + 1]

    full = engine_fixture.run(contexts_of(random.Random(15), MAX_MODEL_LEN - 3), max_tokens=30)
    assert (full.finish_reason, len(tokens_of(full))) == ("length", 3)


def test_aborted_turn_keeps_what_it_has_sampled(engine_fixture: EngineFixture) -> None:
    context = contexts_of(random.Random(16), 60)
    engine_fixture.add("gone", context, max_tokens=50)
    for _ in range(9):
        engine_fixture.engine.step()
    turn = engine_fixture.engine.abort("gone")
    assert turn is not None
    assert (turn.finish_reason, len(tokens_of(turn)), len(sampled_logprobs(turn))) == ("abort", 9, 9)
    assert turn.sampled.spans == (VersionSpan(0, 9, engine_fixture.engine.version),)
    assert difference(engine_fixture.model, context, turn) < TOLERANCE
    assert engine_fixture.engine.abort("gone") is None
    again = engine_fixture.run(context, max_tokens=2)
    assert difference(engine_fixture.model, context, again) < TOLERANCE

    engine_fixture.add("never", context, max_tokens=50)
    unstarted = engine_fixture.engine.abort("never")
    assert unstarted is not None
    assert (tokens_of(unstarted), unstarted.sampled.spans, unstarted.times.scheduled_at) == ([], (), 0.0)


def test_impossible_turn_is_refused_with_the_reason(engine_fixture: EngineFixture) -> None:
    engine_fixture.add("held", [1], max_tokens=5)
    refused: list[tuple[str, list[int], dict[str, Any]]] = [
        ("already in the engine", [1], {"key": "held"}),
        ("context of 0 tokens", [], {}),
        (f"1 to {MAX_MODEL_LEN - 1}", [1] * MAX_MODEL_LEN, {}),
        (f"token id {VOCABULARY} is outside", [1, VOCABULARY], {}),
        ("token id -1 is outside", [1, -1], {}),
        (f"stop_token_ids: token id {VOCABULARY} is outside", [1], {"stop_token_ids": (VOCABULARY,)}),
        ("temperature", [1], {"temperature": 5.0}),
        ("temperature", [1], {"temperature": 0.001}),
    ]
    for reason, context, sampling in refused:
        key = sampling.pop("key", "new")
        with pytest.raises(EngineRefusal, match=reason):
            engine_fixture.add(key, context, **sampling)
    with pytest.raises(EngineRefusal, match="serves, not 1000"):
        engine_fixture.engine.add("new", [1], Sampling(), policy_version=1000)
    assert list(engine_fixture.drain()) == ["held"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("out of memory"), "out of memory$"),
        (AssertionError(), "AssertionError: raise error$"),
        (RuntimeError("\nno kernel\nat line 7"), "no kernel$"),
    ],
)
def test_failed_step_is_reported_in_one_sentence(
    engine_fixture: EngineFixture, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    def fail() -> None:
        raise error

    engine_fixture.add("held", [1], max_tokens=2)
    with monkeypatch.context() as faults:
        faults.setattr(engine_fixture.engine._core, "step_fn", fail)
        with pytest.raises(EngineBroken, match=f"a step failed: {reason}"):
            engine_fixture.engine.step()


def test_load_and_times_follow_the_turns(engine_fixture: EngineFixture) -> None:
    idle = engine_fixture.engine.load()
    assert idle.kv_bytes_free == idle.kv_bytes_total > 0
    assert (idle.running, idle.waiting, idle.tokens) == (0, 0, 0)
    assert idle.kv_bytes_per_token == 4 * 2 * 2 * 32 * 4, "layers, keys and values, heads, head size, float32"
    assert engine_fixture.engine.step().tokens == 0

    began = time.time()
    for i in range(MAX_RUNNING + 2):
        engine_fixture.add(f"t{i}", contexts_of(random.Random(i), 28), max_tokens=3)
    assert engine_fixture.engine.load().waiting == MAX_RUNNING + 2
    step = engine_fixture.engine.step()
    assert (step.tokens, step.finished) == (MAX_RUNNING * 28, []) and step.seconds > 0
    busy = engine_fixture.engine.load()
    assert (busy.running, busy.waiting, busy.tokens) == (MAX_RUNNING, 2, (MAX_RUNNING + 2) * 28 + MAX_RUNNING)
    assert idle.kv_bytes_total - busy.kv_bytes_free == MAX_RUNNING * BLOCK * busy.kv_bytes_per_token
    done = engine_fixture.drain()
    assert len(done) == MAX_RUNNING + 2
    for turn in done.values():
        assert began <= turn.times.scheduled_at <= turn.times.first_token_at <= turn.times.finished_at
    assert done[f"t{MAX_RUNNING}"].times.scheduled_at > done["t0"].times.first_token_at
