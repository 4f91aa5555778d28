"""Liveness: which executors may be trusted with a turn.

Keeps true
- An executor is LIVE only while its last heartbeat is younger than the TTL that it carried and its policy version is
  proven and no more than `max_lag_versions` behind.
- There is no way from GONE to LIVE: who comes back is STALE until it proves the current policy version.
- The turns held by an executor that leaves, or starts anew, are handed back once.

Example, with a TTL of 2 s and version 7 current
    beat(version -1) at 0     -> STALE
    beat(version 7) at 0.1    -> LIVE
    silence until 2.1         -> GONE, its turns handed back
    beat(version 6) at 3      -> STALE, until it shows 7
"""

from dataclasses import dataclass, field
from enum import Enum

from schemas.slack import ExecutorState, SlackHeartbeat

UNHEARD_TTL_SECONDS = 2.0
"""How long an executor known only from the log may keep silent before its turns are issued again."""

FORGET_SECONDS = 600.0
"""An executor that was GONE this long is forgotten; until then an older start of it is recognised and ignored."""


class Standing(Enum):
    STALE = "stale"
    """Heard from, the current policy version not yet proven: may be sent weights, not turns."""
    LIVE = "live"
    GONE = "gone"


@dataclass(slots=True)
class Executor:
    """One executor under its newest incarnation."""

    worker: str
    incarnation: int
    expires: float
    """Seconds; from this moment on silence means GONE."""
    standing: Standing = Standing.STALE
    beat: SlackHeartbeat | None = None
    """The newest; None while it is known from the log alone."""
    rejected: bool = False
    """It refused or preempted a turn since its newest heartbeat, so what that heartbeat offered no longer holds."""
    holds: dict[str, None] = field(default_factory=dict)
    """Trajectories whose present turn it has, in the order in which they came."""

    @property
    def open(self) -> bool:
        """Whether it may be sent turns."""
        ready = self.beat is not None and self.beat.state is ExecutorState.READY
        return ready and self.standing is Standing.LIVE and not self.rejected


class Liveness:
    """All executors ever heard of, until they are forgotten."""

    def __init__(self, *, max_lag_versions: int) -> None:
        self.max_lag_versions = max_lag_versions
        self.current_version = -1
        """The newest policy version on the log; -1 while there is none."""
        self.executors: dict[str, Executor] = {}

    def heard(self, beat: SlackHeartbeat, now: float) -> list[str]:
        """Take a heartbeat in; return the trajectories whose turns a new incarnation hands back."""
        known = self.executors.get(beat.worker)
        if known is not None and beat.incarnation < known.incarnation:
            return []
        returned: list[str] = []
        if known is None or beat.incarnation > known.incarnation or known.standing is Standing.GONE:
            returned = list(known.holds) if known is not None else []
            known = self.executors[beat.worker] = Executor(beat.worker, beat.incarnation, 0.0)
        known.beat = beat
        known.expires = now + beat.ttl_seconds
        known.rejected = False
        self._judge(known)
        return returned

    def remembered(self, worker: str, incarnation: int, now: float) -> None:
        """An executor is known from the log alone: it may be heard from for as long as a silence may last."""
        self.executors[worker] = Executor(worker, incarnation, now + UNHEARD_TTL_SECONDS)

    def published(self, version: int) -> None:
        """Note a policy version on the log; executors too far behind it become STALE."""
        self.current_version = max(self.current_version, version)
        for executor in self.executors.values():
            self._judge(executor)

    def lag(self, executor: Executor) -> int:
        """Policy versions that it is behind the newest."""
        shown = -1 if executor.beat is None else executor.beat.policy_version
        return max(0, self.current_version - shown)

    def expire(self, now: float) -> list[Executor]:
        """Mark the silent as GONE and return them; the caller takes back what they hold."""
        silent = [
            each for each in self.executors.values() if each.standing is not Standing.GONE and each.expires <= now
        ]
        for executor in silent:
            executor.standing = Standing.GONE
        return silent

    def excuse(self, seconds: float) -> None:
        """Hold nobody silent for a time in which the router itself did not listen."""
        for executor in self.executors.values():
            executor.expires += seconds

    def forget(self, now: float) -> list[str]:
        """Drop those who have been GONE for long, and name them."""
        names = [
            each.worker
            for each in self.executors.values()
            if each.standing is Standing.GONE and each.expires + FORGET_SECONDS <= now
        ]
        for name in names:
            del self.executors[name]
        return names

    def _judge(self, executor: Executor) -> None:
        if executor.standing is Standing.GONE or executor.beat is None:
            return
        lag = self.lag(executor)
        if executor.beat.policy_version < 0 or lag > self.max_lag_versions:
            executor.standing = Standing.STALE
        elif lag == 0:
            executor.standing = Standing.LIVE
