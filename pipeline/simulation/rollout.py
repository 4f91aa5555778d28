"""Simulated environment workers: groups, trajectories, and the turns that they request.

Keeps true
- A trajectory does what its plan says, whenever its turns are answered.
- A trajectory has one open turn at most, applies each turn once, and ends in one sample.
- Once as many of a group as are needed have ended with a reward, the others end as surplus, and their turns are
  withdrawn.

Units: seconds, tokens.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

from rose.pipeline.routing.turn_queue import ReceivedRequest
from rose.pipeline.simulation.events import EventQueue
from rose.pipeline.simulation.executors import Work
from rose.pipeline.simulation.prefix_cache import Segment
from rose.pipeline.simulation.trajectory_plans import GroupPlans, TrajectoryPlan
from rose.schemas.arrays import count, pack_tokens
from rose.schemas.prompts import Sampling, trajectory_id
from rose.schemas.sampled_tokens import VersionSpan
from rose.schemas.samples import Ending, Sample, SampleTurn
from rose.schemas.turns import (
    TurnDispatch,
    TurnOutcome,
    TurnRequest,
    TurnResult,
    TurnTimes,
    add_device_seconds,
    context_digest,
)

ENVIRONMENT = "simulated"

PATIENCE_SECONDS = 1e6

NO_DIGEST = context_digest(b"")
"""Digest of every simulated context: the router does not read contexts."""

STANDS_FOR = pack_tokens([0, 0])
"""The tokens of a simulated sample: one observed, and one sampled token that stands for all."""


@dataclass(slots=True)
class TurnFigures:
    """One applied turn."""

    trajectory: str
    turn: int
    worker: str
    """Executor that ended the turn."""
    attempts: int
    context_tokens: int
    cached_tokens: int
    """Tokens that the last attempt found in the prefix cache."""
    new_tokens: int
    requested_at: float
    queued_at: float
    dispatched_at: float
    received_at: float
    scheduled_at: float
    first_token_at: float
    finished_at: float
    applied_at: float
    version: int
    """Oldest version that sampled one of its tokens."""
    environment_seconds: float
    """Time of the environment's step that follows."""
    device_seconds: dict[str, float]
    """Engine time by worker class, all attempts together."""


@dataclass(slots=True)
class Trajectory:
    """One trajectory that has not ended."""

    name: str
    group: str
    group_size: int
    plan: TrajectoryPlan
    context_tokens: int
    """Tokens of the context of the present turn."""
    turn: int = 0
    waits: bool = False
    """Whether its turn is requested and not answered."""
    oldest_version: int | None = None
    sampled_tokens: int = 0
    device_seconds: dict[str, float] = field(default_factory=dict)


class Rollout:
    """The groups of a run, and their turns."""

    def __init__(
        self,
        plans: GroupPlans,
        events: EventQueue,
        request: Callable[[ReceivedRequest], None],
        on_sample: Callable[[Sample], None],
        *,
        needed: int = 0,
    ) -> None:
        """`request`: sends a turn request to the bus. `on_sample`: takes a finished trajectory.

        `needed`: trajectories of a group that must end with a reward; 0: all.
        """
        self.opened = 0
        """Groups opened."""
        self.begun = 0
        """Trajectories of these groups."""
        self.finished = 0
        """Trajectories that have ended."""
        self.turns: list[TurnFigures] = []
        self.live: dict[str, Trajectory] = {}
        self._needed = needed
        self._rewarded: Counter[str] = Counter()
        """Trajectories that have ended with a reward, by group."""
        self._plans = plans
        self._opened: dict[str, Sequence[TrajectoryPlan]] = {}
        """Plans of the trajectories of each opened group. A dispatch may come after its trajectory has ended."""
        self._events = events
        self._request = request
        self._on_sample = on_sample

    def open_group(self) -> None:
        """Open the next group: its environments are reset, and then request their first turns."""
        group, plans = f"g{self.opened}", self._plans(self.opened)
        self.opened += 1
        self.begun += len(plans)
        self._opened[group] = plans
        for index, plan in enumerate(plans):
            name = trajectory_id(group, index)
            self.live[name] = Trajectory(name, group, len(plans), plan, plan.turns[0].observed_tokens)
            self._events.after(plan.reset_seconds, partial(self._ask, name))

    def work_of(self, dispatch: TurnDispatch) -> Work:
        """Return the work of a dispatched turn, also if another attempt has answered the turn meanwhile."""
        request = dispatch.request
        _, _, index = request.trajectory_id.rpartition(":")
        plan = self._opened[request.group_id][int(index)]
        prompt = plan.turns[0].observed_tokens
        own = Segment(request.trajectory_id, request.context_tokens - prompt)
        return Work((Segment(f"prompt {request.group_id}", prompt), own), plan.turns[request.turn].new_tokens)

    def on_result(self, result: TurnResult) -> None:
        """Apply a result: the environment makes a step, or the trajectory ends."""
        trajectory = self.live.get(result.trajectory_id)
        if trajectory is None or trajectory.turn != result.turn or result.outcome not in ENDS_TURN:
            return
        if result.outcome is TurnOutcome.FAILED:
            self._end(trajectory.name, failure=result.reason)
            return
        trajectory.waits = False
        sampled = count(result.tokens)
        version = min(span.version for span in result.spans)
        trajectory.oldest_version = (
            version if trajectory.oldest_version is None else min(version, trajectory.oldest_version)
        )
        trajectory.sampled_tokens += sampled
        trajectory.device_seconds = add_device_seconds(trajectory.device_seconds, result.device_seconds)
        seconds = trajectory.plan.turns[trajectory.turn].environment_seconds
        self._count(result, sampled, version, seconds)
        trajectory.context_tokens += sampled
        trajectory.turn += 1
        if trajectory.turn == len(trajectory.plan.turns):
            self._events.after(seconds, lambda: self._end(trajectory.name))
            return
        trajectory.context_tokens += trajectory.plan.turns[trajectory.turn].observed_tokens
        self._events.after(seconds, lambda: self._ask(trajectory.name))

    def _count(self, result: TurnResult, sampled: int, version: int, environment_seconds: float) -> None:
        times = result.times
        self.turns.append(
            TurnFigures(
                trajectory=result.trajectory_id,
                turn=result.turn,
                worker=result.worker or "",
                attempts=result.attempt + 1,
                context_tokens=result.context_tokens,
                cached_tokens=result.cached_tokens,
                new_tokens=sampled,
                requested_at=times.requested_at,
                queued_at=times.queued_at,
                dispatched_at=times.dispatched_at,
                received_at=times.received_at,
                scheduled_at=times.scheduled_at,
                first_token_at=times.first_token_at,
                finished_at=times.finished_at,
                applied_at=self._events.now,
                version=version,
                environment_seconds=environment_seconds,
                device_seconds=dict(result.device_seconds),
            )
        )

    def _ask(self, name: str) -> None:
        trajectory = self.live.get(name)
        if trajectory is not None:
            trajectory.waits = True
            self._send(trajectory)

    def _send(self, trajectory: Trajectory, *, withdrawn: bool = False) -> None:
        request = TurnRequest(
            trajectory_id=trajectory.name,
            group_id=trajectory.group,
            home=0,
            environment=ENVIRONMENT,
            turn=trajectory.turn,
            appended=b"",
            context_tokens=trajectory.context_tokens,
            digest=NO_DIGEST,
            chain=(0,) if trajectory.turn else (),
            sampling=_sampling(trajectory.plan.max_turn_tokens),
            requested_at=self._events.now,
            patience_seconds=PATIENCE_SECONDS,
            withdrawn=withdrawn,
        )
        self._request(ReceivedRequest.from_record(request))

    def _end(self, name: str, failure: str = "", *, surplus: bool = False) -> None:
        trajectory = self.live.pop(name, None)
        if trajectory is None:
            return
        self.finished += 1
        if trajectory.waits and surplus:
            self._send(trajectory, withdrawn=True)
        rewarded = not failure and not surplus
        ended = Ending.DONE if rewarded else Ending.SURPLUS if surplus else Ending.FAILED
        times = SampleTurn(
            turn=0,
            attempt=0,
            worker="",
            sampling=_sampling(trajectory.plan.max_turn_tokens),
            start=1,
            end=2,
            cached_tokens=0,
            times=TurnTimes(),
            environment_seconds=0.0,
        )
        version = trajectory.oldest_version
        self._on_sample(
            Sample(
                trajectory_id=trajectory.name,
                group_id=trajectory.group,
                group_size=trajectory.group_size,
                model_id=ENVIRONMENT,
                environment=ENVIRONMENT,
                seed=0,
                tokens=STANDS_FOR,
                loss_mask=b"\x00\x01",
                logprobs=pack_tokens([0, 0]),
                spans=() if version is None else (VersionSpan(1, 2, version),),
                turns=(times,),
                reward=float(trajectory.plan.solved) if rewarded else None,
                success=trajectory.plan.solved if rewarded else None,
                failure=failure,
                info={"tokens": trajectory.context_tokens, "sampled": trajectory.sampled_tokens},
                device_seconds=trajectory.device_seconds,
                completed_at=self._events.now,
                ended=ended,
            )
        )
        self._rewarded[trajectory.group] += rewarded
        if rewarded and self._rewarded[trajectory.group] == self._needed:
            for index in range(trajectory.group_size):
                self._end(trajectory_id(trajectory.group, index), surplus=True)


ENDS_TURN = (TurnOutcome.COMPLETED, TurnOutcome.FAILED)


@cache
def _sampling(max_tokens: int) -> Sampling:
    return Sampling(max_tokens=max_tokens)
