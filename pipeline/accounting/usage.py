"""The usage of a run from its log: attempts with their own device time, answers, and times in which devices were held.

Keeps true
- A result holds the device time of the whole turn so far. The time of an attempt is what the result has more than the
  result that the attempt went on from. If that result is not on the log, the time of the attempt is unknown.
- An attempt is kept if the applied result of its turn is its own or went on from it. Of a turn that is in no sample, as
  the last one of a trajectory that ended early, the first COMPLETED result counts as applied, otherwise the longest
  partial turn. A duplicate result counts once.
- An attempt number without a result, below the highest number of its turn, is an attempt with an unknown time.
- A dedicated executor is held from its first to its last record on the log, each start by itself: heartbeats, which are
  deleted early, and results.

Pure: a fold over records; records of one partition come in the order of the log.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rose.pipeline.accounting.cost import Answer, Attempt, HeldDevices, TrainerStep, Usage
from rose.pipeline.accounting.prices import DeviceClass
from rose.schemas.arrays import count
from rose.schemas.heartbeats import SlackHeartbeat, WorkerClass
from rose.schemas.record import Record
from rose.schemas.samples import Sample, SampleOutcome
from rose.schemas.turns import TurnOutcome, TurnResult

NO_DEVICE = "none"
"""Device in the heartbeats of a lender that has no engine at that moment."""

ASSUMED = ("unknown", 1)
"""Name and number of the devices of an executor without a heartbeat on the log."""


class _Result(NamedTuple):
    """The part of a result that the ledger keeps."""

    attempt: int
    outcome: TurnOutcome
    worker: str
    """Empty if the router wrote the result."""
    tokens: int
    context_tokens: int
    device_seconds: dict[str, float]
    finished_at: float


class _Applied(NamedTuple):
    """The applied attempt of a turn in a sample."""

    attempt: int
    worker: str
    finished_at: float
    context_tokens: int


SERVING = WorkerClass.SERVING.value

RAN = (TurnOutcome.COMPLETED, TurnOutcome.PREEMPTED)
"""Outcomes of attempts that an engine has run."""

NOT_ON_LOG = -1
"""Stands for the place of a result that is not on the log."""

TurnName = tuple[str, int]
"""Trajectory and turn."""


class UsageLedger:
    """Folds records into the usage of a run."""

    def __init__(self) -> None:
        self._results: defaultdict[TurnName, list[_Result]] = defaultdict(list)
        self._applied: dict[TurnName, _Applied] = {}
        self._solved: dict[str, bool | None] = {}
        """Whether a task was solved, by trajectory with a sample."""
        self._outcomes: dict[str, SampleOutcome] = {}
        self._devices: dict[str, tuple[str, int]] = {}
        """Name and number of an executor's devices, from its newest heartbeat."""
        self._worker_class: dict[str, str] = {}
        self._seen: dict[tuple[str, int], tuple[float, float]] = {}
        """First and last moment of an executor on the log, by worker and incarnation."""

    def watch(self, records: Iterable[Record]) -> Iterator[Record]:
        """Pass the records on and add each of them."""
        for record in records:
            self.add(record)
            yield record

    def add(self, record: Record) -> None:
        """Add a record; kinds of records that say nothing of usage are ignored."""
        match record:
            case TurnResult():
                self._add_result(record)
            case Sample() if record.trajectory_id not in self._solved:
                self._solved[record.trajectory_id] = None if record.failure else record.success
                for turn in record.turns:
                    applied = _Applied(turn.attempt, turn.worker, turn.times.finished_at, turn.start)
                    self._applied[record.trajectory_id, turn.turn] = applied
            case SampleOutcome():
                self._outcomes.setdefault(record.trajectory_id, record)
            case SlackHeartbeat():
                self._worker_class[record.worker] = record.worker_class.value
                if record.hardware.device != NO_DEVICE:
                    self._devices[record.worker] = record.hardware.device, record.devices
                self._see(record.worker, record.incarnation, record.sent_at)
            case _:
                pass

    def usage(self, steps: Sequence[Mapping[str, Any]] | None) -> Usage:
        """Return the usage so far. `steps`: lines of the trainer's step log; None if there is no step log."""
        attempts: list[Attempt] = []
        classes = dict(self._worker_class)
        unknown = 0
        for name in sorted(self._results.keys() | self._applied.keys()):  # sums of one log have one last digit
            results, applied = self._results.get(name, []), self._applied.get(name)
            own, missing = _own_seconds(results, applied)
            unknown += missing
            for place, each in own.items():
                attempts.append(self._attempt(name[0], results[place], each))
                if each.device_seconds:
                    classes.setdefault(results[place].worker, each.worker_class)
        held, assumed = self._held(classes)
        return Usage(
            attempts=attempts,
            answers={
                name: Answer(record.outcome, self._solved.get(name), record.step, record.recorded_at)
                for name, record in self._outcomes.items()
            },
            held=held,
            trainer=None if steps is None else [_trainer_step(step) for step in steps],
            unknown_attempts=unknown,
            assumed_devices=assumed,
        )

    def _add_result(self, record: TurnResult) -> None:
        worker, times = record.worker or "", record.times
        results = self._results[record.trajectory_id, record.turn]
        result = _Result(
            record.attempt,
            record.outcome,
            worker,
            count(record.tokens),
            record.context_tokens,
            record.device_seconds,
            times.finished_at,
        )
        if result in results:
            return
        results.append(result)
        if not worker:
            return
        for moment in (times.received_at, times.finished_at):
            if moment:
                self._see(worker, record.incarnation, moment)

    def _see(self, worker: str, incarnation: int, moment: float) -> None:
        first, last = self._seen.get((worker, incarnation), (moment, moment))
        self._seen[worker, incarnation] = min(first, moment), max(last, moment)

    def _attempt(self, trajectory: str, result: _Result, own: "_OwnSeconds") -> Attempt:
        device, _ = self._devices.get(result.worker, ASSUMED)
        device_class = DeviceClass.BORROWED if own.worker_class == SERVING else DeviceClass.DEDICATED
        return Attempt(trajectory, device_class, device, own.device_seconds, own.kept, result.finished_at)

    def _held(self, classes: Mapping[str, str]) -> tuple[list[HeldDevices], int]:
        """Return the times of dedicated executors, and the number of executors whose devices are not known.

        `classes`: worker class by worker. A worker without a class has sent no heartbeat and computed nothing.
        """
        held, assumed = [], set()
        for (worker, _), (begin, end) in self._seen.items():
            if classes.get(worker, SERVING) == SERVING:
                continue
            if worker not in self._devices:
                assumed.add(worker)
            held.append(HeldDevices(*self._devices.get(worker, ASSUMED), begin, end))
        return held, len(assumed)


class _OwnSeconds(NamedTuple):
    """The device time of one attempt without that of the attempts that it went on from."""

    worker_class: str
    device_seconds: float
    kept: bool


def _own_seconds(results: Sequence[_Result], applied: _Applied | None) -> tuple[dict[int, _OwnSeconds], int]:
    """Return the device time of the attempts at one turn by place in `results`, and the number of unknown attempts."""
    contexts = [result.context_tokens for result in results if result.context_tokens]
    context = applied.context_tokens if applied else min(contexts, default=0)
    before = [_place_before(results, place, context) for place in range(len(results))]
    kept: set[int] = set()
    tip = _tip(results, applied)
    while tip is not None and tip != NOT_ON_LOG and tip not in kept:
        kept.add(tip)
        tip = before[tip]
    numbers = {result.attempt for result in results}
    unknown = 1 + max(numbers | ({applied.attempt} if applied else set())) - len(numbers)
    own: dict[int, _OwnSeconds] = {}
    for place, (result, earlier) in enumerate(zip(results, before, strict=True)):
        if result.outcome in RAN and (not result.device_seconds or earlier == NOT_ON_LOG):
            unknown += 1
        elif result.device_seconds:
            base = {} if earlier is None else results[earlier].device_seconds
            more = {name: seconds - base.get(name, 0.0) for name, seconds in result.device_seconds.items()}
            worker_class = max(more, key=more.__getitem__)
            own[place] = _OwnSeconds(worker_class, max(0.0, more[worker_class]), place in kept)
    return own, unknown


def _place_before(results: Sequence[_Result], place: int, context_tokens: int) -> int | None:
    """Return the place of the result that an attempt went on from; None if the attempt began the turn anew.

    The router continues the longest partial turn that it knows, so the number of tokens names the result.
    """
    result = results[place]
    started = result.context_tokens > 0  # otherwise it was aborted before its start: it has earlier tokens only
    tokens = result.context_tokens - context_tokens if started else result.tokens
    if not tokens:
        return None
    for other, earlier in enumerate(results[:place]):
        if earlier.outcome is TurnOutcome.PREEMPTED and earlier.tokens == tokens:
            return other
    return NOT_ON_LOG


def _tip(results: Sequence[_Result], applied: _Applied | None) -> int | None:
    """Return the place of the result whose tokens count; None if there is none."""
    if applied is not None:
        names = [(result.attempt, result.worker, result.finished_at) for result in results]
        name = (applied.attempt, applied.worker, applied.finished_at)
        return names.index(name) if name in names else None
    for place, result in enumerate(results):
        if result.outcome is TurnOutcome.COMPLETED:
            return place
    longest = max(range(len(results)), key=lambda place: results[place].tokens, default=None)
    return longest if longest is not None and results[longest].tokens else None


def _trainer_step(line: Mapping[str, Any]) -> TrainerStep:
    names = ("waiting_seconds", "publishing_seconds", "checkpoint_seconds", "evaluation_seconds")
    other = sum(line.get(name) or 0.0 for name in names)
    return TrainerStep(line["ended_at"], line["training_seconds"], other, line["devices"])
