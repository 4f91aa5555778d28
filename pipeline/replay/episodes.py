"""Everything that the log holds of one trajectory, put in its order.

Keeps true
- Nothing is left out: every attempt of every turn is there, with each dispatch and result that came, applied or not.
- Lives are not mixed: a trajectory that began anew, on a log that knew its group no more, is told twice. A result
  belongs to the request whose moment it carries.
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
"""How a trajectory ended that has a reward, in words; nothing where its sample does not say."""


@dataclass(slots=True)
class Attempt:
    """One execution of a turn, as far as the log knows."""

    dispatches: list[TurnDispatch] = field(default_factory=list)
    """More than one when a router was started again at the wrong moment."""
    results: list[TurnResult] = field(default_factory=list)
    """In the order of the log; a second one was dropped."""


@dataclass(slots=True)
class EpisodeTurn:
    """One turn: asked for once, tried at least once."""

    request: TurnRequest | None = None
    attempts: dict[int, Attempt] = field(default_factory=dict)
    applied: SampleTurn | None = None
    """As the finished sample has it; None while the trajectory goes on."""

    def was_applied(self, result: TurnResult) -> bool:
        applied = self.applied
        return applied is not None and (result.attempt, result.worker, result.times.finished_at) == (
            applied.attempt,
            applied.worker,
            applied.times.finished_at,
        )


@dataclass(slots=True)
class Episode:
    """A trajectory from its first request to its sample."""

    turns: dict[int, EpisodeTurn] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    """One at most, or the conservation law is broken."""


@dataclass(slots=True)
class TrajectoryHistory:
    """What the log says of a trajectory."""

    trajectory_id: str
    prompt: Prompt | None = None
    episodes: list[Episode] = field(default_factory=list)
    outcomes: list[SampleOutcome] = field(default_factory=list)
    since: float | None = None
    """Unix seconds: the stamp of the oldest request or result of its home that the log still has."""


@dataclass(slots=True)
class TrajectoryRecords:
    """The records of one trajectory, each kind in the order of the log."""

    prompt: Prompt | None = None
    requests: list[TurnRequest] = field(default_factory=list)
    dispatches: list[TurnDispatch] = field(default_factory=list)
    results: list[TurnResult] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    outcomes: list[SampleOutcome] = field(default_factory=list)
    since: float | None = None
    """As in `Lives`."""


def fold_trajectory(trajectory_id: str, records: TrajectoryRecords) -> TrajectoryHistory:
    """Put the records of a trajectory in their places."""
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
    """Give a sample to the life whose turns it holds."""
    asked = [(turn.turn, turn.times.requested_at) for turn in sample.turns]
    life = _episode_of(history, *asked[0]) if asked else _newest(history)
    life.samples.append(sample)
    for applied in sample.turns:
        turn = life.turns.setdefault(applied.turn, EpisodeTurn())
        turn.applied = turn.applied or applied


def _turn_of(history: TrajectoryHistory, number: int, requested_at: float) -> EpisodeTurn:
    return _episode_of(history, number, requested_at).turns.setdefault(number, EpisodeTurn())


def _episode_of(history: TrajectoryHistory, number: int, requested_at: float) -> Episode:
    """The life that asked for the turn at that moment; else the newest, whose request the log has no more."""
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
    """Sort records of one trajectory by their kind."""
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
