"""The attempts of a group side by side: what each read and wrote by turn, where it ran, and what it was worth.

Keeps true
- Every token of a sample is in exactly one text: the observation before a turn, the action of a turn, or the rest.
- Without a tokenizer the texts are None, and the numbers of tokens are there all the same.
- Terminal and page show the same words.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rose.pipeline.clock import format_utc
from rose.pipeline.samples.advantages import Advantage
from rose.pipeline.samples.log import FinishedGroup, FinishedTrajectory
from rose.pipeline.samples.serving_load import ServingLoads, describe_load
from rose.schemas.arrays import ITEM_BYTES, count, unpack_tokens
from rose.schemas.prompts import trajectory_id
from rose.schemas.samples import Sample, SampleTurn

Decode = Callable[[Sequence[int]], str]
"""Decodes token ids to text."""

SUCCESS = {True: "solved", False: "not solved", None: "success not known"}


@dataclass(frozen=True, slots=True)
class Passage:
    """Tokens that belong together."""

    tokens: int
    text: str | None
    """None without a tokenizer."""

    @property
    def shown(self) -> str:
        """The text, or the number of tokens in its place."""
        return f"({self.tokens} tokens)" if self.text is None else self.text


@dataclass(frozen=True, slots=True)
class AttemptTurn:
    """One turn of a trajectory."""

    number: int
    observation: Passage
    action: Passage
    place: str
    """Where it ran and under which versions."""
    duration: str
    serving: str
    """Load of serving in the engine meanwhile."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One trajectory of the group."""

    trajectory_id: str
    facts: tuple[tuple[str, str], ...]
    """Names and values, the same names for each attempt."""
    turns: tuple[AttemptTurn, ...]
    rest: Passage
    """Tokens that the trajectory read after its last turn."""


@dataclass(frozen=True, slots=True)
class GroupView:
    """A group, ready to be shown."""

    group_id: str
    task: str
    attempts: tuple[Attempt, ...]
    missing: tuple[str, ...]
    """Trajectories without a sample on the log."""

    @property
    def turns(self) -> int:
        """Number of turns of the longest attempt."""
        return max((len(attempt.turns) for attempt in self.attempts), default=0)


def view_of(
    group: FinishedGroup, advantages: Mapping[str, Advantage], loads: ServingLoads, decode: Decode | None
) -> GroupView:
    """Return the view of a group."""
    first = group.members[0].sample
    known = {each.sample.trajectory_id for each in group.members}
    names = (trajectory_id(group.group_id, index) for index in range(group.size))
    return GroupView(
        group_id=group.group_id,
        task=f"{first.environment}, seed {first.seed}, {len(group.members)} of {group.size} attempts on the log",
        attempts=tuple(
            Attempt(
                trajectory_id=each.sample.trajectory_id,
                facts=_facts(each, advantages[each.sample.trajectory_id]),
                turns=tuple(_turns(each.sample, loads, decode)),
                rest=_passage(tokens_of(each.sample)[_end(each.sample) :], decode),
            )
            for each in group.members
        ),
        missing=tuple(name for name in names if name not in known),
    )


def _facts(found: FinishedTrajectory, advantage: Advantage) -> tuple[tuple[str, str], ...]:
    sample, outcome = found.sample, found.outcome
    ended = sample.ended.value if not sample.failure else f"failed: {sample.failure}"
    settled = "not settled yet"
    if outcome is not None:
        reason = f": {outcome.reason}" if outcome.reason else ""
        settled = f"{outcome.outcome.value} at step {outcome.step}{reason}"
    return (
        ("reward", "none" if sample.reward is None else f"{sample.reward:g}"),
        ("success", SUCCESS[sample.success]),
        ("advantage", advantage.reason if advantage.value is None else f"{advantage.value:+.4f}"),
        ("outcome", settled),
        ("versions", version_span(found.versions)),
        ("end", f"{ended}, {format_utc(sample.completed_at)}"),
        ("tokens", f"{found.sampled_tokens} sampled of {len(sample.loss_mask)}, {len(sample.turns)} turns"),
    )


def version_span(versions: tuple[int, int] | None) -> str:
    """Return the policy versions of a trajectory or a turn in words: `3`, `3-4`, or `none`."""
    if versions is None:
        return "none"
    return str(versions[0]) if versions[0] == versions[1] else f"{versions[0]}-{versions[1]}"


def tokens_of(sample: Sample) -> list[int]:
    """Return the tokens of a sample; an incomplete one at the end, which no trainer takes, is cut off."""
    return unpack_tokens(whole(sample.tokens))


def whole(packed: bytes) -> bytes:
    """Return a packed array without an incomplete element at its end."""
    return packed[: ITEM_BYTES * count(packed)]


def _end(sample: Sample) -> int:
    return max((turn.end for turn in sample.turns), default=0)


def _turns(sample: Sample, loads: ServingLoads, decode: Decode | None) -> list[AttemptTurn]:
    tokens, turns, before = tokens_of(sample), [], 0
    for turn in sample.turns:
        times = turn.times
        took = times.finished_at - times.requested_at if times.finished_at and times.requested_at else 0.0
        turns.append(
            AttemptTurn(
                number=turn.turn,
                observation=_passage(tokens[before : turn.start], decode),
                action=_passage(tokens[turn.start : turn.end], decode),
                place=_place(sample, turn),
                duration=f"{took:.3f} s from request to result, {turn.environment_seconds:.3f} s environment",
                serving=describe_load(loads.of(sample.trajectory_id, turn)),
            )
        )
        before = turn.end
    return turns


def _place(sample: Sample, turn: SampleTurn) -> str:
    versions = [span.version for span in sample.spans if span.start < turn.end and span.end > turn.start]
    span = version_span((min(versions), max(versions)) if versions else None)
    again = f", attempt {turn.attempt}" if turn.attempt else ""
    return f"{turn.worker}{again}, version {span}, {turn.cached_tokens} of {turn.start} tokens cached"


def _passage(tokens: Sequence[int], decode: Decode | None) -> Passage:
    return Passage(len(tokens), None if decode is None else decode(tokens))
