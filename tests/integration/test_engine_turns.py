"""The engine's turns against transformers: what they sample, how they end, what is refused, and what the load says."""

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rose.schemas.prompts import Sampling
from rose.schemas.sampled_tokens import VersionSpan
from rose.workers.executor.vllm.engine import EngineBroken, EngineRefusal
from tests.support.engine_fixtures import (
    BLOCK,
    MAX_MODEL_LEN,
    MAX_RUNNING,
    TOLERANCE,
    Rig,
    contexts_of,
    difference,
    sampled_logprobs,
    started_rig,
    tokens_of,
)
from tests.support.policy_folders import VOCABULARY, tensors_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with started_rig(tmp_path_factory.mktemp("policy"), tied=True) as rig:
        yield rig


@pytest.fixture
def rig(started: Rig) -> Iterator[Rig]:
    yield started
    started.clear()


def test_logprobs_match_the_sampled_distribution(rig: Rig) -> None:
    context = contexts_of(random.Random(11), 40)
    for temperature in (0.5, 1.7):
        turn = rig.run(context, max_tokens=30, temperature=temperature)
        assert difference(rig.model, context, turn, temperature) < TOLERANCE

    greedy = rig.run(context, max_tokens=30, temperature=0.0)
    assert difference(rig.model, context, greedy) < TOLERANCE

    nucleus = rig.run(context, max_tokens=30, top_p=0.6)
    with torch.no_grad():
        logits = rig.model(input_ids=torch.tensor([[*context, *tokens_of(nucleus)]])).logits[0, len(context) - 1 : -1]
    probabilities, order = torch.softmax(logits, -1).sort(-1, descending=True)
    kept = probabilities.cumsum(-1) - probabilities < 0.6
    for row, token in enumerate(tokens_of(nucleus)):
        place = int((order[row] == token).nonzero())
        assert kept[row, place]
        expected = (probabilities[row, place] / probabilities[row][kept[row]].sum()).log()
        assert abs(float(expected) - sampled_logprobs(nucleus)[row]) < TOLERANCE


def test_token_frequencies_match_their_logprobs(rig: Rig) -> None:
    context = contexts_of(random.Random(12), 2 * BLOCK + 1)
    turns = 4000
    for i in range(turns):
        rig.add(str(i), context, max_tokens=1, temperature=1.5)
    counts = torch.zeros(VOCABULARY)
    for turn in rig.drain().values():
        counts[tokens_of(turn)[0]] += 1
    with torch.no_grad():
        expected = turns * torch.softmax(rig.model(input_ids=torch.tensor([context])).logits[0, -1] / 1.5, -1)
    common = expected >= 5
    chi_square = float(((counts - expected)[common] ** 2 / expected[common]).sum())
    freedom = int(common.sum())
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5, "more than five standard deviations away"


def test_seed_determines_the_tokens_under_any_load(rig: Rig) -> None:
    rng = random.Random(13)
    context = contexts_of(rng, 50)
    alone = rig.run(context, max_tokens=30, seed=5)
    for i in range(6):
        rig.add(f"other{i}", contexts_of(rng, 20), max_tokens=25)
    rig.add("seeded", context, max_tokens=30, seed=5)
    rig.add("unseeded", context, max_tokens=30)
    done = rig.drain()
    assert tokens_of(done["seeded"]) == tokens_of(alone)
    assert tokens_of(done["unseeded"]) != tokens_of(alone)


def test_seeded_turn_with_chunked_prefill_samples_the_same_tokens(rig: Rig) -> None:
    rng = random.Random(18)
    context = contexts_of(rng, 200)
    whole = rig.run(context, max_tokens=20, seed=6)
    rig.engine.swap(rig.engine.version + 1, tensors_of(rig.model).items())  # forgets the prefix, not the weights
    for i in range(2):
        rig.add(f"t{i}", contexts_of(rng, 200), max_tokens=20, seed=i)
    rig.add("cut", context, max_tokens=20, seed=6)
    assert rig.engine.step().tokens == 512, "three prefills of 200 fit in one step"
    cut = rig.drain()["cut"]
    assert tokens_of(cut) == tokens_of(whole)
    assert difference(rig.model, context, cut) < TOLERANCE


def test_turn_ends_at_a_stop_token_its_limit_or_a_full_context(rig: Rig) -> None:
    context = contexts_of(random.Random(14), 40)
    turn = rig.run(context, max_tokens=30, seed=3)
    assert (turn.finish_reason, len(tokens_of(turn)), turn.context_tokens) == ("length", 30, 40)

    stop = tokens_of(turn)[12]
    stopped = rig.run(context, max_tokens=30, seed=3, stop_token_ids=(stop,))
    assert stopped.finish_reason == "stop"
    assert tokens_of(stopped) == tokens_of(turn)[: tokens_of(turn).index(stop) + 1]

    full = rig.run(contexts_of(random.Random(15), MAX_MODEL_LEN - 3), max_tokens=30)
    assert (full.finish_reason, len(tokens_of(full))) == ("length", 3)


def test_aborted_turn_keeps_what_it_has_sampled(rig: Rig) -> None:
    context = contexts_of(random.Random(16), 60)
    rig.add("gone", context, max_tokens=50)
    for _ in range(9):
        rig.engine.step()
    turn = rig.engine.abort("gone")
    assert turn is not None
    assert (turn.finish_reason, len(tokens_of(turn)), len(sampled_logprobs(turn))) == ("abort", 9, 9)
    assert turn.sampled.spans == (VersionSpan(0, 9, rig.engine.version),)
    assert difference(rig.model, context, turn) < TOLERANCE
    assert rig.engine.abort("gone") is None
    again = rig.run(context, max_tokens=2)
    assert difference(rig.model, context, again) < TOLERANCE

    rig.add("never", context, max_tokens=50)
    unstarted = rig.engine.abort("never")
    assert unstarted is not None
    assert (tokens_of(unstarted), unstarted.sampled.spans, unstarted.times.scheduled_at) == ([], (), 0.0)


def test_impossible_turn_is_refused_with_the_reason(rig: Rig) -> None:
    rig.add("held", [1], max_tokens=5)
    refused: list[tuple[str, list[int], dict[str, Any]]] = [
        ("already in the engine", [1], {"key": "held"}),
        ("context of 0 tokens", [], {}),
        (f"1 to {MAX_MODEL_LEN - 1}", [1] * MAX_MODEL_LEN, {}),
        (f"token id {VOCABULARY} is outside", [1, VOCABULARY], {}),
        ("token id -1 is outside", [1, -1], {}),
        (f"token id {VOCABULARY} is outside", [1], {"stop_token_ids": (VOCABULARY,)}),
        ("temperature", [1], {"temperature": 5.0}),
        ("temperature", [1], {"temperature": 0.001}),
    ]
    for reason, context, sampling in refused:
        key = sampling.pop("key", "new")
        with pytest.raises(EngineRefusal, match=reason):
            rig.add(key, context, **sampling)
    with pytest.raises(EngineRefusal, match="serves, not 1000"):
        rig.engine.add("new", [1], Sampling(), policy_version=1000)
    assert list(rig.drain()) == ["held"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("out of memory"), "out of memory$"),
        (AssertionError(), "AssertionError: raise error$"),
        (RuntimeError("\nno kernel\nat line 7"), "no kernel$"),
    ],
)
def test_failed_step_is_reported_in_one_sentence(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    def fail() -> None:
        raise error

    rig.add("held", [1], max_tokens=2)
    with monkeypatch.context() as faults:
        faults.setattr(rig.engine._core, "step_fn", fail)
        with pytest.raises(EngineBroken, match=f"a step failed: {reason}"):
            rig.engine.step()


def test_load_and_times_follow_the_turns(rig: Rig) -> None:
    idle = rig.engine.load()
    assert idle.kv_bytes_free == idle.kv_bytes_total > 0
    assert (idle.running, idle.waiting, idle.tokens) == (0, 0, 0)
    assert idle.kv_bytes_per_token == 4 * 2 * 2 * 32 * 4, "layers, keys and values, heads, head size, float32"
    assert rig.engine.step().tokens == 0

    began = time.time()
    for i in range(MAX_RUNNING + 2):
        rig.add(f"t{i}", contexts_of(random.Random(i), 28), max_tokens=3)
    assert rig.engine.load().waiting == MAX_RUNNING + 2
    step = rig.engine.step()
    assert (step.tokens, step.finished) == (MAX_RUNNING * 28, []) and step.seconds > 0
    busy = rig.engine.load()
    assert (busy.running, busy.waiting, busy.tokens) == (MAX_RUNNING, 2, (MAX_RUNNING + 2) * 28 + MAX_RUNNING)
    assert idle.kv_bytes_total - busy.kv_bytes_free == MAX_RUNNING * BLOCK * busy.kv_bytes_per_token
    done = rig.drain()
    assert len(done) == MAX_RUNNING + 2
    for turn in done.values():
        assert began <= turn.times.scheduled_at <= turn.times.first_token_at <= turn.times.finished_at
    assert done[f"t{MAX_RUNNING}"].times.scheduled_at > done["t0"].times.first_token_at
