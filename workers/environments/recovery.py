"""A home's trajectories built again from the log.

Keeps true
- The state built from the log is the one that lived: newest snapshot, latest request, and the first COMPLETED result of
  every turn before it, folded by the functions that the life itself uses.
- Whether a result was applied is told by the requests alone, never by offsets.
- A trajectory whose records are gone from the log, or contradict one another, fails with the reason; none is dropped.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from confluent_kafka import OFFSET_BEGINNING

from schemas.arrays import ITEM_BYTES, count
from schemas.environments import EnvSnapshot, LogPosition
from schemas.prompts import Prompt
from schemas.turns import Applied, TurnOutcome, TurnRequest, TurnResult
from topics.catalog import COMPLETED, PROMPTS, REQUESTED, SNAPSHOTS
from topics.log import await_decided, read_back, read_letters
from topics.settings import BusSettings
from workers.environments.home import Home
from workers.environments.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Begins:
    """The committed offsets of a home's inputs."""

    prompts: int
    results: int


@dataclass(frozen=True, slots=True)
class Broken:
    """A trajectory that cannot go on."""

    snapshot: EnvSnapshot
    reason: str


@dataclass(slots=True)
class _Life:
    """What the log says of one trajectory."""

    snapshot: EnvSnapshot
    latest: TurnRequest | None = None
    context_tokens: dict[int, int] = field(default_factory=dict)
    """By turn; contexts only grow, so the latest one holds them all."""
    applied: dict[int, Applied | None] = field(default_factory=dict)
    """By the turn of the request that says it."""
    results: dict[int, TurnResult] = field(default_factory=dict)
    """The first COMPLETED one of every turn."""


class Recovery:
    """Folds the records of one home, each topic in its order: snapshots first, then requests, then results."""

    def __init__(self) -> None:
        self._lives: dict[str, _Life] = {}

    def snapshot(self, trajectory_id: str, snapshot: EnvSnapshot | None) -> None:
        """The newest counts; None says that the trajectory has ended."""
        if snapshot is None:
            self._lives.pop(trajectory_id, None)
        else:
            self._lives[trajectory_id] = _Life(snapshot)

    def request(self, request: TurnRequest) -> None:
        """A turn was asked for, so the one before it was applied."""
        life = self._lives.get(request.trajectory_id)
        if life is not None:
            life.context_tokens[request.turn] = count(request.context)
            life.applied[request.turn] = request.applied
            if life.latest is None or request.turn > life.latest.turn:
                life.latest = request

    def result(self, result: TurnResult) -> None:
        """A turn was completed; the first result of a turn is the one that was applied, if any was."""
        life = self._lives.get(result.trajectory_id)
        if life is not None and result.outcome is TurnOutcome.COMPLETED:
            life.results.setdefault(result.turn, result)

    @property
    def opened(self) -> LogPosition | None:
        """Where the oldest live trajectory begins; None when none lives."""
        opened = [life.snapshot.opened for life in self._lives.values()]
        if not opened:
            return None
        return LogPosition(
            requested=min(place.requested for place in opened), completed=min(place.completed for place in opened)
        )

    def finish(self) -> tuple[dict[str, Trajectory], list[Broken]]:
        """The trajectories that live, and those that cannot go on."""
        trajectories: dict[str, Trajectory] = {}
        broken: list[Broken] = []
        for trajectory_id, life in self._lives.items():
            try:
                trajectories[trajectory_id] = _rebuilt(life)
            except _Gap as gap:
                broken.append(Broken(life.snapshot, f"recovery: {gap}"))
        return trajectories, broken


class _Gap(Exception):
    """The log does not hold what it should."""


def _rebuilt(life: _Life) -> Trajectory:
    snapshot, latest = life.snapshot, life.latest
    if latest is None:
        raise _Gap("no turn request is on the log any more")
    trajectory = Trajectory(
        trajectory_id=snapshot.trajectory_id,
        index=snapshot.index,
        prompt=snapshot.prompt,
        home=snapshot.home,
        opened=snapshot.opened,
        state=snapshot.state,
        digest=snapshot.digest,
    )
    for turn in range(latest.turn + 1):
        if turn not in life.context_tokens:
            raise _Gap(f"the request of turn {turn} is not on the log any more")
        if turn > 0:
            result, applied = life.results.get(turn - 1), life.applied[turn]
            if result is None or applied is None:
                raise _Gap(f"the result of turn {turn - 1} is not on the log any more")
            trajectory.take_in(result, applied)
        begin, end = len(trajectory.tokens), life.context_tokens[turn] * ITEM_BYTES
        if latest.context[:begin] != trajectory.tokens or not begin <= end <= len(latest.context):
            raise _Gap(f"the context of turn {turn} does not follow from the results before it")
        trajectory.observe(latest.context[begin:end])
    return trajectory


def recover_homes(
    settings: BusSettings, begins: Mapping[int, Begins], *, life: int
) -> tuple[dict[int, Home], list[Broken]]:
    """Read homes back, by partition. Reading goes on at `begins` afterwards: what lies before is done.

    The committed offsets must have been asked for first: the broker gives them once no former owner's transaction can
    still be committed. Raises TopicMissing or BusError.
    """
    await_decided(settings, [(topic, partition) for topic in (SNAPSHOTS, REQUESTED) for partition in begins])
    homes = {
        partition: Home(partition, life=life, prompts_from=begin.prompts, results_from=begin.results)
        for partition, begin in begins.items()
    }
    _recall_prompts(settings, homes)
    recoveries = {partition: Recovery() for partition in homes}
    for envelope in read_back(settings, {(SNAPSHOTS, partition): OFFSET_BEGINNING for partition in homes}):
        assert envelope.record is None or isinstance(envelope.record, EnvSnapshot)
        recoveries[envelope.partition].snapshot(envelope.key, envelope.record)
    opened = {partition: place for partition, recovery in recoveries.items() if (place := recovery.opened) is not None}
    for envelope in read_back(
        settings, {(REQUESTED, partition): place.requested for partition, place in opened.items()}
    ):
        if isinstance(envelope.record, TurnRequest):
            recoveries[envelope.partition].request(envelope.record)
    for envelope in read_back(
        settings, {(COMPLETED, partition): place.completed for partition, place in opened.items()}
    ):
        if isinstance(envelope.record, TurnResult):
            recoveries[envelope.partition].result(envelope.record)
    broken: list[Broken] = []
    for partition, recovery in recoveries.items():
        homes[partition].trajectories, cannot = recovery.finish()
        broken += cannot
    return homes, broken


def _recall_prompts(settings: BusSettings, homes: Mapping[int, Home]) -> None:
    """Which groups were opened: all prompts before the committed offset but those that were refused."""
    refused = {(letter.partition, letter.offset) for letter in read_letters(settings, PROMPTS)}
    for envelope in read_back(settings, {(PROMPTS, partition): OFFSET_BEGINNING for partition in homes}):
        home, prompt = homes[envelope.partition], envelope.record
        decided = envelope.offset < home.prompts_low_water
        if decided and isinstance(prompt, Prompt) and (envelope.partition, envelope.offset) not in refused:
            home.opened(prompt)
