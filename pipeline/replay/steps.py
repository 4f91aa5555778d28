"""The steps of a walk through a trajectory: its prompt, each attempt of each turn, and its end."""

from collections.abc import Iterator
from typing import NamedTuple

from rose.pipeline.replay.description import (
    Decode,
    describe_applied,
    describe_attempt,
    describe_outcomes,
    describe_prompt,
    describe_request,
    describe_sample,
    length_after,
)
from rose.pipeline.replay.records import Episode, EpisodeTurn, TrajectoryHistory


class Step(NamedTuple):
    """One screen of the walk."""

    title: str
    lines: tuple[str, ...]


def trajectory_steps(history: TrajectoryHistory, decode: Decode | None = None) -> list[Step]:
    """Return the steps of a trajectory, at least two. `decode` adds the text of observations and actions."""
    steps = [Step(f"trajectory {history.trajectory_id}", tuple(describe_prompt(history)))]
    for number, episode in enumerate(history.episodes, 1):
        life = f"life {number} of {len(history.episodes)}, " if len(history.episodes) > 1 else ""
        steps += (Step(f"{life}{title}", lines) for title, lines in _episode_steps(episode, decode))
    samples = (describe_sample(sample) for episode in history.episodes for sample in episode.samples)
    return [*steps, Step("end", (*samples, *describe_outcomes(history)))]


def step_after(at: int, steps: int, command: str) -> int | None:
    """The number of the step to show after a command at step `at`; None for a command that is not known."""
    moves = {"n": 1, "p": -1}
    return min(max(0, at + moves[command]), steps - 1) if command in moves else None


def _episode_steps(episode: Episode, decode: Decode | None) -> Iterator[Step]:
    seen = 0
    for number, turn in episode.turns.items():
        request = tuple(describe_request(turn, seen, decode))
        attempts = sorted(turn.attempts.items())
        if not attempts:
            yield Step(f"turn {number}, no attempt yet", (*request, *_applied(turn, None)))
        for attempt_number, attempt in attempts:
            lines = (*request, *describe_attempt(attempt_number, attempt, turn, decode))
            yield Step(f"turn {number}, attempt {attempt_number}", (*lines, *_applied(turn, attempt_number)))
        seen = length_after(turn, seen)


def _applied(turn: EpisodeTurn, attempt: int | None) -> Iterator[str]:
    """The lines of the applied result, if it is of this attempt; None: if its attempt is not on the log."""
    if turn.applied is not None and attempt in (None, turn.applied.attempt):
        yield from describe_applied(turn.applied)
