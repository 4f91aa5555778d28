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

RECENT_SAMPLES = 512
"""Finished trajectories that the share of solved ones is taken over."""

CURVE_POINTS = 400
"""Policy versions that the curve remembers."""


@dataclass(slots=True)
class View:
    """Give it records with the moment at which they came; ask it for what to show."""

    executors: dict[str, SlackHeartbeat] = field(default_factory=dict)
    """The newest heartbeat of each."""
    ends: Counter[Outcome] = field(default_factory=Counter)
    """Settled trajectories."""
    turns: Counter[TurnOutcome] = field(default_factory=Counter)
    samples: int = 0
    step: int = 0
    """The newest optimizer step."""
    version: int = -1
    """The newest policy version on the log."""
    curve: deque[float] = field(default_factory=lambda: deque(maxlen=CURVE_POINTS))
    """Share of recent trajectories that were solved, at the moment of each policy version."""
    _recent: deque[Sample] = field(default_factory=lambda: deque(maxlen=RECENT_SAMPLES))
    _turn_moments: deque[float] = field(default_factory=deque)

    def take(self, record: Record, now: float) -> None:
        """Fold a record in. `now` and the records' own times are unix seconds."""
        match record:
            case SlackHeartbeat():
                self.executors[record.worker] = record
            case TurnResult():
                self.turns[record.outcome] += 1
                if record.outcome is TurnOutcome.COMPLETED:
                    self._turn_moments.append(now)
            case Sample():
                self.samples += 1
                self._recent.append(record)
            case SampleOutcome():
                self.ends[record.outcome] += 1
                self.step = max(self.step, record.step)
            case WeightManifest():
                self._publish(record.version)
            case _:
                pass

    def turns_per_second(self, now: float) -> float:
        """Completed turns, over the last seconds."""
        while self._turn_moments and self._turn_moments[0] < now - RATE_SECONDS:
            self._turn_moments.popleft()
        return len(self._turn_moments) / RATE_SECONDS

    def silent(self, worker: str, now: float) -> bool:
        """Whether the executor's last heartbeat has expired."""
        beat = self.executors[worker]
        return now - beat.sent_at > beat.ttl_seconds

    @property
    def settled(self) -> int:
        """Trajectories with an outcome."""
        return self.ends.total()

    @property
    def solved(self) -> float | None:
        """Share of the recent trajectories that were solved; None before the first."""
        return sum(sample.success for sample in self._recent) / len(self._recent) if self._recent else None

    @property
    def turns_each(self) -> float:
        """Mean turns of the recent trajectories."""
        return sum(len(sample.turns) for sample in self._recent) / len(self._recent) if self._recent else 0.0

    def _publish(self, version: int) -> None:
        if version > self.version:
            self.version = version
            if self.solved is not None:
                self.curve.append(self.solved)
