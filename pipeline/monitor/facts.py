"""What was seen of a run: the facts that a diagnosis is made of.

Keeps true: what is not known is None or the least that can be, and nothing is concluded from it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rose.schemas.heartbeats import ExecutorState


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long each kind of work may take, as the run is configured. Shorter than STANDSTILL_SECONDS says nothing."""

    step_seconds: float = 0.0
    """A reset or step of an environment."""
    turn_seconds: float = 0.0
    """A turn."""
    training_seconds: float = 0.0
    """A step of the trainer."""


PATIENCE = Patience()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorFacts:
    """One executor, by its newest heartbeat."""

    worker: str
    slot: int = 0
    """Of its inbox."""
    state: ExecutorState
    version: int
    refused_version: int = -1
    refused_reason: str = ""
    silent_seconds: float
    """Since the heartbeat came here; since the beginning of looking for one that came before."""
    ttl_seconds: float
    held: int = 0
    """Turns that it runs or keeps waiting."""
    max_turns: int = 0
    clock_off_seconds: float = 0.0
    """Its clock against this machine's."""
    kv_used: float = 0.0
    """Share of its KV cache."""
    tokens_per_second: float = 0.0
    """Of one sequence."""
    swap_seconds: float = 0.0
    """The engine's pause at its latest version."""
    paused_reason: str = ""
    cuts: int = 0
    """Times that serving took room back from rollouts."""
    frozen: bool = False
    """It was cut, and grows no more for now."""
    rivals: bool = False
    """Two run under its name."""
    ended_seconds: float = 0.0
    """Since a turn of its ended, or since it holds any."""
    unread_seconds: float = 0.0
    """Since its inbox has got more, of which it has shown no sign."""

    @property
    def silent(self) -> bool:
        return self.silent_seconds > self.ttl_seconds

    @property
    def ready(self) -> bool:
        return self.state is ExecutorState.READY and not self.silent


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleFacts:
    """A process that has begun of late, for the first time or anew."""

    role: str
    times: int
    """Within ANEW_SECONDS."""
    reason: str = ""
    """Why it began anew at last; empty where its process was started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StalledWork:
    """Work of one kind that waits in a home."""

    count: int
    """Prompts or results that wait."""
    seconds: float
    """Since any of that kind was taken in there, as far as is known."""
    seen_seconds: float
    """For how long it was seen that it could be."""

    @property
    def stalled_seconds(self) -> float:
        """For how long it stands still, for all that was seen."""
        return min(self.seconds, self.seen_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeFacts:
    """What waits in one home for the environment worker that owns it."""

    home: int
    worker: str
    idle_seconds: float = math.inf
    """Since the worker took anything in, in any of its homes."""
    prompts: StalledWork | None = None
    """None where none waits, or the worker's window has no room."""
    results: StalledWork | None = None
    """None where none waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellFacts:
    """One of several cells: what is routed there apart from all else. See Facts."""

    cell: int
    executors: Sequence[ExecutorFacts] = ()
    in_a_turn: int = 0
    results_waiting: int = 0
    applied_seconds: float = 0.0
    dispatched_seconds: float = 0.0
    able_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was seen of a run. What is not known is None, and nothing is concluded from it."""

    executors: Sequence[ExecutorFacts] = ()
    begun: Sequence[RoleFacts] = ()
    newest_version: int = -1
    """On the log, of those that are believed."""
    disbelieved: int = 0
    """Manifests on the log that are of another run, or not signed by the trusted key."""
    max_lag_versions: int = 2**53
    """Executors that are further behind the newest version that is served get no turns."""
    environment_workers: int | None = None
    homes: int = 0
    homes_owned: int | None = None
    routers: int | None = None
    prompts_waiting: int = 0
    held_homes: Sequence[int] = ()
    """Homes whose prompts nobody can read, as they lie behind a transaction that is open."""
    held_seconds: float = 0.0
    """For how long that was seen of the first of them."""
    open_groups: int = 0
    window_groups: int | None = None
    """Groups that all environment workers together may hold open."""
    in_a_turn: int = 0
    """Trajectories of open groups that are under way."""
    waiting_for_trainer: int = 0
    """Trajectories of open groups that have ended and have no outcome."""
    results_waiting: int = 0
    """Results that no environment worker has taken in."""
    openable: int | None = None
    """Prompts that wait for a worker whose window has room."""
    opened_seconds: float | None = None
    """Since a group was last seen to be opened, refused or settled, or an outcome to make room, or a prompt to wait."""
    workers_seconds: float | None = None
    """Since an environment worker is there, as far as that was seen."""
    applied_seconds: float = 0.0
    """Since a turn was last seen to be applied, or since the beginning of looking where nothing tells more."""
    dispatched_seconds: float = 0.0
    """The same of a turn sent to an executor."""
    able_seconds: float | None = None
    """Since some executor could take one more turn."""
    settled_seconds: float = 0.0
    """The same of an outcome, or of a sample that the trainer could settle."""
    home_facts: Sequence[HomeFacts] = ()
    """Of the homes that somebody owns and in which something waits."""
    cells: Sequence[CellFacts] = ()
    """Where there are several."""
    patience: Patience = PATIENCE
    letters: Mapping[str, int] = field(default_factory=dict)
    """Dead letters by topic."""

    @property
    def work_left(self) -> bool:
        return self.prompts_waiting > 0 or self.open_groups > 0

    @property
    def moved_seconds(self) -> float:
        """Since anything was last seen to come further. A turn that is sent out again and again does not."""
        stages = self.applied_seconds, self.settled_seconds, self.opened_seconds
        return min(seconds for seconds in stages if seconds is not None)

    @property
    def can_be_opened(self) -> int:
        """Prompts that wait though a worker has room for them."""
        if not self.environment_workers:
            return 0
        if self.openable is not None:
            return self.openable
        full = self.window_groups is not None and self.open_groups >= self.window_groups
        return 0 if full else self.prompts_waiting
