"""Liveness: which executors may be trusted with a turn.

Keeps true
- An executor is LIVE only while its heartbeats arrive and it has proven a policy version at most `max_lag_versions`
  behind the newest version that an executor serves. Only the versions in heartbeats count.
- There is no way from GONE to LIVE: an executor that returns is STALE until it proves the current policy version.
- If no executor sends heartbeats, the router assumes that it was away itself. Silence is measured on the liveness
  clock, which advances by at most `MAX_CLOCK_STEP_SECONDS` between two heartbeats of any executors. So an executor
  becomes GONE only after a heartbeat of another executor, and a gap without heartbeats expires no executor.
- Clock skew decides nothing. The reported skew is the least difference over SKEW_WINDOW_SECONDS, so a late heartbeat
  does not count as skew.
- The turns of an executor that leaves or restarts are returned once.
- Executors are told apart by worker name: several workers may use one inbox.
- Incarnations are compared within one inbox, where they grow. A heartbeat of an older incarnation is ignored until the
  newer incarnation is GONE. An incarnation in another inbox replaces the known one, and later heartbeats of the
  replaced incarnation are ignored. So two processes under one name do not take turns from each other again and again.

Example, TTL 2 s, w1 and w2 send five heartbeats a second
    w1's last heartbeat at 10, w2 goes on     -> at 12 w1 is GONE, its turns are returned
    w1's heartbeat at 15, same incarnation    -> STALE until it proves the version of w2; it keeps the turns that it
                                                 lists
    no heartbeats from 20 to 30               -> no executor is GONE
    w1's heartbeat at 30, none of w2          -> 0.5 s of the gap count for w2: GONE at 31.5
    w1 alone in the fleet, killed at 40       -> not GONE until a new incarnation or another executor sends a heartbeat
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from rose.pipeline.routing.turn import Turn
from rose.schemas.heartbeats import TTL_SECONDS, ExecutorState, SlackHeartbeat

MAX_SKEW_SECONDS = 5.0
"""A larger clock skew is reported. Synchronised clocks differ by milliseconds."""

SKEW_WINDOW_SECONDS = 10.0
"""Length of a window. The skew of a window is its least difference."""

SKEW_WARNING_SECONDS = 60.0
"""Least time between two warnings about one worker."""

SKEW_FORGET_SECONDS = 60.0
"""A worker without heartbeats for longer than this is forgotten."""


@dataclass(slots=True)
class _SkewWindow:
    began: float
    min_difference: float
    heartbeat_at: float
    warned_at: float = float("-inf")


class ClockSkews:
    """Measures how far each worker's wall clock is behind the router's, from the send times of heartbeats."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """Skew by worker, of the newest complete window; negative if the worker's clock is ahead."""
        self._windows: dict[str, _SkewWindow] = {}
        self._next_sweep = 0.0

    def on_heartbeat(self, worker: str, sent_at: float, now: float) -> float | None:
        """Add a heartbeat's send time. Returns the skew in seconds if a warning is due now.

        `sent_at` and `now` are unix seconds, on the worker's and the router's wall clock.
        """
        if now >= self._next_sweep:
            self._sweep(now)
        window = self._windows.get(worker)
        if window is None:
            window = self._windows[worker] = _SkewWindow(now, now - sent_at, now)
        window.heartbeat_at = now
        if now - window.began < SKEW_WINDOW_SECONDS:
            window.min_difference = min(window.min_difference, now - sent_at)
            return None
        skew = self.seconds[worker] = window.min_difference
        window.began, window.min_difference = now, now - sent_at
        if abs(skew) <= MAX_SKEW_SECONDS or now - window.warned_at < SKEW_WARNING_SECONDS:
            return None
        window.warned_at = now
        return skew

    def _sweep(self, now: float) -> None:
        self._next_sweep = now + SKEW_WINDOW_SECONDS
        silent = [worker for worker, window in self._windows.items() if now - window.heartbeat_at > SKEW_FORGET_SECONDS]
        for worker in silent:
            del self._windows[worker]
            self.seconds.pop(worker, None)


RESTORED_TTL_SECONDS = TTL_SECONDS
"""How long an executor that is known only from the log may be silent before its turns are reissued."""

MAX_CLOCK_STEP_SECONDS = 0.5
"""Most time that the liveness clock advances between two heartbeats. Executors send a heartbeat every 0.2 s."""

REMEMBERED_STARTS = 8
"""Earlier incarnations in other inboxes that are remembered of an executor: an executor that moves is restarted."""

FORGET_SECONDS = 600.0
"""An executor that has been GONE for this time is forgotten. Until then it may return to the turns that it held."""


class ExecutorStatus(Enum):
    """How far an executor may be trusted: with weights, with turns, or with nothing."""

    STALE = "stale"
    """Sends heartbeats, but has not proven the current policy version: may be sent weights, not turns."""
    LIVE = "live"
    GONE = "gone"


STALE, LIVE, GONE = ExecutorStatus.STALE, ExecutorStatus.LIVE, ExecutorStatus.GONE
READY, STOPPING = ExecutorState.READY, ExecutorState.STOPPING
"""Module constants, because the attribute access of an Enum member is slow in Python."""


class Execution(NamedTuple):
    """One dispatch of a turn, as the router remembers it."""

    trajectory_id: str
    turn: int
    attempt: int
    room_tokens: int
    new_tokens: float
    charged: bool
    """Whether the execution counts as a failure of its turn. The failure is taken back if the executor returns."""
    unlisted_since: float
    """`Executor.observed_seconds` since which the execution is not listed. Far in the past for an execution that was
    listed and is not any more."""


class ListedExecutions:
    """The executions that a heartbeat lists in its `holds`, unpacked at the first look-up."""

    __slots__ = ("_found", "packed")

    def __init__(self, packed: bytes) -> None:
        """`packed`: the execution keys, eight bytes each."""
        self.packed = packed
        self._found: frozenset[bytes] | None = None

    def __contains__(self, execution: bytes) -> bool:
        if self._found is None:
            packed = self.packed
            self._found = frozenset([packed[at : at + 8] for at in range(0, len(packed) - 7, 8)])
        return execution in self._found


NO_EXECUTIONS = ListedExecutions(b"")


@dataclass(slots=True)
class Executor:
    """One executor in its newest incarnation."""

    worker: str
    slot: int
    incarnation: int
    expires: float
    """Time on the liveness clock at which a silent executor becomes GONE."""
    status: ExecutorStatus = STALE
    heartbeat: SlackHeartbeat | None = None
    """The newest heartbeat; None while the executor is known only from the log."""
    cache_generation: int = 0
    """Number of its prefix cache. An executor without a version has no cache, and begins a new one with a version."""
    rejected: bool = False
    """Whether it refused or preempted a turn since its newest heartbeat, so the offer of that heartbeat is void."""
    full: bool = False
    """Whether it refused for lack of room, and neither its offer nor the turns that it lists have changed since."""
    holds: dict[bytes, Turn] = field(default_factory=dict)
    """The assigned turns by execution key, in order of dispatch."""
    listed: ListedExecutions = NO_EXECUTIONS
    """The executions that its newest heartbeat lists. `heartbeat_at` is when a listed turn was last seen, not
    `Turn.seen_at`."""
    heartbeat_at: float = 0.0
    """Time of the newest heartbeat, on the router's clock."""
    heartbeat_clock: float = 0.0
    """Time of the newest heartbeat, on the liveness clock."""
    observed_seconds: float = 0.0
    """Seconds in which this executor itself sent heartbeats. A silence, and the time before the first heartbeat, count
    for at most MAX_CLOCK_STEP_SECONDS."""
    ghosts: dict[bytes, Execution] = field(default_factory=dict)
    """Ghosts by execution key. A ghost fills room until its execution has ended, or until heartbeats have not listed it
    for `assignments.LISTING_SECONDS`."""
    counted_version: int | None = None
    """The policy version under which `Liveness` counts this executor."""
    earlier_starts: tuple[tuple[int, int], ...] = ()
    """Slots and incarnations of its earlier incarnations in other inboxes, oldest first."""

    @property
    def is_open(self) -> bool:
        """Whether turns may be dispatched to it."""
        ready = self.heartbeat is not None and self.heartbeat.state is READY
        return ready and self.status is LIVE and not self.rejected


class HeartbeatEffect(NamedTuple):
    """Changes that a heartbeat caused."""

    replaced: Executor | None = None
    """The earlier incarnation, which has ended."""
    returned: bool = False
    """Whether the executor was GONE and is not any more, in the same incarnation."""


UNCHANGED = HeartbeatEffect()


class Liveness:
    """Status of all known executors, until they are forgotten."""

    def __init__(self, *, max_lag_versions: int) -> None:
        self.max_lag_versions = max_lag_versions
        self.current_version = -1
        """The newest policy version of the executors that are not GONE; -1 if there is none."""
        self.executors: dict[str, Executor] = {}
        self.clock = 0.0
        """The liveness clock in seconds: it advances only while heartbeats arrive."""
        self._heartbeat_at = 0.0
        self._executors_by_version: dict[int, int] = {}
        """Number of executors that are not GONE, by policy version."""

    def on_heartbeat(self, heartbeat: SlackHeartbeat, now: float) -> HeartbeatEffect:
        """Update an executor from a heartbeat. A heartbeat of an older incarnation changes only the liveness clock."""
        gap = now - self._heartbeat_at
        if gap > 0.0:
            self.clock += gap if gap < MAX_CLOCK_STEP_SECONDS else MAX_CLOCK_STEP_SECONDS
        self._heartbeat_at = now
        known = self.executors.get(heartbeat.worker)
        replaced: Executor | None = None
        if known is None or not self._same_start(known, heartbeat):
            if known is not None and self._is_newer_start(known, heartbeat):
                return UNCHANGED
            known, replaced = Executor(heartbeat.worker, heartbeat.slot, heartbeat.incarnation, 0.0), known
            self.executors[heartbeat.worker] = known
            if replaced is not None:
                moved = ((replaced.slot, replaced.incarnation),) if replaced.slot != known.slot else ()
                known.earlier_starts = (*replaced.earlier_starts, *moved)[-REMEMBERED_STARTS:]
        returned = known.status is GONE and heartbeat.state is not STOPPING
        if returned:
            known.status = STALE
        previous_starts, known.heartbeat = known.heartbeat, heartbeat
        if previous_starts is not None and previous_starts.policy_version < 0 <= heartbeat.policy_version:
            known.cache_generation += 1
        known.expires = self.clock + heartbeat.ttl_seconds
        if known.full:
            known.full = (
                previous_starts is not None
                and bool(heartbeat.holds)
                and _capacity_of(previous_starts) == _capacity_of(heartbeat)
            )
        known.rejected = known.full
        if heartbeat.state is STOPPING:
            known.status = GONE
        if replaced is not None:  # the new incarnation takes the place of the old one in the counts
            known.counted_version = replaced.counted_version
        self._count_version(known)
        self._update_status(known)
        return HeartbeatEffect(replaced, returned) if replaced is not None or returned else UNCHANGED

    def restore_executor(self, worker: str, slot: int, incarnation: int) -> Executor:
        """Add an executor that is known only from the log. It has RESTORED_TTL_SECONDS to send a heartbeat."""
        known = self.executors[worker] = Executor(worker, slot, incarnation, self.clock + RESTORED_TTL_SECONDS)
        return known

    def lag_versions(self, executor: Executor) -> int:
        """Policy versions that an executor is behind the newest."""
        shown = -1 if executor.heartbeat is None else executor.heartbeat.policy_version
        return max(0, self.current_version - shown)

    def expire(self) -> list[Executor]:
        """Mark silent executors as GONE and return them; the caller takes their turns back.

        Also returns executors that have stopped and still hold turns after their TTL: the results that they announced
        have not arrived.
        """
        silent = [
            each
            for each in self.executors.values()
            if each.expires <= self.clock and (each.status is not GONE or each.holds)
        ]
        for executor in silent:
            executor.status = GONE
            self._count_version(executor)
        return silent

    def forget_gone(self) -> list[str]:
        """Forget the executors that have been GONE for FORGET_SECONDS; return their worker names."""
        names = [
            each.worker
            for each in self.executors.values()
            if each.status is GONE and each.expires + FORGET_SECONDS <= self.clock
        ]
        for name in names:
            del self.executors[name]
        return names

    def _same_start(self, known: Executor, heartbeat: SlackHeartbeat) -> bool:
        return known.incarnation == heartbeat.incarnation and known.slot == heartbeat.slot

    def _is_newer_start(self, known: Executor, heartbeat: SlackHeartbeat) -> bool:
        """Whether the known incarnation is newer than the heartbeat's."""
        if known.status is GONE:
            return False
        if known.slot == heartbeat.slot:
            return heartbeat.incarnation < known.incarnation
        return (heartbeat.slot, heartbeat.incarnation) in known.earlier_starts

    def _count_version(self, executor: Executor) -> None:
        """Count an executor under its present version, and update every status if the newest version changes."""
        gone = executor.status is GONE or executor.heartbeat is None
        version = None if executor.heartbeat is None or gone else executor.heartbeat.policy_version
        if version == executor.counted_version:
            return
        for each, more in ((executor.counted_version, -1), (version, 1)):
            if each is not None:
                self._executors_by_version[each] = self._executors_by_version.get(each, 0) + more
                if not self._executors_by_version[each]:
                    del self._executors_by_version[each]
        executor.counted_version = version
        newest = max(self._executors_by_version, default=-1)
        if newest != self.current_version:
            self.current_version = newest
            for other in self.executors.values():
                self._update_status(other)

    def _update_status(self, executor: Executor) -> None:
        if executor.status is GONE or executor.heartbeat is None:
            return
        lag = self.lag_versions(executor)
        if executor.heartbeat.policy_version < 0 or lag > self.max_lag_versions:
            executor.status = STALE
        elif lag == 0:
            executor.status = LIVE


def _capacity_of(heartbeat: SlackHeartbeat) -> tuple[ExecutorState, bytes, int, int]:
    """Return the fields that a refusal for lack of room depends on.

    The state is one of them: an executor that is not ready refuses every turn.
    """
    return heartbeat.state, heartbeat.holds, heartbeat.max_turns, heartbeat.token_budget
