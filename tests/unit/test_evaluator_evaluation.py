"""The core of an evaluation: each prompt gets exactly its samples, whatever fails and however often it starts again."""

import random
from collections import Counter

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.schemas.prompts import Prompt, PromptSampling, is_evaluation, trajectory_id
from rose.schemas.samples import Outcome
from rose.schemas.wire import decode, encode
from rose.workers.evaluator.evaluation import ROUNDS, Evaluation, EvaluationSet, SampleFacts, verdict_of

VERSION = 8


def tasks(count: int, samples: int) -> EvaluationSet:
    prompts = tuple(Prompt(group_id=f"task-{n}", group_size=1, environment="calculator") for n in range(count))
    return EvaluationSet("held-out", prompts, samples)


def facts(name: str, kind: str) -> SampleFacts:
    """A sample that counts, or is `mixed` of two versions, or has `failed`."""
    if kind == "failed":
        return SampleFacts(name, None, None, "the environment crashed", -1, -1)
    return SampleFacts(name, 1.0, True, "", VERSION, VERSION + (kind == "mixed"))


class Log:
    """Acts on prompts as environment workers do: every group opens once, and every trajectory ends once."""

    def __init__(self, draw: random.Random, kinds: list[str]) -> None:
        self._draw, self._kinds = draw, kinds
        self.groups: dict[str, Prompt] = {}
        self.unfinished: list[str] = []
        self.samples: list[SampleFacts] = []

    def submit(self, prompts: list[Prompt]) -> None:
        for prompt in prompts:
            known = self.groups.setdefault(prompt.group_id, prompt)
            assert known == prompt, "a prompt that is asked for again is the same"
            if known is prompt:
                self.unfinished += [trajectory_id(prompt.group_id, index) for index in range(prompt.group_size)]

    def finish_some(self) -> list[SampleFacts]:
        self._draw.shuffle(self.unfinished)
        count = self._draw.randint(1, max(1, len(self.unfinished)))
        ended, self.unfinished = self.unfinished[:count], self.unfinished[count:]
        fresh = [facts(name, self._draw.choice(self._kinds)) for name in ended]
        self.samples += fresh
        return fresh


@settings(deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
    st.sampled_from([["good"], ["good", "good", "mixed"], ["good", "failed"], ["failed"]]),
)
def test_each_prompt_gets_exactly_its_samples_through_kills_at_any_point(
    count: int, samples: int, window: int, draw: random.Random, kinds: list[str]
) -> None:
    chosen, log = tasks(count, samples), Log(draw, kinds)
    evaluation = Evaluation(chosen, VERSION, window=window)
    while not evaluation.is_ended:
        log.submit(evaluation.prompts())
        fresh = log.finish_some()
        if draw.random() < 0.3:  # killed: a new one reads all samples again, in another order
            evaluation = Evaluation(chosen, VERSION, window=window)
            fresh = draw.sample(log.samples, len(log.samples))
        for sample in fresh:
            evaluation.on_sample(sample)
    assert not log.unfinished, "every trajectory that was asked for has ended"
    verdicts = [verdict_of(sample, VERSION) for sample in log.samples]
    good = sum(not verdict.reason for verdict in verdicts)
    assert evaluation.counted == good
    assert evaluation.failed == sum(verdict.outcome is Outcome.INFRA_FAILED for verdict in verdicts)
    assert evaluation.mismatched == len(verdicts) - good - evaluation.failed
    assert all(len(own) <= samples for own in evaluation.counted_samples)
    assert evaluation.is_complete == (good == count * samples)
    assert bool(evaluation.incomplete_reason) != evaluation.is_complete
    rounds = Counter(name.rsplit(":", 1)[0] for name in log.groups)
    assert len(rounds) == count
    assert max(rounds.values()) <= ROUNDS


def test_prompts_of_the_log_are_pinned_and_of_a_class_of_their_own() -> None:
    chosen = tasks(2, 3)
    [first, second] = Evaluation(chosen, VERSION, window=9).prompts()
    assert (first.pinned_version, first.evaluation, first.group_size) == (VERSION, "held-out", 3)
    assert all(is_evaluation(each.group_id) for each in (first, second))
    assert first.seed == chosen.prompts[0].task_seed, "the task is that of the file, not of the version"
    assert decode(Prompt, encode(first)) == first


def test_window_limits_the_prompts_that_are_sampled_at_once() -> None:
    evaluation = Evaluation(tasks(4, 1), VERSION, window=2)
    [first, second] = evaluation.prompts()
    evaluation.on_sample(facts(f"{second.group_id}:0", "good"))
    assert [each.group_id for each in evaluation.prompts()] == [
        first.group_id,
        second.group_id.replace(":1:0", ":2:0"),
    ]


def test_samples_of_other_evaluations_and_second_samples_change_nothing() -> None:
    evaluation = Evaluation(tasks(1, 2), VERSION, window=1)
    [prompt] = evaluation.prompts()
    other = Evaluation(tasks(1, 2), VERSION + 1, window=1).prompts()[0]
    for name in (prompt.group_id, other.group_id, "evaluation:held-out:zz", "group"):
        evaluation.on_sample(facts(f"{name}:0", "good"))
        evaluation.on_sample(facts(f"{name}:0", "failed"))
    assert (evaluation.counted, evaluation.is_ended) == (0, False)
    evaluation.on_sample(facts(f"{prompt.group_id}:1", "good"))
    assert (evaluation.counted, evaluation.is_complete) == (2, True)


def test_digest_follows_tasks_sampling_and_samples_alone() -> None:
    chosen = tasks(2, 3)
    renamed = msgspec.structs.replace(chosen.prompts[0], seed=chosen.prompts[0].task_seed, group_id="x", note="n")
    assert EvaluationSet("other", (renamed, chosen.prompts[1]), 3).digest == chosen.digest
    greedy = msgspec.structs.replace(chosen.prompts[0], sampling=PromptSampling(temperature=0.0))
    assert EvaluationSet("held-out", (greedy, chosen.prompts[1]), 3).digest != chosen.digest
    assert tasks(2, 4).digest != chosen.digest


def test_verdict_names_the_versions_that_do_not_count() -> None:
    assert not verdict_of(facts("a", "good"), VERSION).reason
    assert "versions 8 to 9, and pinned to version 8" in verdict_of(facts("a", "mixed"), VERSION).reason
    assert "is of version 8, and pinned to version 7" in verdict_of(facts("a", "good"), 7).reason
    assert verdict_of(facts("a", "failed"), VERSION).outcome is Outcome.INFRA_FAILED
