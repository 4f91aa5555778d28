"""Facts about a run, from which the diagnosis is made.

Keeps true: an unknown fact is None or the smallest possible value, and no finding follows from it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rose.schemas.heartbeats import ExecutorState


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long each kind of work may take in this configuration. Values below STANDSTILL_SECONDS have no effect."""

    step_seconds: float = 0.0
    """A reset or a step of an environment."""
    turn_seconds: float = 0.0
    """A turn."""
    training_seconds: float = 0.0
    """A step of the trainer."""


PATIENCE = Patience()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorFacts:
    """The state of one executor by its newest heartbeat."""

    worker: str
    slot: int = 0
    """Number of its inbox."""
    state: ExecutorState
    version: int
    refused_version: int = -1
    refused_reason: str = ""
    silent_seconds: float
    """Since the heartbeat arrived; since the start of reading if it arrived before."""
    ttl_seconds: float
    held: int = 0
    """Number of turns that run or wait in the executor."""
    max_turns: int = 0
    clock_off_seconds: float = 0.0
    """The executor's clock minus this machine's clock."""
    kv_used: float = 0.0
    """Share of the KV cache that is used, 0 to 1."""
    tokens_per_second: float = 0.0
    """Decode speed of one sequence."""
    swap_seconds: float = 0.0
    """Pause of the engine when it activated its newest version."""
    paused_reason: str = ""
    cuts: int = 0
    """Number of times that serving took KV memory back from rollouts."""
    frozen: bool = False
    """The budget was cut, and does not grow for now."""
    rivals: bool = False
    """Two executors run under this name."""
    ended_seconds: float = 0.0
    """Since a turn of the executor ended, or since it holds turns."""
    unread_seconds: float = 0.0
    """Since its inbox got records of which its heartbeats show no sign."""

    @property
    def silent(self) -> bool:
        """Whether the newest heartbeat is older than its time to live."""
        return self.silent_seconds > self.ttl_seconds

    @property
    def ready(self) -> bool:
        """Whether the executor sends heartbeats and is ready for turns."""
        return self.state is ExecutorState.READY and not self.silent


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleFacts:
    """A role that has started recently, for the first time or again."""

    role: str
    times: int
    """Number of starts within RECENT_START_SECONDS."""
    reason: str = ""
    """Reason of the last start; empty if its process was started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StalledWork:
    """Work of one kind that waits in a home."""

    count: int
    """Prompts or results that wait."""
    seconds: float
    """Since work of this kind was last taken in the home, as far as that is known."""
    seen_seconds: float
    """Time for which it was observed that the work could be taken."""

    @property
    def stalled_seconds(self) -> float:
        """Time for which the work is certainly stalled."""
        return min(self.seconds, self.seen_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeFacts:
    """The work in one home that waits for its environment worker."""

    home: int
    worker: str
    idle_seconds: float = math.inf
    """Since the worker took any work in any of its homes."""
    prompts: StalledWork | None = None
    """None if no prompt waits, or the worker's window has no room."""
    results: StalledWork | None = None
    """None if no result waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellFacts:
    """One of several cells, each of which is routed separately. The fields are those of `Facts`."""

    cell: int
    executors: Sequence[ExecutorFacts] = ()
    in_a_turn: int = 0
    results_waiting: int = 0
    applied_seconds: float = 0.0
    dispatched_seconds: float = 0.0
    able_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class RecentFailures:
    """Trajectories that failed, among those that were settled last."""

    failed: int = 0
    settled: int = 0
    reason: str = ""
    """The most frequent reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts about a run. A fact that is not known is None, and no finding follows from it."""

    executors: Sequence[ExecutorFacts] = ()
    role_starts: Sequence[RoleFacts] = ()
    newest_version: int = -1
    """The newest trusted policy version on the log."""
    disbelieved: int = 0
    """Number of manifests on the log that are of another run, or not signed by the trusted key."""
    max_lag_versions: int = 2**53
    """Executors that are further behind the newest served version get no turns."""
    environment_workers: int | None = None
    foreign_clients: Sequence[str] = ()
    """Client ids of other programs in the consumer group of the environment workers."""
    homes: int = 0
    homes_owned: int | None = None
    routers: int | None = None
    prompts_waiting: int = 0
    held_homes: Sequence[int] = ()
    """Homes whose prompts cannot be read because of an open transaction."""
    held_seconds: float = 0.0
    """Longest time for which a home was seen to be held by an open transaction."""
    open_groups: int = 0
    window_groups: int | None = None
    """Maximum number of open groups of all environment workers together."""
    in_a_turn: int = 0
    """Number of trajectories of open groups that have not ended."""
    waiting_for_trainer: int = 0
    """Number of trajectories of open groups that have ended and have no outcome, without those of evaluations."""
    evaluating: int = 0
    """Number of trajectories of evaluations without an outcome."""
    evaluation_due: bool = False
    """Whether the newest version is one that is evaluated: the trainer may hold the next version back."""
    results_waiting: int = 0
    """Number of results that no environment worker has read."""
    openable: int | None = None
    """Number of prompts that wait for a worker with room in its window."""
    opened_seconds: float | None = None
    """Since a group was opened, refused or settled, an outcome made room, or a prompt waits."""
    workers_seconds: float | None = None
    """Time for which environment workers have been there, as far as that was observed."""
    applied_seconds: float = 0.0
    """Since a turn was applied; since the start of reading if nothing else is known."""
    dispatched_seconds: float = 0.0
    """Since a turn was dispatched; since the start of reading if nothing else is known."""
    able_seconds: float | None = None
    """Longest time for which an executor has been able to accept a turn."""
    settled_seconds: float = 0.0
    """Since an outcome, or a sample that the trainer could settle."""
    failures: RecentFailures = RecentFailures()
    home_facts: Sequence[HomeFacts] = ()
    """The homes that have an owner and waiting work."""
    cells: Sequence[CellFacts] = ()
    """The cells, if there are several."""
    patience: Patience = PATIENCE
    dead_letters: Mapping[str, int] = field(default_factory=dict)
    """Number of dead letters by topic."""

    @property
    def work_left(self) -> bool:
        """Whether prompts wait or groups are open."""
        return self.prompts_waiting > 0 or self.open_groups > 0

    @property
    def moved_seconds(self) -> float:
        """Since anything was last seen to progress. Repeated dispatches of a turn are no progress."""
        stages = self.applied_seconds, self.settled_seconds, self.opened_seconds
        return min(seconds for seconds in stages if seconds is not None)

    @property
    def can_be_opened(self) -> int:
        """Number of prompts that wait although a worker has room for them."""
        if not self.environment_workers:
            return 0
        if self.openable is not None:
            return self.openable
        full = self.window_groups is not None and self.open_groups >= self.window_groups
        return 0 if full else self.prompts_waiting
