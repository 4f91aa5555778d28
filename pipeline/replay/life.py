"""Everything that the log holds of one trajectory, put in its order.

Keeps true
- Nothing is left out: every attempt of every turn is there, with each dispatch and result that came, applied or not.
- Lives are not mixed: a trajectory that began anew, on a log that knew its group no more, is told twice. A result
  belongs to the request whose moment it carries.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from schemas.prompts import Prompt
from schemas.samples import Ending, Sample, SampleOutcome, SampleTurn
from schemas.turns import TurnDispatch, TurnRequest, TurnResult

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
class LifeTurn:
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
class Life:
    """A trajectory from its first request to its sample."""

    turns: dict[int, LifeTurn] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    """One at most, or the conservation law is broken."""


@dataclass(slots=True)
class Lives:
    """What the log says of a trajectory."""

    trajectory_id: str
    prompt: Prompt | None = None
    lives: list[Life] = field(default_factory=list)
    outcomes: list[SampleOutcome] = field(default_factory=list)
    since: float | None = None
    """Unix seconds: the stamp of the oldest request or result of its home that the log still has."""


@dataclass(slots=True)
class Found:
    """The records of one trajectory, each kind in the order of the log."""

    prompt: Prompt | None = None
    requests: list[TurnRequest] = field(default_factory=list)
    dispatches: list[TurnDispatch] = field(default_factory=list)
    results: list[TurnResult] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    outcomes: list[SampleOutcome] = field(default_factory=list)
    since: float | None = None
    """As in `Lives`."""


def fold_lives(trajectory_id: str, found: Found) -> Lives:
    """Put the records of a trajectory in their places."""
    told = Lives(trajectory_id, found.prompt, outcomes=list(found.outcomes), since=found.since)
    for request in found.requests:
        if not told.lives or (request.turn == 0 and 0 in told.lives[-1].turns):
            told.lives.append(Life())
        told.lives[-1].turns.setdefault(request.turn, LifeTurn()).request = request
    for dispatch in found.dispatches:
        request = dispatch.request
        turn = _turn_of(told, request.turn, request.requested_at)
        turn.attempts.setdefault(dispatch.attempt, Attempt()).dispatches.append(dispatch)
    for result in found.results:
        turn = _turn_of(told, result.turn, result.times.requested_at)
        turn.attempts.setdefault(result.attempt, Attempt()).results.append(result)
    for sample in found.samples:
        _place(told, sample)
    for life in told.lives:
        life.turns = dict(sorted(life.turns.items()))
    return told


def _place(told: Lives, sample: Sample) -> None:
    """Give a sample to the life whose turns it holds."""
    asked = [(turn.turn, turn.times.requested_at) for turn in sample.turns]
    life = _life_of(told, *asked[0]) if asked else _newest(told)
    life.samples.append(sample)
    for applied in sample.turns:
        turn = life.turns.setdefault(applied.turn, LifeTurn())
        turn.applied = turn.applied or applied


def _turn_of(told: Lives, number: int, requested_at: float) -> LifeTurn:
    return _life_of(told, number, requested_at).turns.setdefault(number, LifeTurn())


def _life_of(told: Lives, number: int, requested_at: float) -> Life:
    """The life that asked for the turn at that moment; else the newest, whose request the log has no more."""
    for life in told.lives:
        request = life.turns.get(number, LifeTurn()).request
        if request is not None and request.requested_at == requested_at:
            return life
    return _newest(told)


def _newest(told: Lives) -> Life:
    if not told.lives:
        told.lives.append(Life())
    return told.lives[-1]


def keep(found: Found, records: Iterable[object]) -> None:
    """Sort records of one trajectory by their kind."""
    for record in records:
        match record:
            case Prompt():
                found.prompt = found.prompt or record
            case TurnRequest():
                found.requests.append(record)
            case TurnDispatch():
                found.dispatches.append(record)
            case TurnResult():
                found.results.append(record)
            case Sample():
                found.samples.append(record)
            case SampleOutcome():
                found.outcomes.append(record)
            case _:
                pass
