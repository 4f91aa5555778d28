"""The conservation law: every trajectory asked for has one outcome, or a place where it is.

Keeps true
- `requested = trained + stale + filtered + infra_failed + superseded + in flight`, or the audit is not clean and names
  the trajectories for which it does not hold.
- Folding is indifferent to the order of topics: only the order within a topic's partition counts.

Pure: a fold over records; who reads the log is `pipeline/accounting/audit.py`.

Example (a prompt of 3)
    g:0 has a sample and a TRAINED outcome   -> trained
    g:1 has a sample                         -> in flight, waiting for the trainer
    g:2 has a tombstone and nothing else     -> lost
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from schemas.environments import EnvSnapshot
from schemas.prompts import Prompt, trajectory_id
from schemas.samples import Outcome, Sample, SampleOutcome
from schemas.turns import TurnRequest, TurnResult

PromptPlace = tuple[int, int]
"""Partition and offset of a prompt."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """Where the trajectories without an outcome are."""

    not_opened: int
    in_a_turn: int
    """Opened and not ended: a turn is asked for, running, or being applied."""
    waiting_for_trainer: int

    @property
    def total(self) -> int:
        return self.not_opened + self.in_a_turn + self.waiting_for_trainer


@dataclass(frozen=True, slots=True)
class Audit:
    """Trajectories by what became of them."""

    requested: int
    trained: int
    stale: int
    filtered: int
    infra_failed: int
    superseded: int
    in_flight: InFlight
    lost: tuple[str, ...]
    """Ended or begun, yet without sample, outcome or snapshot."""
    doubled: tuple[str, ...]
    """With two outcomes, or two samples."""
    unasked: tuple[str, ...]
    """With a sample or outcome, but of no prompt."""

    @property
    def settled(self) -> int:
        """Trajectories with an outcome."""
        return self.trained + self.stale + self.filtered + self.infra_failed + self.superseded

    @property
    def clean(self) -> bool:
        """Whether the law holds."""
        return self.requested == self.settled + self.in_flight.total and not (self.lost or self.doubled or self.unasked)

    def trajectories(self) -> dict[str, int]:
        """The law's terms by name, as `summary.json` has them."""
        ends = {outcome.value: int(getattr(self, outcome.value)) for outcome in Outcome}
        return {"requested": self.requested, **ends, "in_flight": self.in_flight.total}


@dataclass(slots=True)
class _Seen:
    """What the log says of one trajectory."""

    turns: bool = False
    snapshot: bool | None = None
    """True: the newest is a snapshot; False: it is a tombstone; None: there is neither."""
    samples: int = 0
    outcomes: list[Outcome] = field(default_factory=list)


class Ledger:
    """Folds records into an Audit. Give it each topic's records in the order of their offsets."""

    def __init__(self) -> None:
        self._prompts: dict[PromptPlace, tuple[str, int]] = {}
        self._dead: set[PromptPlace] = set()
        self._seen: dict[str, _Seen] = {}

    def prompt(self, prompt: Prompt, *, place: PromptPlace) -> None:
        self._prompts[place] = (prompt.group_id, prompt.group_size)

    def dead_prompt(self, place: PromptPlace) -> None:
        """The prompt that lay there was dead-lettered: it asks for nothing."""
        self._dead.add(place)

    def turn(self, record: TurnRequest | TurnResult) -> None:
        self._of(record.trajectory_id).turns = True

    def snapshot(self, trajectory: str, record: EnvSnapshot | None) -> None:
        """`record` None is a tombstone."""
        self._of(trajectory).snapshot = record is not None

    def sample(self, record: Sample) -> None:
        self._of(record.trajectory_id).samples += 1

    def outcome(self, record: SampleOutcome) -> None:
        self._of(record.trajectory_id).outcomes.append(record.outcome)

    def audit(self, *, prompts_expired: bool = False) -> Audit:
        """The law as of what was folded. `prompts_expired`: the log keeps no longer all prompts, so some go unnamed."""
        asked = self._asked()
        ends: Counter[Outcome] = Counter()
        places: Counter[str] = Counter()
        lost, doubled = [], []
        for trajectory in asked:
            seen = self._seen.get(trajectory, _Seen())
            if len(seen.outcomes) > 1 or seen.samples > 1:
                doubled.append(trajectory)
            if seen.outcomes:
                ends[seen.outcomes[0]] += 1
            elif (place := _place(seen)) is not None:
                places[place] += 1
            else:
                lost.append(trajectory)
        unasked = () if prompts_expired else self._unasked(asked)
        return Audit(
            requested=len(asked),
            **{outcome.value: ends[outcome] for outcome in Outcome},
            in_flight=InFlight(places["not_opened"], places["in_a_turn"], places["waiting_for_trainer"]),
            lost=tuple(lost),
            doubled=tuple(doubled),
            unasked=unasked,
        )

    def _of(self, trajectory: str) -> _Seen:
        return self._seen.setdefault(trajectory, _Seen())

    def _asked(self) -> dict[str, None]:
        groups: dict[str, int] = {}
        for place, (group_id, size) in sorted(self._prompts.items()):
            if place not in self._dead:
                groups.setdefault(group_id, size)
        return dict.fromkeys(trajectory_id(group, index) for group, size in groups.items() for index in range(size))

    def _unasked(self, asked: Iterable[str]) -> tuple[str, ...]:
        known = set(asked)
        return tuple(
            sorted(name for name, seen in self._seen.items() if (seen.outcomes or seen.samples) and name not in known)
        )


def _place(seen: _Seen) -> str | None:
    """Where a trajectory without an outcome is; None if nowhere."""
    if seen.samples:
        return "waiting_for_trainer"
    if seen.snapshot:
        return "in_a_turn"
    if seen.snapshot is None and not seen.turns:
        return "not_opened"
    return None
