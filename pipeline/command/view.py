"""What a run looks like at this moment, from its log: the state behind `rose watch` and the progress of a run.

Keeps true: a pure fold; `now` is an argument. An executor whose heartbeat is older than its TTL is shown as silent.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

from schemas.record import Record
from schemas.samples import Outcome, Sample, SampleOutcome
from schemas.slack import SlackHeartbeat
from schemas.turns import TurnOutcome, TurnResult
from schemas.weights import WeightManifest

RATE_SECONDS = 10.0
"""Over which rates are averaged."""

REMEMBERED_STEPS = 200
"""Optimizer steps that the view keeps."""

REMEMBERED_SAMPLES = 65_536
"""Samples that wait for their outcome in the view; the oldest are forgotten first."""


@dataclass(slots=True)
class Step:
    """What one optimizer step settled."""

    number: int
    version: int = -1
    ends: Counter[Outcome] = field(default_factory=Counter)
    known: int = 0
    """Trajectories whose sample the view has seen."""
    solved: int = 0
    turns: int = 0

    @property
    def success(self) -> float | None:
        return self.solved / self.known if self.known else None


@dataclass(slots=True)
class View:
    """Give it records with the moment at which they came; ask it for what to show."""

    executors: dict[str, SlackHeartbeat] = field(default_factory=dict)
    heard_at: dict[str, float] = field(default_factory=dict)
    steps: dict[int, Step] = field(default_factory=dict)
    ends: Counter[Outcome] = field(default_factory=Counter)
    turns: Counter[TurnOutcome] = field(default_factory=Counter)
    samples: int = 0
    version: int = -1
    published_bytes: int = 0
    _turn_moments: deque[float] = field(default_factory=deque)
    _waiting: dict[str, tuple[bool, int]] = field(default_factory=dict)
    """Solved, and how many turns, of samples without an outcome."""
    _early: dict[str, int] = field(default_factory=dict)
    """The step of outcomes whose sample has not been seen: topics are read side by side."""

    def take(self, record: Record, now: float) -> None:
        """Fold a record in. `now` and the records' own times are unix seconds."""
        match record:
            case SlackHeartbeat():
                self.executors[record.worker] = record
                self.heard_at[record.worker] = record.sent_at
            case TurnResult():
                self.turns[record.outcome] += 1
                if record.outcome is TurnOutcome.COMPLETED:
                    self._turn_moments.append(now)
            case Sample():
                self._sample(record)
            case SampleOutcome():
                self._outcome(record)
            case WeightManifest():
                self.version = max(self.version, record.version)
                self.published_bytes += sum(chunk.bytes for chunk in record.chunks)
            case _:
                pass

    def turns_per_second(self, now: float) -> float:
        """Completed turns, over the last seconds."""
        while self._turn_moments and self._turn_moments[0] < now - RATE_SECONDS:
            self._turn_moments.popleft()
        return len(self._turn_moments) / RATE_SECONDS

    def silent(self, worker: str, now: float) -> bool:
        """Whether the executor's last heartbeat has expired."""
        return now - self.heard_at[worker] > self.executors[worker].ttl_seconds

    @property
    def settled(self) -> int:
        """Trajectories with an outcome."""
        return self.ends.total()

    @property
    def newest_step(self) -> Step | None:
        return self.steps[max(self.steps)] if self.steps else None

    def _sample(self, sample: Sample) -> None:
        self.samples += 1
        step = self._early.pop(sample.trajectory_id, None)
        if step is not None and step in self.steps:
            self._count(self.steps[step], sample.success, len(sample.turns))
            return
        self._waiting[sample.trajectory_id] = (sample.success, len(sample.turns))
        if len(self._waiting) > REMEMBERED_SAMPLES:
            del self._waiting[next(iter(self._waiting))]

    def _outcome(self, outcome: SampleOutcome) -> None:
        self.ends[outcome.outcome] += 1
        step = self.steps.setdefault(outcome.step, Step(outcome.step))
        step.version = max(step.version, outcome.policy_version)
        step.ends[outcome.outcome] += 1
        if len(self.steps) > REMEMBERED_STEPS:
            del self.steps[min(self.steps)]
        if outcome.trajectory_id in self._waiting:
            self._count(step, *self._waiting.pop(outcome.trajectory_id))
        else:
            self._early[outcome.trajectory_id] = outcome.step
            if len(self._early) > REMEMBERED_SAMPLES:
                del self._early[next(iter(self._early))]

    @staticmethod
    def _count(step: Step, solved: bool, turns: int) -> None:
        step.known += 1
        step.solved += solved
        step.turns += turns
