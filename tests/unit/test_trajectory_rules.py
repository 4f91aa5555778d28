"""Rules: the ends of a trajectory, valid results, and the token limit of a turn."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.schemas.arrays import pack_logprobs, pack_tokens
from rose.schemas.limits import MAX_CONTEXT_TOKENS, MAX_INFO_BYTES, MAX_RECORD_BYTES, MAX_SPANS
from rose.schemas.progress import EnvSnapshot
from rose.schemas.prompts import PromptSampling, Sampling
from rose.schemas.sampled_tokens import VersionSpan
from rose.schemas.samples import Ending
from rose.schemas.wire import decode
from rose.workers.environments.trajectory import result_error, turn_sampling, with_full_sampling
from rose.workers.environments.transitions import first_request
from tests.support.trajectory_fixtures import RULES, live, opened, prompt_of, request_of, result_of, sample_of, stepped

MALFORMED = {
    "no tokens": {"tokens": b"", "logprobs": b"", "spans": ()},
    "half a token": {"tokens": b"\0\0\0\0\0"},
    "too few logprobs": {"logprobs": pack_logprobs([-1.0])},
    "a logprob of nan": {"logprobs": pack_logprobs([-1.0, float("nan"), -1.0])},
    "no spans": {"spans": ()},
    "a gap": {"spans": (VersionSpan(0, 1, 0), VersionSpan(2, 3, 0))},
    "an overlap": {"spans": (VersionSpan(0, 2, 0), VersionSpan(1, 3, 0))},
    "an empty span": {"spans": (VersionSpan(0, 0, 0), VersionSpan(0, 3, 0))},
    "past the end": {"spans": (VersionSpan(0, 4, 0),)},
    "short of the end": {"spans": (VersionSpan(0, 2, 0),)},
    "no worker": {"worker": None},
    "no version": {"spans": (VersionSpan(0, 3, -1),)},
    "a logprob of 0 chance": {"logprobs": pack_logprobs([-1.0, float("-inf"), -1.0])},
    "what engines say for that": {"logprobs": pack_logprobs([-1.0, -9999.0, -1.0])},
    "a chance above 1": {"logprobs": pack_logprobs([-1.0, 0.5, -1.0])},
}


@pytest.mark.parametrize("fields", MALFORMED.values(), ids=MALFORMED)
def test_malformed_result_is_distinguished_from_a_valid_result(fields: dict[str, object]) -> None:
    sound = result_of(opened(prompt_of()))
    assert result_error(sound, 2) is None
    assert result_error(
        type(sound)(**{**{name: getattr(sound, name) for name in sound.__struct_fields__}, **fields}), 2
    )


def test_result_that_overflows_the_longest_context_is_malformed() -> None:
    assert "more than" in str(result_error(result_of(opened(prompt_of())), MAX_CONTEXT_TOKENS - 2))


def test_reward_is_the_sum_over_the_steps_and_the_last_observation_is_not_read() -> None:
    trajectory = opened(prompt_of())
    first = live(trajectory, result_of(trajectory), stepped(reward=0.25, observation=(9, 9)))
    assert request_of(first).appended == pack_tokens([5, 6, 7, 8, 2, 9, 9])
    last = live(trajectory, result_of(trajectory), stepped(reward=0.5, done=True))
    assert sample_of(last).ended is Ending.DONE
    assert (sample_of(last).reward, sample_of(last).success) == (0.75, True)
    assert sample_of(last).tokens == pack_tokens([5, 6, 7, 8, 2, 9, 9, 7, 8, 2])


def test_snapshot_is_written_only_when_the_state_changed() -> None:
    trajectory = opened(prompt_of())
    same = live(trajectory, result_of(trajectory), stepped(state=b"start"))
    changed = live(trajectory, result_of(trajectory), stepped(state=b"changed"))
    assert same.snapshot is None
    assert changed.snapshot is not None and (changed.snapshot.record.state, trajectory.turn) == (b"changed", 2)


def test_trajectory_ends_with_its_reward_after_max_turns() -> None:
    trajectory = opened(prompt_of(max_turns=2))
    assert live(trajectory, result_of(trajectory), stepped(reward=0.5)).sample is None
    last = live(trajectory, result_of(trajectory), stepped())
    assert sample_of(last).ended is Ending.MAX_TURNS
    assert (sample_of(last).reward, sample_of(last).success, sample_of(last).failure) == (0.5, False, "")


def test_trajectory_ends_at_a_full_context_and_its_last_turn_gets_the_remainder() -> None:
    rules = replace(RULES, max_context_tokens=8)
    trajectory = opened(prompt_of(sampling=PromptSampling(max_tokens=64)))
    first = first_request(trajectory, rules, 0.0)
    assert request_of(first).sampling.max_tokens == 6
    second = live(trajectory, result_of(trajectory), stepped(observation=(9,)), rules=rules)
    assert request_of(second).sampling.max_tokens == 2
    last = live(trajectory, result_of(trajectory, tokens=(7, 2)), stepped(reward=1.0), rules=rules)
    assert sample_of(last).ended is Ending.CONTEXT
    assert sample_of(last).reward == 1.0


def test_too_large_observation_or_state_is_a_failure_with_a_reason() -> None:
    too_long = first_request(opened(prompt_of()), replace(RULES, max_context_tokens=2), 0.0)
    assert "max_context_tokens 2" in sample_of(too_long).failure
    trajectory = opened(prompt_of())
    too_big = live(trajectory, result_of(trajectory), stepped(state=bytes(2_000_000)))
    assert sample_of(too_big).reward is None and "cannot be saved" in sample_of(too_big).failure
    assert sample_of(too_long).ended is sample_of(too_big).ended is Ending.FAILED


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_non_finite_reward_is_a_failure(reward: float) -> None:
    trajectory = opened(prompt_of())
    written = live(trajectory, result_of(trajectory), stepped(reward=reward))
    assert sample_of(written).reward is None and str(reward) in sample_of(written).failure


@pytest.mark.parametrize(
    "info",
    [
        {"remark": object()},
        {1: "a key that is no text"},
        {"remark": 2**70},
        {"remark": "\ud800"},
        {"remark": "x" * MAX_INFO_BYTES},
        ["no dict"],
    ],
    ids=["object", "key", "number", "surrogate", "size", "list"],
)
def test_unencodable_remarks_are_a_failure(info: Any) -> None:
    trajectory = opened(prompt_of())
    written = live(trajectory, result_of(trajectory), replace(stepped(done=True, reward=1.0), info=info))
    assert sample_of(written).reward is None
    assert "cannot be written" in sample_of(written).failure


def test_failure_without_room_for_its_tokens_keeps_its_reason() -> None:
    trajectory = opened(prompt_of())
    versions = tuple(VersionSpan(at, at + 1, at) for at in range(MAX_SPANS + 1))
    tokens = (7,) * (MAX_SPANS + 1)
    long = msgspec.structs.replace(result_of(trajectory, tokens=tokens), spans=versions)
    written = live(trajectory, long, stepped(done=True), rules=replace(RULES, max_context_tokens=MAX_CONTEXT_TOKENS))
    assert sample_of(written).tokens == b"" and "cannot be written" in sample_of(written).failure


@given(st.integers(MAX_RECORD_BYTES - 200, MAX_RECORD_BYTES + 20_000), st.booleans())
@settings(max_examples=30)
def test_state_near_the_size_limit_is_saved_or_fails_its_trajectory(size: int, opening: bool) -> None:
    trajectory = opened(prompt_of())
    if opening:
        trajectory.state = bytes(size)
        written = first_request(trajectory, RULES, 0.0)
    else:
        written = live(trajectory, result_of(trajectory), stepped(state=bytes(size)))
    if written.snapshot is not None:
        assert decode(EnvSnapshot, written.snapshot.wire).state == bytes(size)
    else:
        assert "cannot be saved" in sample_of(written).failure


@given(st.integers(0, 2**63 - 1))
def test_seeded_prompt_gives_each_turn_of_each_trajectory_its_own_seed(seed: int) -> None:
    prompt = with_full_sampling(prompt_of(sampling=PromptSampling(seed=seed, max_tokens=9)), RULES.sampling)
    drawn = [turn_sampling(prompt, index, turn, room_tokens=100) for index in range(3) for turn in range(3)]
    assert len({sampling.seed for sampling in drawn}) == 9
    assert all(sampling.seed is not None and 0 <= sampling.seed < 2**63 for sampling in drawn)
    assert drawn[0].stop_token_ids == (2,), "the model's stop tokens, since the prompt names none"
    assert drawn == [turn_sampling(prompt, index, turn, room_tokens=100) for index in range(3) for turn in range(3)]


def test_turn_keeps_its_requested_sampling_after_a_configuration_change() -> None:
    trajectory = opened(prompt_of())
    first = live(trajectory, result_of(trajectory), stepped())
    hotter = replace(RULES, sampling=Sampling(temperature=2.0))
    second = live(trajectory, result_of(trajectory), stepped(done=True), rules=hotter)
    assert [turn.sampling.temperature for turn in sample_of(second).turns] == [1.0, 1.0]
    assert sample_of(second).turns[1].sampling == request_of(first).sampling
