"""Load that users put on an engine while a turn ran there, from the heartbeats of the executor.

Keeps true
- A turn and a heartbeat are compared by the clock of the executor, which stamps both.
- A window begins one validity of a heartbeat before the engine began the turn, so that a short turn has one too.
- Memory grows with the number of turns, not with the number of heartbeats.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from rose.schemas.heartbeats import TTL_SECONDS, SlackHeartbeat, WorkerClass
from rose.schemas.samples import SampleTurn

TurnName = tuple[str, int]
"""A trajectory and the number of one of its turns."""


@dataclass(slots=True)
class ServingLoad:
    """Load of an engine's users while one turn ran."""

    worker_class: WorkerClass
    heartbeats: int = 0
    running: int = 0
    """Most requests of users that ran at once."""
    waiting: int = 0
    """Most requests of users that waited at once."""
    first_cuts: int = 0
    last_cuts: int = 0
    """Number of times, since the executor's start, that serving took memory back: at the first and the last one."""
    frozen: bool = False
    """Whether the budget of rollouts was frozen."""
    headroom_seconds: float = inf
    """Least prefill headroom of serving; infinite if no heartbeat has one."""

    def add(self, heartbeat: SlackHeartbeat) -> None:
        """Add a heartbeat."""
        if not self.heartbeats:
            self.first_cuts = heartbeat.cuts
        self.heartbeats += 1
        self.running = max(self.running, heartbeat.serving.running)
        self.waiting = max(self.waiting, heartbeat.serving.waiting)
        self.last_cuts = heartbeat.cuts
        self.frozen |= heartbeat.frozen
        if heartbeat.prefill_headroom_seconds is not None:
            self.headroom_seconds = min(self.headroom_seconds, heartbeat.prefill_headroom_seconds)

    @property
    def cuts(self) -> int:
        """Number of times that serving took memory back meanwhile; 0 if the executor restarted."""
        return max(0, self.last_cuts - self.first_cuts)


@dataclass(frozen=True, slots=True)
class _Window:
    begin: float
    end: float
    turn: TurnName


@dataclass(slots=True)
class ServingLoads:
    """Folds heartbeats into the load during each turn."""

    _windows: dict[str, list[_Window]] = field(default_factory=lambda: defaultdict(list))
    """Windows by worker."""
    _loads: dict[TurnName, ServingLoad] = field(default_factory=dict)

    def add_turn(self, trajectory_id: str, turn: SampleTurn) -> None:
        """Ask for the load during a turn."""
        times = turn.times
        begin = times.scheduled_at or times.received_at or times.finished_at
        if begin:
            window = _Window(begin - TTL_SECONDS, times.finished_at or begin, (trajectory_id, turn.turn))
            self._windows[turn.worker].append(window)

    @property
    def extent(self) -> tuple[float, float] | None:
        """The begin of the first and the end of the last window in Unix seconds; None if there is no window."""
        windows = [each for some in self._windows.values() for each in some]
        return (min(each.begin for each in windows), max(each.end for each in windows)) if windows else None

    def add(self, heartbeats: Iterable[SlackHeartbeat]) -> None:
        """Fold heartbeats, each worker's in the order of the log."""
        for heartbeat in heartbeats:
            for window in self._windows.get(heartbeat.worker, ()):
                if window.begin <= heartbeat.sent_at <= window.end:
                    load = self._loads.setdefault(window.turn, ServingLoad(heartbeat.worker_class))
                    load.add(heartbeat)

    def of(self, trajectory_id: str, turn: SampleTurn) -> ServingLoad | None:
        """Return the load during a turn; None if the log has no heartbeat of that time."""
        return self._loads.get((trajectory_id, turn.turn))


def describe_load(load: ServingLoad | None) -> str:
    """Return the load in words."""
    if load is None:
        return "no heartbeat of that time on the log"
    if load.worker_class is WorkerClass.DEDICATED:
        return "dedicated, serves no users"
    words = [f"users: {load.running} running, {load.waiting} waiting at most"]
    if load.headroom_seconds < inf:
        words.append(f"prefill headroom {1000 * load.headroom_seconds:.0f} ms at least")
    if load.cuts:
        words.append(f"memory taken back {load.cuts} times")
    if load.frozen:
        words.append("budget frozen")
    return ", ".join(words)
