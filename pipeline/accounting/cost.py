"""The cost of a run and of one correct answer: device time by class of device and by what the work became.

Keeps true
- Every attempt at a turn has one fate. The device time by class and the device time by fate have the same sum.
- The time of all steps, with what came after the last step, is the whole time.
- A dedicated device costs from the first to the last moment that it is held: what no attempt used is `idle`. A borrowed
  device costs for the seconds of its attempts only. A device of the trainer costs while it trains and while it waits.
- Evaluations settle no step: their device time belongs to the step in which it was used.
- Nothing unknown counts as zero: attempts with an unknown time are counted as attempts, and have no time.

Pure. A live run and a simulation give the same facts: attempts, answers, held devices and steps of the trainer.

Example (dedicated 2 USD and borrowed 1 USD an hour)
    a dedicated device is held for 10 h, and computes 6 h for an answer that was trained on, 1 h for a stale one
        -> correct 12 USD, stale 2 USD, idle 6 USD
    a lender computes 2 h for the trained answer, after an attempt of 1 h that was lost
        -> correct 2 USD, lost 1 USD
    23 USD in all, 23 USD for each correct answer
"""

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import msgspec

from rose.pipeline.accounting.prices import DeviceClass, Prices
from rose.schemas.prompts import group_id_of, is_evaluation
from rose.schemas.samples import Outcome


class Fate(Enum):
    """The fate of device time: its use in the end."""

    CORRECT = "correct"
    """Work on a trajectory that was trained on and solved its task."""
    TRAINED = "trained"
    """Work on another trajectory that was trained on: it failed its task, or was not judged."""
    FILTERED = "filtered"
    STALE = "stale"
    SUPERSEDED = "superseded"
    SURPLUS = "surplus"
    INFRA_FAILED = "infra_failed"
    EVALUATED = "evaluated"
    """Work on a trajectory of an evaluation, whether or not it counts."""
    IN_FLIGHT = "in_flight"
    """Work on a trajectory without an outcome."""
    LOST = "lost"
    """Attempts of which no token was used: superseded by another attempt, expired or duplicate."""
    IDLE = "idle"
    """A dedicated device was held, and no turn used it."""
    TRAINING = "training"
    WAITING = "waiting"
    """The trainer waited for samples or for its previous version, or wrote a checkpoint."""


ANSWERED = (Outcome.TRAINED, Outcome.FILTERED)
"""Outcomes of trajectories that count as answers. A filtered one solved its task too, although its group taught
nothing; a stale or superseded one is of no use."""


class Attempt(NamedTuple):
    """One attempt at a turn, with its own device time."""

    trajectory_id: str
    device_class: DeviceClass
    device: str
    """Name of the device, such as `NVIDIA H800`."""
    device_seconds: float
    """Without the time of the attempts that it went on from."""
    kept: bool
    """Whether its tokens are part of the trajectory, or of the turn that was stopped as the trajectory ended early."""
    ended_at: float
    """Unix seconds."""


class Answer(NamedTuple):
    """The end of one trajectory."""

    outcome: Outcome
    correct: bool | None
    """Whether the task was solved; None if that is not known."""
    step: int
    """Step of the trainer that settled the trajectory; of an evaluation, the version that it is pinned to."""
    settled_at: float
    """Unix seconds."""


class HeldDevices(NamedTuple):
    """Devices of one dedicated executor, from `begin` to `end` in Unix seconds."""

    device: str
    devices: int
    begin: float
    end: float


class TrainerStep(NamedTuple):
    """Time of the trainer in one step."""

    ended_at: float
    """Unix seconds."""
    training_seconds: float
    waiting_seconds: float
    """All other time since the end of the step before."""
    devices: int


class Usage(NamedTuple):
    """Facts about a run from which the cost follows."""

    attempts: Sequence[Attempt]
    answers: Mapping[str, Answer]
    """Ends of trajectories, by trajectory id."""
    held: Sequence[HeldDevices]
    trainer: Sequence[TrainerStep] | None
    """None if the time of the trainer is not known."""
    unknown_attempts: int = 0
    """Number of further attempts whose time is not known: their executor was lost."""
    assumed_devices: int = 0
    """Number of executors in `held` of which neither the kind nor the number of devices is known: one is assumed."""


class CostLine(msgspec.Struct, frozen=True, kw_only=True):
    """Device time of one class, device and fate."""

    device_class: str
    device: str
    fate: str
    attempts: int
    device_seconds: float
    cost: float | None
    """In the currency of the prices; None without prices, here and in all fields of this name."""


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Device time from the end of the step before to the end of this step, and the answers that the step settled."""

    step: int | None
    """None: after the last step."""
    device_seconds: float
    cost: float | None
    trained: int
    correct: int
    """Number of correct answers."""


class CostReport(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of a run: a part of `summary.json`."""

    currency: str
    """Empty without prices."""
    device_seconds: float
    cost: float | None
    trained: int
    """Number of trajectories that were trained on."""
    correct: int
    """Number of correct answers: trajectories that solved their task and were trained on or filtered."""
    unjudged: int
    """Number of trained or filtered trajectories of which it is not known whether they solved their task."""
    lines: tuple[CostLine, ...]
    steps: tuple[StepCost, ...]
    """In the order of time."""
    unknown_attempts: int
    assumed_devices: int
    trainer_known: bool
    """Whether the time of the trainer is known, and counted."""

    @property
    def by_device(self) -> dict[tuple[str, str], tuple[float, float | None]]:
        """Device seconds and cost by class and name of the devices."""
        sums: dict[tuple[str, str], tuple[float, float | None]] = {}
        for line in self.lines:
            seconds, cost = sums.get((line.device_class, line.device), (0.0, None))
            cost = line.cost if cost is None or line.cost is None else cost + line.cost
            sums[line.device_class, line.device] = seconds + line.device_seconds, cost
        return sums

    @property
    def device_seconds_per_correct(self) -> float | None:
        """Device seconds for each correct answer; None if there is none."""
        return self.device_seconds / self.correct if self.correct else None

    @property
    def cost_per_correct(self) -> float | None:
        """Cost of each correct answer; None without prices or without a correct answer."""
        return self.cost / self.correct if self.cost is not None and self.correct else None

    @property
    def cost_per_trained(self) -> float | None:
        """Cost of each trajectory that was trained on; None without prices or without such a trajectory."""
        return self.cost / self.trained if self.cost is not None and self.trained else None


class _Key(NamedTuple):
    """The key of a sum of device time."""

    device_class: DeviceClass
    device: str
    fate: Fate


def fate_of(attempt: Attempt, answers: Mapping[str, Answer]) -> Fate:
    """Return what became of an attempt."""
    answer = answers.get(attempt.trajectory_id)
    if not attempt.kept:
        return Fate.LOST
    if answer is None:
        return Fate.IN_FLIGHT
    if answer.outcome is Outcome.TRAINED and answer.correct:
        return Fate.CORRECT
    return Fate(answer.outcome.value)


def cost_of(usage: Usage, prices: Prices) -> CostReport:
    """Return the cost of a run."""
    steps = _Steps(answer for name, answer in usage.answers.items() if not is_evaluation(group_id_of(name)))
    seconds: defaultdict[_Key, float] = defaultdict(float)
    counts: Counter[_Key] = Counter()
    busy: defaultdict[str, list[Attempt]] = defaultdict(list)
    for attempt in usage.attempts:
        key = _Key(attempt.device_class, attempt.device, fate_of(attempt, usage.answers))
        seconds[key] += attempt.device_seconds
        counts[key] += 1
        if attempt.device_class is DeviceClass.DEDICATED:
            busy[attempt.device].append(attempt)
        else:
            steps.add(attempt.device_class, attempt.device, attempt.ended_at, attempt.device_seconds)
    for device in sorted(busy.keys() | {each.device for each in usage.held}):
        own = [each for each in usage.held if each.device == device]
        seconds[_Key(DeviceClass.DEDICATED, device, Fate.IDLE)] += steps.add_dedicated(device, own, busy[device])
    for done in usage.trainer or ():
        for fate, amount in ((Fate.TRAINING, done.training_seconds), (Fate.WAITING, done.waiting_seconds)):
            seconds[_Key(DeviceClass.TRAINER, "", fate)] += done.devices * amount
            steps.add(DeviceClass.TRAINER, "", done.ended_at, done.devices * amount)
    lines = [
        CostLine(
            device_class=key.device_class.value,
            device=key.device,
            fate=key.fate.value,
            attempts=counts[key],
            device_seconds=seconds[key],
            cost=prices.cost(key.device_class, key.device, seconds[key]),
        )
        for key in sorted(seconds, key=_place)
        if seconds[key] or counts[key]
    ]
    answered = [answer for answer in usage.answers.values() if answer.outcome in ANSWERED]
    return CostReport(
        currency=prices.currency,
        device_seconds=sum(line.device_seconds for line in lines),
        cost=_sum([line.cost for line in lines]) if prices.currency else None,
        trained=sum(answer.outcome is Outcome.TRAINED for answer in answered),
        correct=sum(bool(answer.correct) for answer in answered),
        unjudged=sum(answer.correct is None for answer in answered),
        lines=tuple(lines),
        steps=tuple(steps.costs(prices)),
        unknown_attempts=usage.unknown_attempts,
        assumed_devices=usage.assumed_devices,
        trainer_known=usage.trainer is not None,
    )


def _place(key: _Key) -> tuple[int, str, int]:
    return list(DeviceClass).index(key.device_class), key.device, list(Fate).index(key.fate)


def _sum(costs: Iterable[float | None]) -> float:
    return sum(cost for cost in costs if cost is not None)


class _Steps:
    """Sums of device time by step of the trainer. A step lasts from the end of the step before to its own end."""

    def __init__(self, answers: Iterable[Answer]) -> None:
        settled = sorted(answers, key=lambda answer: answer.settled_at)
        ended_at = {answer.step: answer.settled_at for answer in settled}
        self._order = sorted(ended_at, key=ended_at.__getitem__)
        self._ends = [ended_at[step] for step in self._order]
        self._seconds: list[defaultdict[tuple[DeviceClass, str], float]] = [
            defaultdict(float) for _ in range(len(self._order) + 1)
        ]
        """Sums of each step in the order of time, then of the time after the last step."""
        self._trained = Counter(answer.step for answer in settled if answer.outcome is Outcome.TRAINED)
        self._correct = Counter(answer.step for answer in settled if answer.outcome in ANSWERED and answer.correct)

    def add(self, device_class: DeviceClass, device: str, at: float, device_seconds: float) -> None:
        """Add device time to the step in which it ended."""
        self._seconds[bisect_left(self._ends, at)][device_class, device] += device_seconds

    def add_dedicated(self, device: str, held: Sequence[HeldDevices], attempts: Sequence[Attempt]) -> float:
        """Add the time of dedicated devices of one name, and return the part of the time in which they idled.

        The time is that in which the devices were held, or that of the attempts if the attempts took longer: then the
        log has not all of the time in which the devices were held.
        """
        busy = sum(attempt.device_seconds for attempt in attempts)
        whole = sum(each.devices * (each.end - each.begin) for each in held)
        if not whole or math.isinf(busy / whole):
            for attempt in attempts:
                self.add(DeviceClass.DEDICATED, device, attempt.ended_at, attempt.device_seconds)
            return 0.0
        for each in held:
            first, last = bisect_left(self._ends, each.begin), bisect_left(self._ends, each.end)
            bounds = [each.begin, *self._ends[first:last], each.end]
            for place in range(first, last + 1):
                part = each.devices * (bounds[place - first + 1] - bounds[place - first])
                self._seconds[place][DeviceClass.DEDICATED, device] += part * max(1.0, busy / whole)
        return max(0.0, whole - busy)

    def costs(self, prices: Prices) -> Iterable[StepCost]:
        """Yield the steps in the order of time, then what came after the last step if there is any."""
        for step, seconds in zip([*self._order, None], self._seconds, strict=True):
            if step is None and not any(seconds.values()):
                continue
            costs = [prices.cost(*key, amount) for key, amount in seconds.items()]
            yield StepCost(
                step=step,
                device_seconds=sum(seconds.values()),
                cost=_sum(costs) if prices.currency else None,
                trained=0 if step is None else self._trained[step],
                correct=0 if step is None else self._correct[step],
            )
