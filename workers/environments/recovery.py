"""A home's trajectories built again from what the log says of them. Pure.

Keeps true
- The state built from the log is the one that lived: its places say which results were applied and where the present
  request lies, and both are folded by the functions that the life itself uses.
- Nothing is looked for but what is live: a trajectory costs its turns, however long the log is.
- A trajectory whose records are gone, or contradict its places, fails with the reason; none is dropped.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from schemas.arrays import ITEM_BYTES, count
from schemas.contexts import ContextMissing, assemble_context
from schemas.progress import EnvSnapshot, Group, TrajectoryProgress
from schemas.prompts import Prompt
from schemas.turns import TurnOutcome, TurnRequest, TurnResult
from topics.catalog import PROMPTS
from workers.environments.home import Home
from workers.environments.trajectory import Trajectory, digest_of, problem_of

Turn = tuple[str, int]
"""A trajectory and one of its turns."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A trajectory that cannot go on."""

    trajectory_id: str
    prompt: Prompt
    index: int
    reason: str


class _Gap(Exception):
    """The log does not hold what it should."""


@dataclass(slots=True)
class Recovery:
    """Folds the newest records of one home: groups, progress and snapshots, then what `requests` and `results` name."""

    home: Home
    _progress: dict[str, TrajectoryProgress] = field(default_factory=dict)
    _snapshots: dict[str, EnvSnapshot] = field(default_factory=dict)
    _requests: dict[Turn, tuple[int, TurnRequest]] = field(default_factory=dict)
    _links: dict[int, TurnRequest] = field(default_factory=dict)
    _results: dict[int, TurnResult] = field(default_factory=dict)

    def group(self, group_id: str, group: Group | None) -> None:
        """The newest counts; None says that the group is forgotten."""
        if group is None:
            self.home.forget(group_id)
        else:
            self.home.knows(group)

    def progress(self, trajectory_id: str, progress: TrajectoryProgress | None) -> None:
        """The newest counts; None says that the trajectory has ended."""
        if progress is None:
            self._progress.pop(trajectory_id, None)
        else:
            self._progress[trajectory_id] = progress

    def snapshot(self, trajectory_id: str, snapshot: EnvSnapshot | None) -> None:
        """The newest counts; None says that the trajectory has ended."""
        if snapshot is None:
            self._snapshots.pop(trajectory_id, None)
        else:
            self._snapshots[trajectory_id] = snapshot

    @property
    def requests(self) -> dict[Turn, int]:
        """The present requests, each with the offset at or after which it lies."""
        return {(name, progress.turn): progress.requested_from for name, progress in self._progress.items()}

    @property
    def links(self) -> list[int]:
        """Offsets of the requests that the present ones, once they were found, go on from."""
        return [link for _, request in self._requests.values() for link in request.chain]

    @property
    def results(self) -> list[int]:
        """Offsets of all results that the live trajectories have applied."""
        return [applied.offset for progress in self._progress.values() for applied in progress.applied]

    def results_from(self, low: int, end: int) -> int:
        """What is yet to be applied lies at or after this offset, when the home's results lie from `low` to `end`."""
        if not self._progress:
            return end if self.home.groups else low
        last = [progress.applied[-1].offset + 1 if progress.applied else low for progress in self._progress.values()]
        return max(low, min(last))

    def prompts_from(self, low: int) -> int:
        """The prompts before this offset have been decided, when they lie from `low` on.

        All before a dead letter have, and a group tells which had when it was opened.
        """
        decided = (known.decided_to for known in self.home.groups.values())
        return max([low, self.home.buried_before(PROMPTS), *decided])

    @property
    def live(self) -> int:
        return len(self._progress)

    def request(self, offset: int, request: TurnRequest) -> None:
        """A present request was found."""
        self._requests[request.trajectory_id, request.turn] = offset, request

    def link(self, offset: int, request: TurnRequest) -> None:
        """A request that another goes on from was found."""
        self._links[offset] = request

    def result(self, offset: int, result: TurnResult) -> None:
        """A result was found."""
        self._results[offset] = result

    def finish(self, max_context_tokens: int) -> tuple[dict[str, Trajectory], list[Broken], list[str]]:
        """The trajectories that live, those that cannot go on, and those whose group has settled without them."""
        trajectories: dict[str, Trajectory] = {}
        broken: list[Broken] = []
        strays: list[str] = []
        for name, progress in self._progress.items():
            group = self.home.unsettled.get(progress.group_id)
            if group is None:
                strays.append(name)
                continue
            try:
                trajectories[name] = self._rebuilt(progress, group.prompt, max_context_tokens)
            except _Gap as gap:
                broken.append(Broken(name, group.prompt, progress.index, f"recovery: {gap}"))
        return trajectories, broken, strays

    def _rebuilt(self, progress: TrajectoryProgress, prompt: Prompt, max_context_tokens: int) -> Trajectory:
        name = progress.trajectory_id
        if prompt.sampling.max_tokens is None:
            raise _Gap("the record of its group does not say how it is sampled")
        snapshot = self._snapshots.get(name)
        if snapshot is None:
            raise _Gap("the state of its environment is not on the log any more")
        if snapshot.digest != digest_of(snapshot.state):
            raise _Gap("the state of its environment is not the one that was saved")
        found = self._requests.get((name, progress.turn))
        if found is None:
            raise _Gap(f"the request of turn {progress.turn} is not on the log any more")
        offset, request = found
        trajectory = Trajectory(
            trajectory_id=name,
            index=progress.index,
            prompt=prompt,
            home=self.home.partition,
            state=snapshot.state,
            digest=snapshot.digest,
            requested_from=offset,
        )
        context = self._context(request)
        _observe(trajectory, context, progress.prompted)
        for turn, applied in enumerate(progress.applied):
            result = self._results.get(applied.offset)
            if result is None or (result.trajectory_id, result.turn, result.outcome) != (
                name,
                turn,
                TurnOutcome.COMPLETED,
            ):
                raise _Gap(f"the result of turn {turn} is not on the log any more")
            if problem := problem_of(result, count(trajectory.tokens)):
                raise _Gap(f"the result of turn {turn} is malformed: {problem}")
            trajectory.ask(max_context_tokens)
            trajectory.take_in(result, applied)
            _observe(trajectory, context, applied.observed)
        if trajectory.tokens != context or trajectory.turn != progress.turn:
            raise _Gap(f"the context of turn {progress.turn} does not follow from the results before it")
        trajectory.asked = request.sampling
        trajectory.chain, trajectory.lies_at = request.chain, offset
        trajectory.requested = request.context_tokens - count(request.appended)
        return trajectory

    def _context(self, request: TurnRequest) -> bytes:
        try:
            return assemble_context(request, self._links)
        except ContextMissing as torn:
            raise _Gap(str(torn)) from None


def _observe(trajectory: Trajectory, context: bytes, observed: int) -> None:
    """Take the next observation from the present context, which holds them all."""
    begin = len(trajectory.tokens)
    trajectory.observe(context[begin : begin + observed * ITEM_BYTES])


def outcomes_from(homes: Iterable[Home]) -> int | None:
    """Where the outcomes begin that say which open groups have settled; None when none is open."""
    return min((group.outcomes_from for home in homes for group in home.unsettled.values()), default=None)
