"""The lease of one executor: whether its grants let it take turns at this moment, and in which cell.

Keeps true
- A drain overrides all else until it is deleted. Who is no lender follows nothing else.
- A grant by hand overrides a leased one until it is deleted.
- A lease is counted by the clock of its lender from when its grant was read; no other host's is asked. One that was
  read back from the log, and not seen to come, begins nothing: it has to be renewed first. It ends nothing either where
  it renews one that was seen and holds.
- It lends to one RL job: a grant that names another one parks it here.
- Without a grant it lends all that it has, unless it is told that it needs one. Once it has followed a lease, that is
  over and not undone when its grant is deleted: it has to be told again.
- The cell that was named last holds for every executor, also after its next start, and changes nothing of the rest.

Pure; `now` is seconds on any clock of the caller's that never jumps.

Example, a lease of 30 s
    read back at 0         -> parked: its grant is from before it began to listen
    renewed at 4           -> lends
    renewed at 20, unseen  -> lends, until 34 as before
    nothing more until 34  -> parked: its grant ran out
    drained at 40, 60 s    -> takes nothing, and may end what runs until 100
    that is deleted at 90  -> as before: its grant ran out
"""

from dataclasses import dataclass, replace

from schemas.capacity import CapacityGrant, Voice
from schemas.slack import DRAINED
from workers.executor.gate import FREELY, Leave


@dataclass(frozen=True, slots=True)
class Read:
    """A grant as it was read."""

    grant: CapacityGrant
    at: float
    until: float | None
    """When its lease ends; None where none was seen to come."""


class Lease:
    """One executor's."""

    def __init__(self, job: str = "", *, needed: bool = False) -> None:
        """`job`: `namespace:run` of a lender, "" of any other; `needed`: without a grant it parks."""
        self.lends = bool(job)
        """Whether grants rule it, and not drains alone."""
        self._job = job
        self._needed = needed
        self._read: dict[Voice, Read] = {}

    def take(self, grant: CapacityGrant | None, now: float, *, voice: Voice, seen: bool) -> bool:
        """The newest under one of its keys; None once it was deleted. Whether that says anything new.

        `seen`: it came while the log was followed, and was not read back.
        """
        before = self._read.get(voice)
        if before is not None and before.grant == grant:
            return False  # read again after trouble with the bus: its time began when it was read first
        if grant is None and before is not None and before.grant.lease_seconds:
            self._read[voice] = replace(before, until=now)
        elif grant is None:
            self._read.pop(voice, None)
        else:
            self._read[voice] = Read(grant, now, _ends(grant, before, now, seen=seen))
        return before is None or grant is None or not _alike(before.grant, grant)

    def leave(self, now: float) -> Leave:
        """What it may do, and where."""
        named = self._read.get(Voice.CELL)
        leave = self._leave(now)
        return leave if named is None else replace(leave, cell=named.grant.cell)

    def _leave(self, now: float) -> Leave:
        drain = self._read.get(Voice.DRAIN)
        if drain is not None:
            why = f"{DRAINED}{f': {drain.grant.reason}' if drain.grant.reason else ''}"
            return Leave(refused=why, finishing=now < drain.at + drain.grant.finish_seconds)
        if not self.lends:
            return FREELY
        read = self._read.get(Voice.BY_HAND) or self._read.get(Voice.LEASED)
        if read is None:
            return Leave(refused="it has no grant, and needs one (lender.needs_grant)") if self._needed else FREELY
        grant = read.grant
        if not grant.lend:
            return Leave(refused=f"a grant parked it{f': {grant.reason}' if grant.reason else ''}")
        if grant.job and grant.job != self._job:
            return Leave(refused=f"it is granted to {grant.job}, and this is {self._job}")
        if grant.lease_seconds and read.until is None:
            return Leave(refused="its grant is from before it began to listen, and was not renewed since")
        if grant.lease_seconds and read.until is not None and now >= read.until:
            return Leave(refused=f"its grant ran out: it was not renewed for {grant.lease_seconds:g} s")
        return Leave(kv_bytes=grant.kv_bytes, token_budget=grant.token_budget)


def _ends(grant: CapacityGrant, before: Read | None, now: float, *, seen: bool) -> float | None:
    """When a lease that is read now ends: one that was not seen to come with that which it renews, or sooner."""
    until = now + grant.lease_seconds
    if seen:
        return until
    if before is None or before.until is None or not _alike(before.grant, grant):
        return None
    return min(before.until, until)


def _alike(one: CapacityGrant, other: CapacityGrant) -> bool:
    """Whether one renews the other; why it does may have changed."""
    said = [(each.lend, each.kv_bytes, each.token_budget, each.job, each.cell) for each in (one, other)]
    return said[0] == said[1] and (one.reason == other.reason or bool(one.lease_seconds and other.lease_seconds))
