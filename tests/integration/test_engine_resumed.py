"""A turn that is broken off and goes on elsewhere is the turn that nobody broke: proven on two engines."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from rose.schemas.arrays import count, pack_tokens, unpack_logprobs, unpack_tokens
from rose.schemas.contexts import context_fields
from rose.schemas.prompts import Sampling
from rose.schemas.turns import Part, TurnDispatch
from rose.workers.executor.results import concatenate_parts, remaining_sampling, resumed_context
from rose.workers.executor.vllm.engine import Engine, EngineRefusal, FinishedTurn
from rose.workers.executor.vllm.seeded_sampling import seed_at
from tests.support.engine_fixtures import BLOCK, TOLERANCE, Rig, contexts_of, folder_config, tokens_of
from tests.support.policy_folders import VOCABULARY, new_policy, save_policy
from tests.support.routing_fixtures import dispatched, request

pytestmark = pytest.mark.slow

MOST_TOKENS = 40


@pytest.fixture(scope="module")
def rigs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Rig]]:
    model = new_policy(0, tied=True)
    config = folder_config(save_policy(tmp_path_factory.mktemp("policy"), model), policy_version=0)
    engines = [Engine(replace(config, seed=seed)) for seed in (1, 2)]
    yield [Rig(engine, model, True) for engine in engines]
    for engine in engines:
        engine.close()


def dispatch_of(context: Sequence[int], sampling: Sampling) -> TurnDispatch:
    asked = msgspec.structs.replace(request("g0:0"), **context_fields(pack_tokens(context)), sampling=sampling)
    return dispatched(asked)


def part_of(finished: FinishedTurn) -> Part:
    return Part(**finished.sampled.record_fields())


def go_on(rig: Rig, dispatch: TurnDispatch, steps: int | None = None) -> tuple[TurnDispatch, FinishedTurn]:
    """Run a turn for so many steps, or to its end, beside others; the dispatch that goes on from there."""
    rng, others = random.Random(steps), list[str]()
    for number in range(rng.randint(0, 3)):
        others.append(f"other{number}")
        rig.add(others[-1], contexts_of(rng, rng.randint(1, 60)), max_tokens=rng.randint(1, 60))
    context = unpack_tokens(resumed_context(dispatch, dispatch.request.appended))
    rig.engine.add("turn", context, remaining_sampling(dispatch), policy_version=rig.engine.version)
    done: dict[str, FinishedTurn] = {}
    taken = 0
    while "turn" not in done and taken != steps:
        done |= {turn.name: turn for turn in rig.engine.step().finished}
        taken += 1
    finished = done.get("turn") or rig.engine.abort("turn")
    assert finished is not None
    for name in others:
        rig.engine.abort(name)
    return msgspec.structs.replace(dispatch, begun=concatenate_parts(dispatch.begun, part_of(finished))), finished


def whole_of(rig: Rig, dispatch: TurnDispatch) -> Part:
    after, _ = go_on(rig, dispatch)
    assert after.begun is not None
    return after.begun


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_seeded_turn_interrupted_anywhere_samples_the_same_tokens(rigs: list[Rig], temperature: float) -> None:
    first, second = rigs
    rng = random.Random(temperature)
    for seed in (0, 7, 2**63 - 1):
        context = contexts_of(rng, rng.randint(5, 100))
        dispatch = dispatch_of(context, Sampling(temperature=temperature, max_tokens=MOST_TOKENS, seed=seed))
        unbroken = whole_of(first, dispatch)
        assert count(unbroken.tokens) == MOST_TOKENS
        for broken_after in (1, rng.randint(2, MOST_TOKENS - 2), MOST_TOKENS - 1):
            begun, _ = go_on(first, dispatch, broken_after)
            assert begun.begun is not None and count(begun.begun.tokens) == broken_after
            whole = whole_of(second, begun)
            assert whole.tokens == unbroken.tokens
            assert whole.spans == unbroken.spans
            assert np.abs(unpack_logprobs(whole.logprobs) - unpack_logprobs(unbroken.logprobs)).max() < TOLERANCE


def test_repeatedly_interrupted_turn_ends_as_an_uninterrupted_turn(rigs: list[Rig]) -> None:
    context = contexts_of(random.Random(1), 50)
    sampling = Sampling(temperature=1.3, top_p=0.9, max_tokens=MOST_TOKENS, seed=3)
    unbroken = unpack_tokens(whole_of(rigs[0], dispatch_of(context, sampling)).tokens)
    stop = unbroken[25]
    dispatch = dispatch_of(context, msgspec.structs.replace(sampling, stop_token_ids=(stop,)))
    for breaks in range(30):
        dispatch, finished = go_on(rigs[breaks % 2], dispatch, 3)
        if finished.finish_reason != "abort":
            break
    assert finished.finish_reason == "stop" and dispatch.begun is not None
    assert unpack_tokens(dispatch.begun.tokens) == unbroken[: unbroken.index(stop) + 1]


def test_turn_interrupted_before_its_first_token_starts_anew(rigs: list[Rig]) -> None:
    dispatch = dispatch_of(contexts_of(random.Random(2), 60), Sampling(max_tokens=20, seed=4))
    begun, _ = go_on(rigs[0], dispatch, 0)
    assert begun.begun is not None and begun.begun.validation_error
    assert whole_of(rigs[1], msgspec.structs.replace(begun, begun=None)) == whole_of(rigs[0], dispatch)


def test_versions_of_all_parts_are_recorded_and_a_new_version_hits_no_prefix(rigs: list[Rig]) -> None:
    dispatch = dispatch_of(contexts_of(random.Random(3), 70), Sampling(max_tokens=MOST_TOKENS, seed=5))
    begun, _ = go_on(rigs[0], dispatch, 12)
    version = rigs[0].engine.version
    for rig in rigs:
        rig.swap()
    whole, finished = go_on(rigs[0], begun)
    assert whole.begun is not None and whole.begun.validation_error is None
    assert [(span.start, span.end, span.version) for span in whole.begun.spans] == [
        (0, 12, version),
        (12, MOST_TOKENS, version + 1),
    ]
    assert (finished.cached_tokens, finished.context_tokens) == (0, 82)


def test_resumed_turn_hits_all_but_its_last_block_on_the_same_engine(rigs: list[Rig]) -> None:
    dispatch = dispatch_of(contexts_of(random.Random(4), 100), Sampling(max_tokens=100, seed=6))
    begun, _ = go_on(rigs[0], dispatch, 70)
    _, finished = go_on(rigs[0], begun)
    assert (finished.context_tokens, finished.cached_tokens) == (170, 169 // BLOCK * BLOCK)
    assert len(tokens_of(finished)) == 30


def test_resumed_turn_without_remaining_tokens_is_refused(rigs: list[Rig]) -> None:
    whole, _ = go_on(rigs[0], dispatch_of([1, 2, 3], Sampling(max_tokens=5)))
    with pytest.raises(EngineRefusal, match="max_tokens"):
        go_on(rigs[1], whole)


def test_seeded_token_frequencies_match_their_logprobs(rigs: list[Rig]) -> None:
    context, turns, rig = contexts_of(random.Random(5), 2 * BLOCK + 1), 3000, rigs[0]
    for seed in range(turns):
        rig.add(str(seed), context, max_tokens=1, temperature=1.5, seed=seed)
    counts = torch.zeros(VOCABULARY)
    for turn in rig.drain().values():
        counts[tokens_of(turn)[0]] += 1
    with torch.no_grad():
        expected = turns * torch.softmax(rig.model(input_ids=torch.tensor([context])).logits[0, -1] / 1.5, -1)
    assert chi_square(counts, expected) < 5


def test_random_draws_of_one_seed_are_uniform_over_positions() -> None:
    generator, counts = torch.Generator(), torch.zeros(8, 8)
    before = 0
    for position in range(20_000):
        generator.manual_seed(seed_at(11, position))
        drawn = int(torch.empty(8).exponential_(generator=generator).argmin())
        counts[before, drawn] += 1
        before = drawn
    assert chi_square(counts.flatten(), torch.full((64,), 20_000 / 64)) < 5


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """How many standard deviations the statistic is above its mean."""
    common = expected >= 5
    freedom = int(common.sum())
    statistic = float(((counts - expected)[common] ** 2 / expected[common]).sum())
    return (statistic - freedom) / float((2 * freedom) ** 0.5)
