"""Everything that the log holds of one trajectory, put in its order.

Keeps true: nothing is left out. Every attempt of every turn is there, with each result that came, applied or not.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from confluent_kafka import OFFSET_BEGINNING

from schemas.errors import UsageError
from schemas.prompts import Prompt
from schemas.samples import Sample, SampleOutcome, SampleTurn
from schemas.turns import TurnDispatch, TurnRequest, TurnResult
from topics.catalog import COMPLETED, DISPATCHED, OUTCOMES, PROMPTS, REQUESTED, SAMPLES, Topic
from topics.log import read_back, read_topics
from topics.records import Envelope, Place
from topics.settings import BusSettings

CLIENT = "rose-replay"


class UnknownTrajectory(UsageError):
    """Nothing on the log is of this trajectory."""

    def __init__(self, trajectory_id: str) -> None:
        super().__init__(
            f"the log knows no trajectory {trajectory_id}: ids are GROUP_ID:INDEX, and a prompt's group_id begins them"
        )


@dataclass(slots=True)
class Attempt:
    """One execution of a turn, as far as the log knows."""

    dispatch: TurnDispatch | None = None
    results: list[TurnResult] = field(default_factory=list)
    """In the order of the log; a second one was dropped."""


@dataclass(slots=True)
class LifeTurn:
    """One turn: asked for once, tried at least once."""

    request: TurnRequest | None = None
    attempts: dict[int, Attempt] = field(default_factory=dict)
    applied: SampleTurn | None = None
    """As the finished sample has it; None while the trajectory goes on."""


@dataclass(slots=True)
class Life:
    """A trajectory from its prompt to its outcome."""

    trajectory_id: str
    prompt: Prompt | None = None
    turns: dict[int, LifeTurn] = field(default_factory=dict)
    sample: Sample | None = None
    outcomes: list[SampleOutcome] = field(default_factory=list)


def read_life(settings: BusSettings, trajectory_id: str) -> Life:
    """The life of one trajectory. Raises UnknownTrajectory, TopicMissing or BusError."""
    group_id, _, index = trajectory_id.rpartition(":")
    prompts = [
        each
        for each in read_topics(settings, [PROMPTS], client_id=CLIENT)
        if isinstance(each.record, Prompt) and each.record.group_id == group_id
    ]
    asked = prompts[0].record if prompts else None
    if not isinstance(asked, Prompt) or not index.isdecimal() or int(index) >= asked.group_size:
        raise UnknownTrajectory(trajectory_id)
    homes: dict[Place, int] = {(topic, prompts[0].partition): OFFSET_BEGINNING for topic in (REQUESTED, COMPLETED)}
    return fold_life(
        trajectory_id,
        [
            *prompts[:1],
            *_own(read_back(settings, homes, client_id=CLIENT), trajectory_id),
            *_own(_all(settings, DISPATCHED), trajectory_id),
            *(each for each in _all(settings, SAMPLES) if each.key in (group_id, trajectory_id)),
            *_own(_all(settings, OUTCOMES), trajectory_id),
        ],
    )


def fold_life(trajectory_id: str, envelopes: Iterable[Envelope]) -> Life:
    """Put the records of a trajectory in their places; those of others are passed over."""
    life = Life(trajectory_id)
    for envelope in envelopes:
        match envelope.record:
            case Prompt() as prompt:
                life.prompt = prompt
            case TurnRequest(trajectory_id=of) as request if of == trajectory_id:
                life.turns.setdefault(request.turn, LifeTurn()).request = request
            case TurnDispatch() as dispatch if dispatch.request.trajectory_id == trajectory_id:
                _attempt(life, dispatch.request.turn, dispatch.request.attempt).dispatch = dispatch
            case TurnResult(trajectory_id=of) as result if of == trajectory_id:
                _attempt(life, result.turn, result.attempt).results.append(result)
            case Sample(trajectory_id=of) as sample if of == trajectory_id:
                life.sample = life.sample or sample
            case SampleOutcome(trajectory_id=of) as outcome if of == trajectory_id:
                life.outcomes.append(outcome)
            case _:
                pass
    for applied in life.sample.turns if life.sample is not None else ():
        life.turns.setdefault(applied.turn, LifeTurn()).applied = applied
    life.turns = dict(sorted(life.turns.items()))
    return life


def _attempt(life: Life, turn: int, attempt: int) -> Attempt:
    return life.turns.setdefault(turn, LifeTurn()).attempts.setdefault(attempt, Attempt())


def _all(settings: BusSettings, topic: Topic) -> Iterable[Envelope]:
    return read_topics(settings, [topic], client_id=CLIENT)


def _own(envelopes: Iterable[Envelope], key: str) -> Iterable[Envelope]:
    return (envelope for envelope in envelopes if envelope.key == key)
