"""Liveness: which executors may be trusted with a turn.

Keeps true
- An executor is LIVE only while it is heard and has proven a policy version no more than `max_lag_versions` behind the
  newest that anybody serves. Nothing else is believed about versions: only what an executor serves is one.
- There is no way from GONE to LIVE: who comes back is STALE until it proves the current policy version.
- Everyone silent at once is the listener's own absence. Silence is measured in time in which somebody was heard:
  between two heartbeats, whoever sent them, at most `HEARING_SECONDS` of it pass. So an executor is GONE only once
  another was heard after its TTL, and a gap in which nobody was heard takes nothing from anybody.
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

from pipeline.routing.turn import Turn
from schemas.slack import ExecutorState, SlackHeartbeat

UNHEARD_TTL_SECONDS = 2.0
"""How long an executor known only from the log may keep silent before its turns are issued again."""

HEARING_SECONDS = 0.5
"""Most time that passes between two heartbeats; the rest of a gap is the listener's. Executors beat every 0.2 s."""

BEFORE = 8
"""Starts in other inboxes that are remembered of an executor: who moves is started again."""

FORGET_SECONDS = 600.0
"""An executor that was GONE this long is forgotten; until then it may come back to what it held."""


class Standing(Enum):
    """How far an executor may be trusted: with weights, with turns, or with nothing."""

    STALE = "stale"
    """Heard from, the current policy version not yet proven: may be sent weights, not turns."""
    LIVE = "live"
    GONE = "gone"


STALE, LIVE, GONE = Standing.STALE, Standing.LIVE, Standing.GONE
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
    """`Executor.heard_seconds` as of which it was not listed yet; of one that was, and is no more, long ago."""


class Listing:
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


NOTHING = Listing(b"")


@dataclass(slots=True)
class Executor:
    """One executor under its newest incarnation."""

    worker: str
    slot: int
    incarnation: int
    expires: float
    """On the clock of `Liveness`; from this moment on silence means GONE."""
    standing: Standing = STALE
    beat: SlackHeartbeat | None = None
    """The newest; None while it is known from the log alone."""
    cache: int = 0
    """Which of its prefix caches it has: who serves no version has none, and serves with another one again."""
    rejected: bool = False
    """It refused or preempted a turn since its newest heartbeat, so what that heartbeat offered no longer holds."""
    full: bool = False
    """It refused for lack of room, and neither what it offers nor what it holds has changed since."""
    holds: dict[bytes, Turn] = field(default_factory=dict)
    """By execution, as heartbeats list it: the turns that it has, in the order in which they came."""
    listed: Listing = NOTHING
    """What its newest heartbeat says that it has: that was seen at `heard_at`, whatever the turns say."""
    heard_at: float = 0.0
    """When that came, on the router's clock."""
    heard_clock: float = 0.0
    """The same, on the clock of `Liveness`."""
    heard_seconds: float = 0.0
    """In which this one was heard itself. Of a silence, and of what was before its first word, no more than
    HEARING_SECONDS counts."""
    ghosts: dict[bytes, Execution] = field(default_factory=dict)
    """By execution: what it may still run though the turn was taken from it. They fill its room until they have ended
    there, or a lease is over in which it has not listed them."""
    counted: int | None = None
    """The policy version that it is counted under."""
    before: tuple[tuple[int, int], ...] = ()
    """Slots and incarnations of the last starts before it in other inboxes."""

    @property
    def open(self) -> bool:
        """Whether it may be sent turns."""
        ready = self.beat is not None and self.beat.state is READY
        return ready and self.standing is LIVE and not self.rejected


class Heard(NamedTuple):
    """What a heartbeat changed."""

    replaced: Executor | None = None
    """The start before, which is no more."""
    back: bool = False
    """The same start was GONE and is not."""


UNCHANGED = Heard()


class Liveness:
    """All executors ever heard of, until they are forgotten."""

    def __init__(self, *, max_lag_versions: int) -> None:
        self.max_lag_versions = max_lag_versions
        self.current_version = -1
        """The newest policy version that an executor serves which is not GONE; -1 while there is none."""
        self.executors: dict[str, Executor] = {}
        self.clock = 0.0
        """Seconds in which somebody was heard."""
        self._heard_at = 0.0
        self._serving: dict[int, int] = {}
        """By policy version: how many serve it that are not GONE."""

    def heard(self, beat: SlackHeartbeat, now: float) -> Heard:
        """Take a heartbeat in. If it is of an older start than the known one, that one keeps its own `beat`."""
        gap = now - self._heard_at
        if gap > 0.0:
            self.clock += gap if gap < HEARING_SECONDS else HEARING_SECONDS
        self._heard_at = now
        known = self.executors.get(beat.worker)
        replaced: Executor | None = None
        if known is None or not self._same_start(known, beat):
            if known is not None and self._outlives(known, beat):
                return UNCHANGED
            known, replaced = Executor(beat.worker, beat.slot, beat.incarnation, 0.0), known
            self.executors[beat.worker] = known
            if replaced is not None:
                moved = ((replaced.slot, replaced.incarnation),) if replaced.slot != known.slot else ()
                known.before = (*replaced.before, *moved)[-BEFORE:]
        back = known.standing is GONE and beat.state is not STOPPING
        if back:
            known.standing = STALE
        before, known.beat = known.beat, beat
        if before is not None and before.policy_version < 0 <= beat.policy_version:
            known.cache += 1
        known.expires = self.clock + beat.ttl_seconds
        if known.full:
            known.full = before is not None and bool(beat.holds) and _room(before) == _room(beat)
        known.rejected = known.full
        if beat.state is STOPPING:
            known.standing = GONE
        if replaced is not None:  # it is counted no more
            known.counted = replaced.counted
        self._count(known)
        self._judge(known)
        return Heard(replaced, back) if replaced is not None or back else UNCHANGED

    def remembered(self, worker: str, slot: int, incarnation: int) -> Executor:
        """An executor is known from the log alone: it may be heard from for as long as a silence may last."""
        known = self.executors[worker] = Executor(worker, slot, incarnation, self.clock + UNHEARD_TTL_SECONDS)
        return known

    def lag(self, executor: Executor) -> int:
        """Policy versions that it is behind the newest."""
        shown = -1 if executor.beat is None else executor.beat.policy_version
        return max(0, self.current_version - shown)

    def expire(self) -> list[Executor]:
        """Mark the silent as GONE and return them; the caller takes back what they hold.

        So it is with one that has stopped while answers that it spoke of do not come.
        """
        silent = [
            each
            for each in self.executors.values()
            if each.expires <= self.clock and (each.standing is not GONE or each.holds)
        ]
        for executor in silent:
            executor.standing = GONE
            self._count(executor)
        return silent

    def forget(self) -> list[str]:
        """Drop those who have been GONE for long, and name them."""
        names = [
            each.worker
            for each in self.executors.values()
            if each.standing is GONE and each.expires + FORGET_SECONDS <= self.clock
        ]
        for name in names:
            del self.executors[name]
        return names

    def _same_start(self, known: Executor, beat: SlackHeartbeat) -> bool:
        return known.incarnation == beat.incarnation and known.slot == beat.slot

    def _outlives(self, known: Executor, beat: SlackHeartbeat) -> bool:
        """Whether what is known is newer than this heartbeat's start."""
        if known.standing is GONE:
            return False
        if known.slot == beat.slot:
            return beat.incarnation < known.incarnation
        return (beat.slot, beat.incarnation) in known.before

    def _count(self, executor: Executor) -> None:
        """It may serve another version now; who is too far behind the newest becomes STALE."""
        gone = executor.standing is GONE or executor.beat is None
        version = None if executor.beat is None or gone else executor.beat.policy_version
        if version == executor.counted:
            return
        for each, more in ((executor.counted, -1), (version, 1)):
            if each is not None:
                self._serving[each] = self._serving.get(each, 0) + more
                if not self._serving[each]:
                    del self._serving[each]
        executor.counted = version
        newest = max(self._serving, default=-1)
        if newest != self.current_version:
            self.current_version = newest
            for other in self.executors.values():
                self._judge(other)

    def _judge(self, executor: Executor) -> None:
        if executor.standing is GONE or executor.beat is None:
            return
        lag = self.lag(executor)
        if executor.beat.policy_version < 0 or lag > self.max_lag_versions:
            executor.standing = STALE
        elif lag == 0:
            executor.standing = LIVE


def _room(beat: SlackHeartbeat) -> tuple[ExecutorState, bytes, int, int]:
    """What a refusal for lack of room hangs on: one that is closed refuses all."""
    return beat.state, beat.holds, beat.max_turns, beat.token_budget
