"""One sentence that says where a trajectory or a group is, and why.

Keeps true: the sentence describes the first step that is missing on the log, and infers no reason that the log does not
give.

Pure.

Example:
    g:0 has a request for turn 2 and no dispatch  -> "turn 2 waits in the router since 12:00:01 UTC"
"""

from collections.abc import Iterable
from dataclasses import dataclass

from rose.pipeline.clock import format_utc as moment
from rose.pipeline.replay.records import ENDED, TrajectoryRecords
from rose.schemas.progress import Group, GroupState, TrajectoryProgress
from rose.schemas.prompts import trajectory_id
from rose.schemas.samples import TRUNCATED, Outcome, Sample, SampleOutcome
from rose.schemas.turns import TurnOutcome, TurnResult

NAMED = 5
"""Maximum number of trajectories or reasons that a sentence names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptAt:
    """The place of a prompt, and the number of prompts before it."""

    place: str
    """`topic/partition/offset`."""
    home: int
    at_home: bool
    refused: str | None = None
    """Reason of its dead letter; None if there is none."""
    before: int = 0
    """Number of earlier prompts in the same partition that the workers have not committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """The facts about a group."""

    group_id: str
    group: Group | None = None
    """None if its home has no record of the group."""
    prompts: tuple[PromptAt, ...] = ()
    open_at_home: int = 0
    """Number of open groups of its home."""
    size: int = 0
    live: frozenset[str] = frozenset()
    """Live trajectories."""
    sampled: frozenset[str] = frozenset()
    settled: tuple[SampleOutcome, ...] = ()

    @property
    def opened(self) -> bool:
        """Whether the group was opened, and not refused."""
        return self.group is not None and self.group.state is not GroupState.REFUSED


def why_trajectory(group: GroupFacts, records: TrajectoryRecords) -> str:
    """Return where the trajectory is, and why."""
    if records.outcomes:
        return _ended(records)
    if records.samples:
        return _sampled(group, records.samples[0])
    if records.progress is not None:
        return _under_way(records, records.progress)
    if group.group is not None and group.group.state is GroupState.SETTLED:
        return "is settled: its outcome is on the log no more"
    if group.opened:
        return "is lost: its group was opened, and it has neither progress nor sample nor outcome on the log"
    return why_not_opened(group)


def why_group(group: GroupFacts) -> str:
    """Return how far the group is, and what its trajectories wait for."""
    if not group.opened:
        return why_not_opened(group)
    settled = {outcome.trajectory_id for outcome in group.settled}
    ends: dict[Outcome, int] = {}
    for outcome in group.settled:
        ends[outcome.outcome] = ends.get(outcome.outcome, 0) + 1
    counts = ", ".join(f"{count} {outcome.value.replace('_', ' ')}" for outcome, count in ends.items())
    if group.group is not None and group.group.state is GroupState.SETTLED:
        return f"is settled: {counts or 'its outcomes are on the log no more'}"
    waiting = group.sampled - settled - group.live
    parts = [f"{len(settled)} of its {group.size} trajectories are settled{f' ({counts})' if counts else ''}"]
    if group.live:
        parts.append(f"{len(group.live)} under way ({_named(group.live)})")
    if waiting:
        whom = "the others" if group.live else "the trainer"
        parts.append(f"{len(waiting)} wait for {whom}")
    return f"is open: {', '.join(parts)}"


def why_not_opened(group: GroupFacts) -> str:
    """Return why the group is not opened."""
    waiting = [prompt for prompt in group.prompts if prompt.refused is None]
    at_home = [prompt for prompt in waiting if prompt.at_home]
    refused = [prompt for prompt in group.prompts if prompt.refused is not None]
    if at_home:
        prompt = at_home[0]
        behind = f"behind {_others(prompt.before)}" if prompt.before else "as the next of its home"
        groups = f"{group.open_at_home} groups are open there"
        window = f"{groups}: the window may be full" if group.open_at_home else f"{groups}: is a worker there?"
        return f"is not opened: its prompt waits at {prompt.place}, {behind}; {window}"
    if refused:
        return f"was refused: {refused[-1].refused} (its prompt lay at {refused[-1].place}; see `rose dlq`)"
    if waiting:
        prompt = waiting[0]
        behind = f" behind {_others(prompt.before)}" if prompt.before else ""
        return (
            f"is not opened: its prompt lies at {prompt.place}{behind}, its home is partition {prompt.home}, "
            "and no environment worker has sent it there yet"
        )
    return "is not on the log: no prompt of its group is there"


def _ended(records: TrajectoryRecords) -> str:
    sentences = []
    for outcome in records.outcomes:
        because = f" because {outcome.reason}" if outcome.reason else ""
        sentences.append(f"ended as {outcome.outcome.value.replace('_', ' ')} at step {outcome.step}{because}")
    failure = next((f": {sample.failure}" for sample in records.samples if sample.failure), "")
    cut = next((f" ({ENDED[sample.ended]})" for sample in records.samples if sample.ended in TRUNCATED), "")
    return f"{' and '.join(sentences)}{failure if failure and not records.outcomes[0].reason else ''}{cut}"


def _sampled(group: GroupFacts, sample: Sample) -> str:
    reward = "no reward" if sample.reward is None else f"reward {sample.reward:g}"
    cut = f" ({ENDED[sample.ended]})" if sample.ended in TRUNCATED else ""
    end = f"failed ({sample.failure})" if sample.failure else f"is finished with {reward}{cut}"
    others = group.live - {sample.trajectory_id}
    missing = {trajectory_id(group.group_id, index) for index in range(group.size)} - group.sampled - others
    missing -= {outcome.trajectory_id for outcome in group.settled}
    if others:
        return f"{end} and waits for its group: {len(others)} of {group.size} are under way ({_named(others)})"
    if missing:
        return f"{end} and waits for its group: {_named(missing)} of {group.size} have no sample"
    return f"{end} and waits for the trainer: its group is complete"


def _under_way(records: TrajectoryRecords, progress: TrajectoryProgress) -> str:
    turn = progress.turn
    request = next((each for each in reversed(records.requests) if each.turn == turn), None)
    dispatches = [each for each in records.dispatches if each.request.turn == turn and not each.withdrawn]
    results = [each for each in records.results if each.turn == turn]
    ended = next((each for each in results if each.outcome in (TurnOutcome.COMPLETED, TurnOutcome.FAILED)), None)
    if ended is not None and ended.outcome is TurnOutcome.FAILED:
        return f"turn {turn} was given up ({ended.reason}); its environment worker has yet to end the trajectory"
    if ended is not None:
        when = f" at {_clock(ended.times.finished_at)}" if ended.times.finished_at else ""
        return f"turn {turn} was completed by {ended.worker}{when} and waits for its environment worker to apply it"
    before = _attempts_before(results)
    running = [each for each in dispatches if each.attempt not in {result.attempt for result in results}]
    if running:
        last = running[-1]
        since = f"since {_clock(last.dispatched_at)} (attempt {last.attempt})"
        return f"turn {turn} is with {last.worker} {since}{before}"
    if request is None and not results:
        return f"turn {turn} is asked for, and its request is on the log no more"
    since = f" since {_clock(request.requested_at)}" if request is not None else ""
    if results and results[-1].times.finished_at:
        since = f" since {_clock(results[-1].times.finished_at)}"
    return f"turn {turn} waits in the router{since}{before}"


def _attempts_before(results: Iterable[TurnResult]) -> str:
    sentences = [
        f"attempt {each.attempt} was {each.outcome.value} by {each.worker}{f': {each.reason}' if each.reason else ''}"
        for each in results
    ]
    return f", after {'; '.join(sentences[-NAMED:])}" if sentences else ""


def _others(count: int) -> str:
    return "1 other" if count == 1 else f"{count} others"


def _named(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:NAMED]) + (", ..." if len(ordered) > NAMED else "")


def _clock(unix_seconds: float) -> str:
    return moment(unix_seconds, "%H:%M:%S UTC")
