"""The records of one trajectory, ordered by episode, turn and attempt.

Keeps true
- Nothing is left out: every attempt of every turn is there, with each dispatch and each result, applied or not.
- Episodes are separate: a trajectory that started again, because the log no longer had its group, has two episodes. A
  result belongs to the request with the same `requested_at`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from rose.schemas.prompts import Prompt
from rose.schemas.samples import Ending, Sample, SampleOutcome, SampleTurn
from rose.schemas.turns import TurnDispatch, TurnRequest, TurnResult

ENDED = {
    Ending.DONE: "done",
    Ending.MAX_TURNS: "cut off by max_turns",
    Ending.CONTEXT: "cut off by the end of its context",
}
"""Text for the end of a trajectory that has a reward; no entry if the sample does not give the end."""


@dataclass(slots=True)
class Attempt:
    """One execution of a turn, as recorded on the log."""

    dispatches: list[TurnDispatch] = field(default_factory=list)
    """More than one if a router restarted and dispatched the attempt again."""
    results: list[TurnResult] = field(default_factory=list)
    """In the order of the log; results after the first were dropped."""


@dataclass(slots=True)
class EpisodeTurn:
    """One turn of a trajectory, with its request and attempts."""

    request: TurnRequest | None = None
    attempts: dict[int, Attempt] = field(default_factory=dict)
    applied: SampleTurn | None = None
    """The turn in the finished sample; None if there is no sample yet."""

    def was_applied(self, result: TurnResult) -> bool:
        """Whether this result is the one that the sample contains."""
        applied = self.applied
        return applied is not None and (result.attempt, result.worker, result.times.finished_at) == (
            applied.attempt,
            applied.worker,
            applied.times.finished_at,
        )


@dataclass(slots=True)
class Episode:
    """One life of a trajectory, from its first request to its sample."""

    turns: dict[int, EpisodeTurn] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    """At most one, or the conservation law is broken."""


@dataclass(slots=True)
class TrajectoryHistory:
    """The records of a trajectory, in order."""

    trajectory_id: str
    prompt: Prompt | None = None
    episodes: list[Episode] = field(default_factory=list)
    outcomes: list[SampleOutcome] = field(default_factory=list)
    since: float | None = None
    """Timestamp in Unix seconds of the oldest request or result of its home that the log still has."""


@dataclass(slots=True)
class TrajectoryRecords:
    """The records of one trajectory, by kind, each kind in the order of the log."""

    prompt: Prompt | None = None
    requests: list[TurnRequest] = field(default_factory=list)
    dispatches: list[TurnDispatch] = field(default_factory=list)
    results: list[TurnResult] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    outcomes: list[SampleOutcome] = field(default_factory=list)
    since: float | None = None
    """The same as in `TrajectoryHistory`."""


def fold_trajectory(trajectory_id: str, records: TrajectoryRecords) -> TrajectoryHistory:
    """Arrange the records of a trajectory by episode, turn and attempt."""
    history = TrajectoryHistory(trajectory_id, records.prompt, outcomes=list(records.outcomes), since=records.since)
    for request in records.requests:
        if not history.episodes or (request.turn == 0 and 0 in history.episodes[-1].turns):
            history.episodes.append(Episode())
        history.episodes[-1].turns.setdefault(request.turn, EpisodeTurn()).request = request
    for dispatch in records.dispatches:
        request = dispatch.request
        turn = _turn_of(history, request.turn, request.requested_at)
        turn.attempts.setdefault(dispatch.attempt, Attempt()).dispatches.append(dispatch)
    for result in records.results:
        turn = _turn_of(history, result.turn, result.times.requested_at)
        turn.attempts.setdefault(result.attempt, Attempt()).results.append(result)
    for sample in records.samples:
        _place(history, sample)
    for life in history.episodes:
        life.turns = dict(sorted(life.turns.items()))
    return history


def _place(history: TrajectoryHistory, sample: Sample) -> None:
    """Add a sample to the episode whose turns it holds."""
    asked = [(turn.turn, turn.times.requested_at) for turn in sample.turns]
    life = _episode_of(history, *asked[0]) if asked else _newest(history)
    life.samples.append(sample)
    for applied in sample.turns:
        turn = life.turns.setdefault(applied.turn, EpisodeTurn())
        turn.applied = turn.applied or applied


def _turn_of(history: TrajectoryHistory, number: int, requested_at: float) -> EpisodeTurn:
    return _episode_of(history, number, requested_at).turns.setdefault(number, EpisodeTurn())


def _episode_of(history: TrajectoryHistory, number: int, requested_at: float) -> Episode:
    """Return the episode that requested the turn at that time; the newest one if the log has lost the request."""
    for life in history.episodes:
        request = life.turns.get(number, EpisodeTurn()).request
        if request is not None and request.requested_at == requested_at:
            return life
    return _newest(history)


def _newest(history: TrajectoryHistory) -> Episode:
    if not history.episodes:
        history.episodes.append(Episode())
    return history.episodes[-1]


def sort_records(records: TrajectoryRecords, more: Iterable[object]) -> None:
    """Append each record to the list of its kind in `records`."""
    for record in more:
        match record:
            case Prompt():
                records.prompt = records.prompt or record
            case TurnRequest():
                records.requests.append(record)
            case TurnDispatch():
                records.dispatches.append(record)
            case TurnResult():
                records.results.append(record)
            case Sample():
                records.samples.append(record)
            case SampleOutcome():
                records.outcomes.append(record)
            case _:
                pass
