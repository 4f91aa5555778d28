"""One evaluation of one policy version: which prompts are asked for, and which samples count.

Keeps true
- A sample counts if the infrastructure did not fail and every sampled token is of the evaluated version.
- An evaluation is complete once each prompt has exactly as many counted samples as were asked for. What does not count
  is asked for again, up to ROUNDS times: as one group of the missing size, with the same task.
- The ids of groups follow from the set, the version, the prompt and the round. So an evaluator that starts again asks
  for the same groups, which environment workers know, and reads the same samples.
- The state is a function of the set of samples: their order does not matter.

Pure: no clock, no I/O.

Example (1 prompt, 4 samples, version 8)
    round 0   group `evaluation:held-out:5f3a91c0:8:0:0` of 4   3 samples of version 8, 1 of versions 8 and 9
    round 1   group `evaluation:held-out:5f3a91c0:8:0:1` of 1   1 sample of version 8: complete
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from rose.schemas.prompts import EVALUATION_PREFIX, Prompt, PromptSampling, group_id_of, trajectory_id
from rose.schemas.samples import Outcome, Sample
from rose.workers.evaluator.scores import Judged

ROUNDS = 3
"""How often samples of a prompt are asked for. A prompt whose last round leaves some missing ends its evaluation
incomplete."""

REASON_CHARACTERS = 300
"""Longest part of a failure in the reason of a result."""


class SampleFacts(NamedTuple):
    """Facts of a sample that decide whether and how it counts."""

    trajectory_id: str
    reward: float | None
    success: bool | None
    failure: str
    lowest_version: int
    """Oldest version of its tokens; -1 if none was sampled."""
    highest_version: int

    @classmethod
    def of(cls, sample: Sample) -> "SampleFacts":
        """Return the facts of a sample."""
        versions = [span.version for span in sample.spans]
        return cls(
            sample.trajectory_id,
            sample.reward,
            sample.success,
            sample.failure or ("" if sample.reward is not None else "it has no reward"),
            min(versions, default=-1),
            max(versions, default=-1),
        )


class Verdict(NamedTuple):
    """The outcome of a trajectory of an evaluation."""

    outcome: Outcome
    reason: str = ""
    """Why it does not count; empty if it does."""


COUNTS = Verdict(Outcome.EVALUATED)
"""The verdict of a sample that counts."""

ENDED = Verdict(Outcome.EVALUATED, "its evaluation has ended without it")


def verdict_of(sample: SampleFacts, version: int) -> Verdict:
    """Return whether a sample counts in an evaluation of `version`."""
    if sample.failure:
        return Verdict(Outcome.INFRA_FAILED, sample.failure)
    lowest, highest = sample.lowest_version, sample.highest_version
    if (lowest, highest) == (version, version) or highest < 0:
        return COUNTS
    sampled = f"version {lowest}" if lowest == highest else f"versions {lowest} to {highest}"
    return Verdict(Outcome.EVALUATED, f"it does not count: it is of {sampled}, and pinned to version {version}")


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """The prompts of a set, and how many samples each gets."""

    name: str
    prompts: tuple[Prompt, ...]
    """The group ids and group sizes of the prompts do not count, but a prompt without a seed has that of its id."""
    samples: int

    @property
    def digest(self) -> str:
        """Digest of the tasks, their sampling, and the number of samples: 8 hexadecimal digits."""
        tasks = [
            [each.environment, each.task_seed, each.arguments, each.sampling, each.max_turns] for each in self.prompts
        ]
        encoded = msgspec.msgpack.encode([tasks, self.samples], order="deterministic")
        return hashlib.blake2b(encoded, digest_size=4).hexdigest()

    @property
    def prefix(self) -> str:
        """Beginning of the ids of all groups of sets of this name."""
        return f"{EVALUATION_PREFIX}{self.name}:"


@dataclass(slots=True)
class _PromptState:
    round: int = 0
    size: int = 0
    """Number of trajectories of the present round."""
    counted: list[Judged] = field(default_factory=list)
    is_done: bool = False
    reason: str = ""
    """Why the last sample did not count."""


class Evaluation:
    """The evaluation of one version."""

    def __init__(self, tasks: EvaluationSet, version: int, *, window: int) -> None:
        """`window`: most prompts that are asked for at once."""
        self.version = version
        self.mismatched = self.failed = 0
        """Samples of whole rounds that do not count."""
        self._set, self._window = tasks, window
        self._prefix = f"{tasks.prefix}{tasks.digest}:{version}:"
        self._states = [_PromptState(size=tasks.samples) for _ in tasks.prompts]
        self._begun = 0
        """Prompts that were asked for: the first ones of the set."""
        self._samples: dict[str, dict[str, SampleFacts]] = {}
        """Samples by group and trajectory, of rounds that are not counted yet."""

    @property
    def is_ended(self) -> bool:
        """Whether nothing is missing any more, or can be had."""
        return all(state.is_done for state in self._states)

    @property
    def is_complete(self) -> bool:
        """Whether every prompt has its samples."""
        return all(len(state.counted) == self._set.samples for state in self._states)

    @property
    def done_prompts(self) -> int:
        """Number of prompts of which nothing is missing any more, or can be had."""
        return sum(state.is_done for state in self._states)

    @property
    def counted(self) -> int:
        """Number of samples that count."""
        return sum(len(state.counted) for state in self._states)

    @property
    def counted_samples(self) -> Sequence[Sequence[Judged]]:
        """The samples that count, by prompt."""
        return [state.counted for state in self._states]

    @property
    def incomplete_reason(self) -> str:
        """Why prompts lack samples; empty if none that is done lacks any."""
        lacking = [state for state in self._states if state.is_done and len(state.counted) < self._set.samples]
        if not lacking:
            return ""
        last = lacking[0].reason[:REASON_CHARACTERS]
        return f"{len(lacking)} prompts lack samples after {ROUNDS} rounds; a sample of one of them: {last}"

    def prompts(self) -> list[Prompt]:
        """Return the prompts that have to be on the log now; the same ones come again until their round has ended."""
        open_prompts = sum(not state.is_done for state in self._states[: self._begun])
        self._begun = min(len(self._states), self._begun + max(0, self._window - open_prompts))
        return [
            self._prompt(number, state) for number, state in enumerate(self._states[: self._begun]) if not state.is_done
        ]

    def on_sample(self, sample: SampleFacts) -> None:
        """Take a sample; that of another evaluation, and a second one of a trajectory, changes nothing."""
        group_id = group_id_of(sample.trajectory_id)
        place = self._place(group_id)
        if place is None:
            return
        number, round_ = place
        if round_ < self._states[number].round:
            return
        self._samples.setdefault(group_id, {}).setdefault(sample.trajectory_id, sample)
        self._advance(number)

    def owns(self, trajectory: str) -> bool:
        """Return whether a trajectory may be one of this evaluation."""
        return self._place(group_id_of(trajectory)) is not None

    def _place(self, group_id: str) -> tuple[int, int] | None:
        """Return the number of a group's prompt, and its round."""
        if not group_id.startswith(self._prefix):
            return None
        number, _, round_ = group_id[len(self._prefix) :].partition(":")
        if not (number.isdecimal() and round_.isdecimal()):
            return None
        place = int(number), int(round_)
        return place if place[0] < len(self._states) and place[1] < ROUNDS else None

    def _advance(self, number: int) -> None:
        state = self._states[number]
        while not state.is_done:
            group_id = self._group_id(number, state.round)
            found = self._samples.get(group_id, {})
            if any(trajectory_id(group_id, index) not in found for index in range(state.size)):
                return
            del self._samples[group_id]
            for index in range(state.size):
                self._count(state, found[trajectory_id(group_id, index)])
            state.round, state.size = state.round + 1, self._set.samples - len(state.counted)
            state.is_done = not state.size or state.round == ROUNDS

    def _count(self, state: _PromptState, sample: SampleFacts) -> None:
        verdict = verdict_of(sample, self.version)
        if verdict is COUNTS:
            assert sample.reward is not None
            state.counted.append(Judged(sample.reward, sample.success))
            return
        state.reason = verdict.reason
        if verdict.outcome is Outcome.INFRA_FAILED:
            self.failed += 1
        else:
            self.mismatched += 1

    def _group_id(self, number: int, round_: int) -> str:
        return f"{self._prefix}{number}:{round_}"

    def _prompt(self, number: int, state: _PromptState) -> Prompt:
        task = self._set.prompts[number]
        return msgspec.structs.replace(
            task,
            group_id=self._group_id(number, state.round),
            group_size=state.size,
            seed=task.task_seed,
            evaluation=self._set.name,
            pinned_version=self.version,
        )


def held_out_prompts(
    environment: str, arguments: dict[str, object], *, first_seed: int, count: int, max_turns: int
) -> Iterator[Prompt]:
    """Yield the prompts of `count` tasks with consecutive seeds."""
    for number in range(count):
        yield Prompt(
            group_id=f"held-out.{number}",
            group_size=1,
            environment=environment,
            seed=first_seed + number,
            arguments=arguments,
            sampling=PromptSampling(),
            max_turns=max_turns,
        )
