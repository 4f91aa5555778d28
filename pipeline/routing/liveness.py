"""Liveness: which executors may be trusted with a turn.

Keeps true
- An executor is LIVE only while it is heard and has proven a policy version no more than `max_lag_versions` behind the
  newest that anybody serves. Nothing else is believed about versions: only what an executor serves is one.
- There is no way from GONE to LIVE: who comes back is STALE until it proves the current policy version.
- Everyone silent at once is the listener's own absence. Silence is measured in time in which somebody was heard:
  between two heartbeats, whoever sent them, at most `MAX_CLOCK_STEP_SECONDS` of it pass. So an executor is GONE only
  once another was heard after its TTL, and a gap in which nobody was heard takes nothing from anybody.
- Nothing is decided by a clock skew. What is compared is the least difference over SKEW_WINDOW_SECONDS, so that a
  heartbeat that was late says nothing of the clock.
- The turns held by an executor that leaves, or starts anew, are handed back once.
- Workers are told apart by name: several may have one inbox, and none of it is another's.
- Incarnations are compared within one inbox, where they grow. An older one is ignored until the newer is GONE; one in
  another inbox replaces what was known, as what was heard later, and what it replaced is ignored likewise. So two that
  run under one name take nothing from each other time and again.

Example, TTL 2 s, w1 and w2 heard five times a second
    w1's last heartbeat at 10, w2 goes on     -> at 12 w1 is GONE, its turns are handed back
    w1 is heard at 15, same incarnation       -> STALE, until it shows the version that w2 shows; it keeps what it says
                                                 that it holds
    nobody is heard from 20 to 30             -> nobody is GONE
    w1 is heard at 30, w2 is not              -> w2 has 2 s less the 0.5 s of the gap that count: GONE at 31.5
    w1 alone in the fleet, dead at 40         -> not GONE: nobody can tell before a new start or another is heard
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from rose.pipeline.routing.turn import Turn
from rose.schemas.heartbeats import ExecutorState, SlackHeartbeat

MAX_SKEW_SECONDS = 5.0
"""Two clocks further apart than this are told of. Synchronised ones are within milliseconds."""

SKEW_WINDOW_SECONDS = 10.0
"""The least difference of so many seconds counts."""

SKEW_WARNING_SECONDS = 60.0
"""Between two warnings of one worker."""

SKEW_FORGET_SECONDS = 60.0
"""Who has not been heard for so long is forgotten."""


@dataclass(slots=True)
class _SkewWindow:
    began: float
    min_difference: float
    heartbeat_at: float
    warned_at: float = float("-inf")


class ClockSkews:
    """By worker: how far its clock is behind the listener's, in seconds; negative if it is ahead."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """Of the newest whole window."""
        self._windows: dict[str, _SkewWindow] = {}
        self._next_sweep = 0.0

    def on_heartbeat(self, worker: str, sent_at: float, now: float) -> float | None:
        """Take a heartbeat's time in; the skew if it is to be told now. `now` is unix seconds."""
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


RESTORED_TTL_SECONDS = 2.0
"""How long an executor known only from the log may keep silent before its turns are issued again."""

MAX_CLOCK_STEP_SECONDS = 0.5
"""Most time that passes between two heartbeats; the rest of a gap is the listener's. Executors beat every 0.2 s."""

REMEMBERED_STARTS = 8
"""Starts in other inboxes that are remembered of an executor: who moves is started again."""

FORGET_SECONDS = 600.0
"""An executor that was GONE this long is forgotten; until then it may come back to what it held."""


class ExecutorStatus(Enum):
    """How far an executor may be trusted: with weights, with turns, or with nothing."""

    STALE = "stale"
    """Heard from, the current policy version not yet proven: may be sent weights, not turns."""
    LIVE = "live"
    GONE = "gone"


STALE, LIVE, GONE = ExecutorStatus.STALE, ExecutorStatus.LIVE, ExecutorStatus.GONE
READY, STOPPING = ExecutorState.READY, ExecutorState.STOPPING
"""Looked up once: Python takes its time over the members of an Enum."""


class Execution(NamedTuple):
    """One dispatch of a turn, as the router remembers it."""

    trajectory_id: str
    turn: int
    attempt: int
    room_tokens: int
    new_tokens: float
    charged: bool
    """It counts as a failure of its turn, until its executor comes back."""
    unlisted_since: float
    """`Executor.observed_seconds` as of which it was not listed yet; of one that was, and is no more, long ago."""


class ListedExecutions:
    """The executions that a heartbeat lists in its `holds`, taken apart once somebody looks for one."""

    __slots__ = ("_found", "packed")

    def __init__(self, packed: bytes) -> None:
        """`packed`: eight bytes of each."""
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
    """One executor under its newest incarnation."""

    worker: str
    slot: int
    incarnation: int
    expires: float
    """On the clock of `Liveness`; from this moment on silence means GONE."""
    status: ExecutorStatus = STALE
    heartbeat: SlackHeartbeat | None = None
    """The newest; None while it is known from the log alone."""
    cache_generation: int = 0
    """Which of its prefix caches it has: who serves no version has none, and serves with another one again."""
    rejected: bool = False
    """It refused or preempted a turn since its newest heartbeat, so what that heartbeat offered no longer holds."""
    full: bool = False
    """It refused for lack of room, and neither what it offers nor what it holds has changed since."""
    holds: dict[bytes, Turn] = field(default_factory=dict)
    """By execution, as heartbeats list it: the turns that it has, in the order in which they came."""
    listed: ListedExecutions = NO_EXECUTIONS
    """What its newest heartbeat says that it has: that was seen at `heartbeat_at`, whatever the turns say."""
    heartbeat_at: float = 0.0
    """When that came, on the router's clock."""
    heartbeat_clock: float = 0.0
    """The same, on the clock of `Liveness`."""
    observed_seconds: float = 0.0
    """In which this one was heard itself. Of a silence, and of what was before its first word, no more than
    HEARING_SECONDS counts."""
    ghosts: dict[bytes, Execution] = field(default_factory=dict)
    """By execution: what it may still run though the turn was taken from it. They fill its room until they have ended
    there, or a lease is over in which it has not listed them."""
    counted_version: int | None = None
    """The policy version that it is counted under."""
    earlier_starts: tuple[tuple[int, int], ...] = ()
    """Slots and incarnations of the last starts before it in other inboxes."""

    @property
    def is_open(self) -> bool:
        """Whether it may be sent turns."""
        ready = self.heartbeat is not None and self.heartbeat.state is READY
        return ready and self.status is LIVE and not self.rejected


class HeartbeatEffect(NamedTuple):
    """What a heartbeat changed."""

    replaced: Executor | None = None
    """The start before, which is no more."""
    returned: bool = False
    """The same start was GONE and is not."""


UNCHANGED = HeartbeatEffect()


class Liveness:
    """All executors ever heard of, until they are forgotten."""

    def __init__(self, *, max_lag_versions: int) -> None:
        self.max_lag_versions = max_lag_versions
        self.current_version = -1
        """The newest policy version that an executor serves which is not GONE; -1 while there is none."""
        self.executors: dict[str, Executor] = {}
        self.clock = 0.0
        """Seconds in which somebody was heard."""
        self._heartbeat_at = 0.0
        self._executors_by_version: dict[int, int] = {}
        """By policy version: how many serve it that are not GONE."""

    def on_heartbeat(self, heartbeat: SlackHeartbeat, now: float) -> HeartbeatEffect:
        """Take a heartbeat in. If it is of an older start than the known one, that one keeps its own `heartbeat`."""
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
        if replaced is not None:  # it is counted no more
            known.counted_version = replaced.counted_version
        self._count_version(known)
        self._update_status(known)
        return HeartbeatEffect(replaced, returned) if replaced is not None or returned else UNCHANGED

    def restore_executor(self, worker: str, slot: int, incarnation: int) -> Executor:
        """An executor is known from the log alone: it may be heard from for as long as a silence may last."""
        known = self.executors[worker] = Executor(worker, slot, incarnation, self.clock + RESTORED_TTL_SECONDS)
        return known

    def lag_versions(self, executor: Executor) -> int:
        """Policy versions that it is behind the newest."""
        shown = -1 if executor.heartbeat is None else executor.heartbeat.policy_version
        return max(0, self.current_version - shown)

    def expire(self) -> list[Executor]:
        """Mark the silent as GONE and return them; the caller takes back what they hold.

        So it is with one that has stopped while answers that it spoke of do not come.
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
        """Drop those who have been GONE for long, and name them."""
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
        """Whether what is known is newer than this heartbeat's start."""
        if known.status is GONE:
            return False
        if known.slot == heartbeat.slot:
            return heartbeat.incarnation < known.incarnation
        return (heartbeat.slot, heartbeat.incarnation) in known.earlier_starts

    def _count_version(self, executor: Executor) -> None:
        """It may serve another version now; who is too far behind the newest becomes STALE."""
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
    """What a refusal for lack of room hangs on: one that is closed refuses all."""
    return heartbeat.state, heartbeat.holds, heartbeat.max_turns, heartbeat.token_budget
