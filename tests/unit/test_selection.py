"""Selection of a complete group: one outcome per trajectory, and reasons that name the error."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.schemas.arrays import pack_logprobs, pack_tokens
from rose.schemas.limits import MAX_REWARD
from rose.schemas.prompts import Sampling
from rose.schemas.sampled_tokens import VersionSpan
from rose.schemas.samples import TRUNCATED, Ending, Outcome, Sample, SampleTurn
from rose.schemas.wire import encode
from rose.workers.trainer.algorithms.advantages import group_advantages
from rose.workers.trainer.groups import CompleteGroup
from rose.workers.trainer.selection import (
    SelectedGroup,
    SelectionRules,
    mark_failed,
    oldest_fresh_version,
    outcomes_of,
    sample_error,
    select_samples,
    staleness,
    steps_between,
    still_relevant,
)
from tests.support.sample_fixtures import sample, turns_of

RULES = SelectionRules(max_staleness=2, vocabulary=50, context_tokens=6)


def judged(
    *samples: Sample, version: int = 0, abandoned: Sequence[tuple[int, int]] = (), rules: SelectionRules = RULES
) -> SelectedGroup:
    return select_samples(CompleteGroup("g", samples), version, rules=rules, abandoned=abandoned)


def outcomes(group: SelectedGroup) -> list[Outcome]:
    return [verdict.outcome for verdict in group.decisions]


MEMBERS = st.lists(
    st.builds(
        sample,
        reward=st.sampled_from([None, 0.0, 1.0, -MAX_REWARD, 0.3, 0.1 + 0.2]),
        version=st.integers(0, 4),
        failure=st.sampled_from(["", "", "no executor"]),
        sampling=st.sampled_from([Sampling(), Sampling(temperature=0), Sampling(top_p=0.5)]),
        mask=st.sampled_from([None, [0, 0, 0], [1, 1, 1]]),
        ended=st.sampled_from(Ending),
    ),
    min_size=1,
    max_size=6,
)


@given(MEMBERS, st.integers(0, 6), st.booleans())
def test_each_member_has_one_outcome_and_only_useful_samples_are_trained(
    members: list[Sample], version: int, leave_out: bool
) -> None:
    rules = replace(RULES, leave_out_truncated=leave_out)
    group = judged(*members, version=version, abandoned=[(1, 2)], rules=rules)
    assert not leave_out or not any(one.ended in TRUNCATED for one in group.trained)
    ends = outcomes_of([group], step=1, policy_version=version, now=0.0)
    assert [end.trajectory_id for end in ends] == [one.trajectory_id for one in members]
    trained = [end.trajectory_id for end in ends if end.outcome is Outcome.TRAINED]
    assert trained == [one.trajectory_id for one in group.trained]
    rewards = [one.reward for one in group.trained if one.reward is not None]
    assert len(rewards) == len(trained) and (not trained or max(rewards) - min(rewards) > 1e-6)
    assert all(bool(end.reason) == (end.outcome is not Outcome.TRAINED) for end in ends)


def test_remaining_samples_of_a_group_are_trained_if_two_remain() -> None:
    members = [sample(index=0, reward=1.0, version=2), sample(index=1, version=0), sample(index=2, reward=None)]
    group = judged(*members, sample(index=3, version=2), version=3)
    assert outcomes(group) == [Outcome.TRAINED, Outcome.STALE, Outcome.INFRA_FAILED, Outcome.TRAINED]
    assert [one.trajectory_id for one in group.trained] == ["g:0", "g:3"]


@pytest.mark.parametrize("ended", TRUNCATED)
def test_truncated_samples_are_left_out_of_group_and_comparison_if_configured(
    ended: Ending,
) -> None:
    members = [
        sample(index=0, reward=1.0),
        sample(index=1, reward=0.0, ended=ended),
        sample(index=2, reward=0.5, ended=Ending.UNKNOWN),
    ]
    assert outcomes(judged(*members)) == [Outcome.TRAINED] * 3
    group = judged(*members, rules=replace(RULES, leave_out_truncated=True))
    assert outcomes(group) == [Outcome.TRAINED, Outcome.FILTERED, Outcome.TRAINED]
    assert group.decisions[1].reason == f"it was cut off ({ended.value}), and truncated samples are left out"
    rewards = [one.reward for one in group.trained if one.reward is not None]
    assert group_advantages(rewards, scale_by_deviation=False) == [0.25, -0.25]
    alone = judged(*members[:2], rules=replace(RULES, leave_out_truncated=True))
    assert alone.decisions[0].reason == "alone in its group"


def test_single_remaining_sample_is_filtered() -> None:
    group = judged(sample(index=0, reward=1.0), sample(index=1, failure="lost"))
    assert outcomes(group) == [Outcome.FILTERED, Outcome.INFRA_FAILED]


@pytest.mark.parametrize(
    "rewards", [[1.0, 1.0, 1.0], [0.1 + 0.2, 0.3, 0.3, 0.3], [1e9, 1e9 + 1e-3], [0.1 + 0.2 - 0.3, 0.0]]
)
def test_rounding_error_is_not_a_reward_difference(rewards: list[float]) -> None:
    group = judged(*(sample(index=index, reward=reward) for index, reward in enumerate(rewards)))
    assert outcomes(group) == [Outcome.FILTERED] * len(rewards)


@pytest.mark.parametrize("rewards", [[1e-9, 0.0], [2e-7, 3e-7], [-1e-8, 1e-8], [1e-6, 1.1e-6]])
def test_small_reward_differences_are_trained(rewards: list[float]) -> None:
    group = judged(*(sample(index=index, reward=reward) for index, reward in enumerate(rewards)))
    assert outcomes(group) == [Outcome.TRAINED] * len(rewards)


def test_samples_of_rolled_back_versions_are_superseded() -> None:
    mixed = msgspec.structs.replace(sample(index=2), spans=(VersionSpan(1, 2, 5), VersionSpan(2, 3, 6)))
    members = [sample(index=0, version=2, reward=1.0), sample(index=1, version=7), mixed, sample(index=3, version=9)]
    group = judged(*members, version=9, abandoned=[(6, 8)])
    assert outcomes(group) == [Outcome.STALE, Outcome.SUPERSEDED, Outcome.SUPERSEDED, Outcome.FILTERED]
    assert group.decisions[1].reason == "sampled under version 7; the run has gone back behind version 6"


def test_training_error_is_the_reason_of_its_samples() -> None:
    group = judged(sample(index=0, reward=1.0), sample(index=1), sample(index=2, failure="lost"))
    after = mark_failed(group, IndexError("no such row"))
    assert outcomes(after) == [Outcome.INFRA_FAILED] * 3 and not after.trained
    assert after.decisions[0].reason == "to train on its group raised IndexError: no such row"
    assert after.decisions[2].reason == "lost"
    for outcome in outcomes_of([mark_failed(group, ValueError("\ud800" * 999))], step=1, policy_version=0, now=0.0):
        encode(outcome)


def test_staleness_counts_from_the_oldest_token() -> None:
    mixed = msgspec.structs.replace(sample(), spans=(VersionSpan(1, 2, 3), VersionSpan(2, 3, 5)))
    assert staleness(mixed, 6) == 3
    assert staleness(msgspec.structs.replace(mixed, spans=()), 6) == 0


def test_policy_republished_by_a_rollback_keeps_its_age() -> None:
    """Version 5 was republished as version 11."""
    members = [sample(index=0, version=5, reward=1.0), sample(index=1, version=3), sample(index=2, version=2)]
    group = judged(*members, version=11, abandoned=[(6, 10)])
    assert outcomes(group) == [Outcome.TRAINED, Outcome.TRAINED, Outcome.STALE]


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.integers(1, 4)), max_size=8), st.integers(0, 3))
def test_staleness_counts_the_optimizer_steps_of_the_policy(history: list[tuple[int, bool, int]], most: int) -> None:
    """The history has steps and rollbacks; forgotten rollbacks make no stale sample fresh, and no fresh sample
    stale."""
    steps_of, version = {0: 0}, 0
    abandoned: list[tuple[int, int]] = []
    kept: dict[int, tuple[tuple[int, int], ...]] = {0: ()}  # in the checkpoint of each version
    for steps, goes_back, by in history:
        for _ in range(steps):
            steps_of[version + 1], version = steps_of[version] + 1, version + 1
            kept[version] = still_relevant(kept[version - 1], version, max_staleness=most)
        behind = version - by
        if goes_back and behind in steps_of and not any(behind < last + 1 for _, last in abandoned):
            for lost in range(behind + 1, version + 1):
                del steps_of[lost]
            abandoned.append((behind + 1, version))
            kept[version + 1] = still_relevant((*kept[behind], abandoned[-1]), version + 1, max_staleness=most)
            steps_of[version + 1], version = steps_of[behind], version + 1
    for since, steps in steps_of.items():
        age = steps_of[version] - steps
        assert staleness(sample(version=since), version, abandoned) == age
        assert (staleness(sample(version=since), version, kept[version]) > most) == (age > most)


def shifted(turns: tuple[SampleTurn, ...], by: int) -> tuple[SampleTurn, ...]:
    return tuple(msgspec.structs.replace(turn, start=turn.start + by, end=turn.end + by) for turn in turns)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"loss_mask": b"\0\1"}, "3 tokens, a mask of 2 and 3 logprobs do not fit"),
        ({"tokens": b"\0" * 13}, "whole number"),
        ({"tokens": pack_tokens([1, 2, 50])}, "token 50 is outside of the vocabulary of 50"),
        ({"logprobs": pack_logprobs([0.0, -0.5, float("nan")])}, "a logprob of nan is not that of a token"),
        ({"logprobs": pack_logprobs([0.0, -0.5, float("-inf")])}, "a logprob of -inf"),
        ({"logprobs": pack_logprobs([0.0, -0.5, -9999.0])}, "a logprob of -9999"),
        ({"logprobs": pack_logprobs([0.0, -100.0, -0.5])}, "a logprob of -100"),
        ({"logprobs": pack_logprobs([0.0, -0.5, 0.5])}, "a logprob of 0.5"),
        ({"logprobs": pack_logprobs([-9999.0, -0.5, -80.0])}, ""),
        ({"logprobs": pack_logprobs([0.0, -0.5, 1e-6])}, ""),
        ({"loss_mask": b"\0\1\2"}, "more than 0 and 1"),
        ({"reward": None, "failure": "the environment broke"}, "the environment broke"),
        ({"spans": ()}, "nothing says under which version token 1 was sampled"),
        ({"spans": (VersionSpan(0, 2, 0),)}, "nothing says under which version token 2 was sampled"),
        ({"loss_mask": b"\1\1\1"}, "its first token is a sampled one"),
        ({"turns": ()}, "its turns are not the tokens that were sampled"),
        ({"turns": shifted(turns_of([0, 1, 1]), 1)}, "turn 0 lies outside"),
        ({"turns": turns_of([0, 1, 1]) * 2}, "turn 0 lies outside of its tokens or on another turn"),
        ({}, ""),
    ],
)
def test_unusable_sample_has_a_reason(change: dict[str, object], reason: str) -> None:
    flaw = sample_error(msgspec.structs.replace(sample(), **change), vocabulary=50, context_tokens=6)
    assert reason in flaw if flaw else not reason


@pytest.mark.parametrize(
    ("one", "outcome", "reason"),
    [
        (sample(tokens=[1] * 7), Outcome.INFRA_FAILED, "its 7 tokens are more than the 6 that the model takes"),
        (sample(tokens=[1]), Outcome.FILTERED, "no token of it was sampled"),
        (sample(tokens=[1], mask=[1]), Outcome.INFRA_FAILED, "its first token is a sampled one"),
        (sample(tokens=[]), Outcome.FILTERED, "no token of it was sampled"),
        (sample(mask=[0, 0, 0]), Outcome.FILTERED, "no token of it was sampled"),
        (sample(sampling=Sampling(temperature=0)), Outcome.FILTERED, "temperature 0 draws the likeliest token"),
        (sample(sampling=Sampling(top_p=0.9)), Outcome.FILTERED, "top_p 0.9"),
    ],
)
def test_sample_too_large_or_without_probability_is_settled_before_the_step(
    one: Sample, outcome: Outcome, reason: str
) -> None:
    group = judged(one, sample(index=1, reward=1.0), sample(index=2, reward=0.0))
    assert outcomes(group) == [outcome, Outcome.TRAINED, Outcome.TRAINED]
    assert reason in group.decisions[0].reason


def test_surplus_and_stale_endings_have_outcomes_of_their_own() -> None:
    group = judged(
        sample(index=0, reward=1.0),
        sample(index=1, reward=0.0),
        sample(index=2, reward=None, ended=Ending.SURPLUS),
        sample(index=3, reward=None, ended=Ending.STALE),
    )
    assert outcomes(group) == [Outcome.TRAINED, Outcome.TRAINED, Outcome.SURPLUS, Outcome.STALE]


@given(st.integers(0, 40), st.integers(0, 9), st.lists(st.integers(1, 40), max_size=6, unique=True))
def test_oldest_fresh_version_is_the_oldest_within_the_bound(version: int, bound: int, edges: list[int]) -> None:
    ordered = sorted(edge for edge in edges if edge < version)
    abandoned = [
        (first, last)
        for first, last, after in zip(ordered[::2], ordered[1::2], [*ordered[2::2], version], strict=False)
        if last + 1 < after
    ]
    fresh = [since for since in range(version + 1) if steps_between(since, version, abandoned) <= bound]
    assert oldest_fresh_version(version, abandoned, max_staleness=bound) == min(fresh)
