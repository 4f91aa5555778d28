"""Group assembly: every trajectory of a complete group is settled once, whatever comes in whatever order."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.accounting.groups import (
    AssembledGroup,
    GroupAssembly,
    GroupRules,
    Taken,
    sample_flaw,
    settle_group,
    staleness,
)
from schemas.arrays import pack_logprobs, pack_tokens
from schemas.prompts import trajectory_id
from schemas.samples import Outcome, Sample
from schemas.turns import VersionSpan

RULES = GroupRules(groups_per_step=2, max_staleness=2, vocabulary=50)


def sample(
    group: str = "g",
    index: int = 0,
    *,
    size: int = 4,
    reward: float | None = 0.0,
    version: int = 0,
    tokens: Sequence[int] = (1, 2, 3),
    failure: str = "",
) -> Sample:
    mask = [0, *[1] * (len(tokens) - 1)]
    return Sample(
        trajectory_id=trajectory_id(group, index),
        group_id=group,
        group_size=size,
        environment="calculator",
        seed=1,
        tokens=pack_tokens(tokens),
        loss_mask=bytes(mask),
        logprobs=pack_logprobs([-0.5 * on for on in mask]),
        spans=(VersionSpan(1, len(tokens), version),),
        turns=(),
        reward=reward,
        success=reward == 1.0,
        failure=failure,
        completed_at=0.0,
    )


def outcomes(group: AssembledGroup) -> list[Outcome]:
    return [settled.outcome for settled in group.settled]


@st.composite
def offered(draw: st.DrawFn) -> list[Sample]:
    """Samples of some groups, in any order, some of them more than once, some groups not complete."""
    samples = []
    for number in range(draw(st.integers(1, 6))):
        size = draw(st.integers(1, 4))
        for index in range(size):
            if draw(st.integers(0, 9)):
                one = sample(
                    f"g{number}",
                    index,
                    size=size,
                    reward=draw(st.sampled_from([None, 0.0, 1.0, float("nan")])),
                    version=draw(st.integers(0, 4)),
                    failure=draw(st.sampled_from(["", "", "no executor"])),
                )
                samples += [one] * draw(st.integers(1, 3))
    return list(draw(st.permutations(samples)))


def run(samples: Sequence[Sample], rules: GroupRules) -> tuple[GroupAssembly, list[tuple[AssembledGroup, ...]]]:
    """Offer all, taking a step as soon as there is one; the version counts the steps."""
    assembly = GroupAssembly(rules)
    steps: list[tuple[AssembledGroup, ...]] = []
    for one in samples:
        assembly.offer(one)
        while (step := assembly.take(len(steps))) is not None:
            steps.append(step)
    return assembly, steps


@given(offered(), st.integers(1, 3))
def test_every_trajectory_is_settled_once_or_held(samples: list[Sample], groups_per_step: int) -> None:
    rules = GroupRules(groups_per_step=groups_per_step, max_staleness=1, vocabulary=50)
    assembly, steps = run(samples, rules)
    settled = [end.trajectory_id for step in steps for group in step for end in group.settled]
    held = [one.trajectory_id for one in assembly.held]
    assert sorted(settled + held) == sorted({one.trajectory_id for one in samples})
    assert all(len(step) == groups_per_step for step in steps)


@given(offered())
def test_the_same_order_gives_the_same_decisions(samples: list[Sample]) -> None:
    first, second = run(samples, RULES), run(samples, RULES)
    assert repr(first[1]) == repr(second[1])
    assert repr(first[0].held) == repr(second[0].held)


@given(offered(), st.data())
def test_held_samples_offered_again_restore_the_state(samples: list[Sample], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(samples)))
    whole, steps = run(samples, RULES)
    before, done = run(samples[:cut], RULES)
    after = GroupAssembly(RULES, settled=before.settled, settled_groups=before.settled_groups)
    for one in before.held:
        assert after.offer(one) is Taken.HELD
    for one in samples[cut:]:
        after.offer(one)
        while (step := after.take(len(done))) is not None:
            done.append(step)
    assert repr(done) == repr(steps)
    assert repr(after.held) == repr(whole.held)


@given(offered())
def test_only_groups_that_teach_something_are_trained(samples: list[Sample]) -> None:
    for step in run(samples, RULES)[1]:
        for group in step:
            trained = [end.trajectory_id for end in group.settled if end.outcome is Outcome.TRAINED]
            assert trained == [one.trajectory_id for one in group.trained]
            assert not trained or len({one.reward for one in group.trained}) > 1


@given(offered(), st.integers(1, 5), st.integers(1, 3))
def test_a_run_ends_with_its_total(samples: list[Sample], total_groups: int, groups_per_step: int) -> None:
    rules = GroupRules(groups_per_step=groups_per_step, max_staleness=9, vocabulary=50, total_groups=total_groups)
    assembly, steps = run(samples, rules)
    complete = len({one.group_id for one in samples}) - len({one.group_id for one in assembly.held})
    assert sum(map(len, steps)) == complete <= total_groups
    assert (assembly.step_size == 0) == (complete == total_groups)


def test_groups_are_taken_in_the_order_in_which_they_became_complete() -> None:
    order = [("a", 0), ("b", 0), ("c", 0), ("b", 1), ("c", 1), ("a", 1)]
    _, steps = run([sample(group, index, size=2, reward=float(index)) for group, index in order], RULES)
    assert [[group.group_id for group in step] for step in steps] == [["b", "c"]]
    assert [one.trajectory_id for one in steps[0][0].samples] == ["b:0", "b:1"]


def test_a_step_is_made_again_from_the_same_groups() -> None:
    assembly = GroupAssembly(RULES)
    for group, index in [("a", 0), ("a", 1), ("b", 0), ("c", 0), ("c", 1)]:
        assembly.offer(sample(group, index, size=2, reward=float(index)))
    assert assembly.take(0, ["c", "b"]) is None
    assembly.offer(sample("b", 1, size=2))
    step = assembly.take(0, ["c", "b"])
    assert step is not None
    assert [group.group_id for group in step] == ["c", "b"]


@pytest.mark.parametrize("again", ["held", "settled"])
def test_a_second_sample_of_a_trajectory_is_dropped(again: str) -> None:
    assembly = GroupAssembly(GroupRules(groups_per_step=1, max_staleness=0, vocabulary=50))
    assert assembly.offer(sample(index=0, size=2, reward=1.0)) is Taken.HELD
    if again == "settled":
        assembly.offer(sample(index=1, size=2))
        assert assembly.take(0) is not None
    assert assembly.offer(sample(index=0, size=2)) is Taken.DUPLICATE


@pytest.mark.parametrize("name", ["g:4", "g:-1", "g:01", "g:x", "h:0", "g", "g:٣"])
def test_a_sample_that_is_none_of_its_group_is_dropped(name: str) -> None:
    stranger = msgspec.structs.replace(sample(size=4), trajectory_id=name)
    assert GroupAssembly(RULES).offer(stranger) is Taken.STRANGER


def test_the_rest_of_a_group_is_trained_on_when_two_remain() -> None:
    members = [sample(index=0, reward=1.0, version=2), sample(index=1, version=0), sample(index=2, reward=None)]
    group = settle_group("g", [*members, sample(index=3, version=2)], 3, rules=RULES)
    assert outcomes(group) == [Outcome.TRAINED, Outcome.STALE, Outcome.INFRA_FAILED, Outcome.TRAINED]
    assert [one.trajectory_id for one in group.trained] == ["g:0", "g:3"]


def test_who_is_left_alone_is_filtered() -> None:
    group = settle_group("g", [sample(index=0, reward=1.0), sample(index=1, failure="lost")], 0, rules=RULES)
    assert outcomes(group) == [Outcome.FILTERED, Outcome.INFRA_FAILED]
    assert not group.trained


def test_equal_rewards_are_filtered() -> None:
    group = settle_group("g", [sample(index=index, reward=1.0) for index in range(3)], 0, rules=RULES)
    assert outcomes(group) == [Outcome.FILTERED] * 3


def test_staleness_counts_from_the_oldest_token() -> None:
    mixed = msgspec.structs.replace(sample(), spans=(VersionSpan(1, 2, 3), VersionSpan(2, 3, 5)))
    assert staleness(mixed, 6) == 3
    assert staleness(msgspec.structs.replace(mixed, spans=()), 6) == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"loss_mask": b"\0\1"}, "3 tokens, a mask of 2 and 3 logprobs do not fit"),
        ({"tokens": b"\0" * 13}, "whole number"),
        ({"tokens": pack_tokens([1, 2, 50])}, "token 50 is outside of the vocabulary of 50"),
        ({"logprobs": pack_logprobs([0.0, -0.5, float("nan")])}, "no finite number"),
        ({"loss_mask": b"\0\1\2"}, "more than 0 and 1"),
        ({"reward": float("inf")}, "no reward"),
        ({"reward": None, "failure": "the environment broke"}, "the environment broke"),
        ({}, ""),
    ],
)
def test_what_cannot_be_learned_from_says_why(change: dict[str, object], reason: str) -> None:
    flaw = sample_flaw(msgspec.structs.replace(sample(), **change), vocabulary=50)
    assert reason in flaw
    assert bool(flaw) == bool(reason)
