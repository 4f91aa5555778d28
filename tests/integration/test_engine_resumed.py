"""An interrupted turn that resumes elsewhere equals the uninterrupted turn: proven on two engines."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from rose.schemas.arrays import count, pack_tokens, unpack_logprobs, unpack_tokens
from rose.schemas.prompts import Sampling
from rose.schemas.turns import Part, TurnDispatch, context_fields
from rose.workers.executor.records import concatenate_parts, remaining_sampling, resumed_context
from rose.workers.executor.vllm.engine import Engine
from rose.workers.executor.vllm.model_runner import seed_at
from rose.workers.executor.vllm.types import EngineRefusal, FinishedTurn
from tests.support.engine_fixtures import BLOCK, TOLERANCE, EngineFixture, contexts_of, folder_config, tokens_of
from tests.support.policy_folders import VOCABULARY, new_policy, save_policy
from tests.support.routing_fixtures import dispatched, request

pytestmark = pytest.mark.slow

MOST_TOKENS = 40


@pytest.fixture(scope="module")
def engine_fixtures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineFixture]]:
    model = new_policy(0, tied=True)
    config = folder_config(save_policy(tmp_path_factory.mktemp("policy"), model), policy_version=0)
    engines = [Engine(replace(config, seed=seed)) for seed in (1, 2)]
    yield [EngineFixture(engine, model, True) for engine in engines]
    for engine in engines:
        engine.close()


def dispatch_of(context: Sequence[int], sampling: Sampling) -> TurnDispatch:
    turn_request = msgspec.structs.replace(request("g0:0"), **context_fields(pack_tokens(context)), sampling=sampling)
    return dispatched(turn_request)


def part_of(finished: FinishedTurn) -> Part:
    return Part(**finished.sampled.record_fields())


def go_on(
    engine_fixture: EngineFixture, dispatch: TurnDispatch, steps: int | None = None
) -> tuple[TurnDispatch, FinishedTurn]:
    """Run a turn beside others for the given steps, or to its end; return the dispatch that resumes it."""
    rng, others = random.Random(steps), list[str]()
    for number in range(rng.randint(0, 3)):
        others.append(f"other{number}")
        engine_fixture.add(others[-1], contexts_of(rng, rng.randint(1, 60)), max_tokens=rng.randint(1, 60))
    context = unpack_tokens(resumed_context(dispatch, dispatch.request.appended))
    engine_fixture.engine.add(
        "turn", context, remaining_sampling(dispatch), policy_version=engine_fixture.engine.version
    )
    done: dict[str, FinishedTurn] = {}
    taken = 0
    while "turn" not in done and taken != steps:
        done |= {turn.name: turn for turn in engine_fixture.engine.step().finished}
        taken += 1
    finished = done.get("turn") or engine_fixture.engine.abort("turn")
    assert finished is not None
    for name in others:
        engine_fixture.engine.abort(name)
    return msgspec.structs.replace(dispatch, partial=concatenate_parts(dispatch.partial, part_of(finished))), finished


def whole_of(engine_fixture: EngineFixture, dispatch: TurnDispatch) -> Part:
    after, _ = go_on(engine_fixture, dispatch)
    assert after.partial is not None
    return after.partial


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_seeded_turn_interrupted_anywhere_samples_the_same_tokens(
    engine_fixtures: list[EngineFixture], temperature: float
) -> None:
    first, second = engine_fixtures
    rng = random.Random(temperature)
    for seed in (0, 7, 2**63 - 1):
        context = contexts_of(rng, rng.randint(5, 100))
        dispatch = dispatch_of(context, Sampling(temperature=temperature, max_tokens=MOST_TOKENS, seed=seed))
        unbroken = whole_of(first, dispatch)
        assert count(unbroken.tokens) == MOST_TOKENS
        for broken_after in (1, rng.randint(2, MOST_TOKENS - 2), MOST_TOKENS - 1):
            partial_dispatch, _ = go_on(first, dispatch, broken_after)
            assert partial_dispatch.partial is not None and count(partial_dispatch.partial.tokens) == broken_after
            whole = whole_of(second, partial_dispatch)
            assert whole.tokens == unbroken.tokens
            assert whole.spans == unbroken.spans
            assert np.abs(unpack_logprobs(whole.logprobs) - unpack_logprobs(unbroken.logprobs)).max() < TOLERANCE


def test_repeatedly_interrupted_turn_ends_as_an_uninterrupted_turn(engine_fixtures: list[EngineFixture]) -> None:
    context = contexts_of(random.Random(1), 50)
    sampling = Sampling(temperature=1.3, top_p=0.9, max_tokens=MOST_TOKENS, seed=3)
    unbroken = unpack_tokens(whole_of(engine_fixtures[0], dispatch_of(context, sampling)).tokens)
    stop = unbroken[25]
    dispatch = dispatch_of(context, msgspec.structs.replace(sampling, stop_token_ids=(stop,)))
    for breaks in range(30):
        dispatch, finished = go_on(engine_fixtures[breaks % 2], dispatch, 3)
        if finished.finish_reason != "abort":
            break
    assert finished.finish_reason == "stop" and dispatch.partial is not None
    assert unpack_tokens(dispatch.partial.tokens) == unbroken[: unbroken.index(stop) + 1]


def test_turn_interrupted_before_its_first_token_starts_anew(engine_fixtures: list[EngineFixture]) -> None:
    dispatch = dispatch_of(contexts_of(random.Random(2), 60), Sampling(max_tokens=20, seed=4))
    partial_dispatch, _ = go_on(engine_fixtures[0], dispatch, 0)
    assert partial_dispatch.partial is not None and partial_dispatch.partial.validation_error
    assert whole_of(engine_fixtures[1], msgspec.structs.replace(partial_dispatch, partial=None)) == whole_of(
        engine_fixtures[0], dispatch
    )


def test_versions_of_all_parts_are_recorded_and_a_new_version_hits_no_prefix(
    engine_fixtures: list[EngineFixture],
) -> None:
    dispatch = dispatch_of(contexts_of(random.Random(3), 70), Sampling(max_tokens=MOST_TOKENS, seed=5))
    partial_dispatch, _ = go_on(engine_fixtures[0], dispatch, 12)
    version = engine_fixtures[0].engine.version
    for engine_fixture in engine_fixtures:
        engine_fixture.swap()
    whole, finished = go_on(engine_fixtures[0], partial_dispatch)
    assert whole.partial is not None and whole.partial.validation_error is None
    assert [(span.start, span.end, span.version) for span in whole.partial.spans] == [
        (0, 12, version),
        (12, MOST_TOKENS, version + 1),
    ]
    assert (finished.cached_tokens, finished.context_tokens) == (0, 82)


def test_resumed_turn_hits_all_but_its_last_block_on_the_same_engine(engine_fixtures: list[EngineFixture]) -> None:
    dispatch = dispatch_of(contexts_of(random.Random(4), 100), Sampling(max_tokens=100, seed=6))
    partial_dispatch, _ = go_on(engine_fixtures[0], dispatch, 70)
    _, finished = go_on(engine_fixtures[0], partial_dispatch)
    assert (finished.context_tokens, finished.cached_tokens) == (170, 169 // BLOCK * BLOCK)
    assert len(tokens_of(finished)) == 30


def test_resumed_turn_without_remaining_tokens_is_refused(engine_fixtures: list[EngineFixture]) -> None:
    whole, _ = go_on(engine_fixtures[0], dispatch_of([1, 2, 3], Sampling(max_tokens=5)))
    with pytest.raises(EngineRefusal, match="max_tokens"):
        go_on(engine_fixtures[1], whole)


def test_seeded_token_frequencies_match_their_logprobs(engine_fixtures: list[EngineFixture]) -> None:
    context, turns, engine_fixture = contexts_of(random.Random(5), 2 * BLOCK + 1), 3000, engine_fixtures[0]
    for seed in range(turns):
        engine_fixture.add(str(seed), context, max_tokens=1, temperature=1.5, seed=seed)
    counts = torch.zeros(VOCABULARY)
    for turn in engine_fixture.drain().values():
        counts[tokens_of(turn)[0]] += 1
    with torch.no_grad():
        expected = turns * torch.softmax(
            engine_fixture.model(input_ids=torch.tensor([context])).logits[0, -1] / 1.5, -1
        )
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
    """Return the number of standard deviations of the statistic above its mean."""
    common = expected >= 5
    freedom = int(common.sum())
    statistic = float(((counts - expected)[common] ** 2 / expected[common]).sum())
    return (statistic - freedom) / float((2 * freedom) ** 0.5)
