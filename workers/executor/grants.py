"""The grants of one executor, followed on a thread, and the intake gate that they open and close.

Keeps true
- The topic is compacted: grants from before the start of this process are read back, and read again after an error of
  the bus. The arrival of a grant below the log end at that time was not observed, so its lease has not begun
  (`Lease`).
- An unreachable broker changes nothing until the lease of the newest grant ends.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import Event

import structlog

from rose.schemas.grants import CapacityGrant, GrantSource, parse_grant_key
from rose.schemas.heartbeats import DRAINED_REASON
from rose.topics.catalog import GRANTS
from rose.topics.health import HEALTH, START_SECONDS
from rose.topics.records import Envelope
from rose.topics.settings import BusSettings
from rose.topics.table_follower import TableFollower
from rose.workers.executor.ipc.messages import NO_LIMIT, EngineStatus, Resume, Suspend


@dataclass(frozen=True, slots=True, kw_only=True)
class Permission:
    """Whether an executor may take turns at this moment, and how much a lender may lend."""

    denied_reason: str | None = None
    """Why the executor may take no turns; None if it may."""
    may_finish: bool = False
    """Whether running turns may finish although no new turns may be taken."""
    kv_bytes: int = 0
    """KV bytes that turns may hold; 0 sets no limit."""
    token_budget: int = 0
    """KV tokens that turns may hold; 0 sets no limit."""
    cell: int | None = None
    """Target cell of the executor; None keeps its cell."""


UNRESTRICTED = Permission()
"""Permission without a limit."""

PermissionSource = Callable[[], Permission]
"""Returns what an executor may do now."""

MAX_BLOCKED_SECONDS = 5.0
"""After so long without leave to compute, the engine's turns are returned: another executor continues them."""


class IntakeGate:
    """Whether one executor takes turns now, why not, and whether running turns may finish."""

    def __init__(self, permission: PermissionSource, *, lends: bool) -> None:
        self.lends = lends
        """Whether the engine is a guest, which can be suspended and resumed."""
        self.reason: str | None = None
        """Why no turn is accepted; None if turns are accepted."""
        self.finishing = False
        """Whether running turns go on although no turn is accepted."""
        self.allowed_tokens = 0
        """KV tokens that turns may hold."""
        self.cell = permission().cell
        """Target cell of the executor; None keeps its cell."""
        self._permission = permission
        self._last_command: Resume | Suspend | None = None
        """The newest command to the guest."""

    @property
    def evicts_running(self) -> bool:
        """Whether running turns are returned too."""
        return bool(self.reason) and not self.finishing

    def close(self, reason: str) -> None:
        """Accept no turn any more, and return running turns too. Do not call `update` afterwards."""
        self.reason, self.finishing = reason, False

    def update(self, status: EngineStatus, *, busy: bool, leaving_for: str | None = None) -> Resume | Suspend | None:
        """Read the permission and update the gate. Return a new command for the engine, or None.

        `status`: the engine's newest status. `busy`: whether turns run. `leaving_for`: pause reason of a move to
        another cell, None without a move.
        """
        permission = self._permission()
        self.cell, self.allowed_tokens = permission.cell, allowed_tokens(status, permission)
        self.reason = permission.denied_reason or unavailable_reason(status) or leaving_for
        self.finishing = permission.may_finish and busy and not unavailable_reason(status)
        command = Suspend() if permission.denied_reason else Resume(permission.kv_bytes or NO_LIMIT)
        if not self.lends or self.finishing or command == self._last_command:
            return None
        self._last_command = command
        return command


def unavailable_reason(status: EngineStatus) -> str | None:
    """Return why the engine can run no turn; None if it can."""
    if status.suspended_reason:
        return status.suspended_reason
    if status.blocked_seconds >= MAX_BLOCKED_SECONDS:
        return f"serving left it no moment to compute in for {MAX_BLOCKED_SECONDS:.0f} s"
    return None


def allowed_tokens(status: EngineStatus, permission: Permission) -> int:
    """Return the KV tokens that turns may hold: the engine's KV memory within the limits of the permission."""
    tokens = status.kv_bytes_total // status.kv_bytes_per_token
    if permission.kv_bytes:
        tokens = min(tokens, permission.kv_bytes // status.kv_bytes_per_token)
    return min(tokens, permission.token_budget) if permission.token_budget else tokens


@dataclass(frozen=True, slots=True)
class ReceivedGrant:
    """A grant, when it was received, and when it expires. Times are monotonic seconds."""

    grant: CapacityGrant
    received_at: float
    expires_at: float | None
    """End of the lease; None if the arrival of the grant was not observed."""


class Lease:
    """The newest grants of one executor, from all sources, and the permission that follows from them."""

    def __init__(self, job: str = "", *, grant_required: bool = False) -> None:
        """`job`: `namespace:run` of a lender, "" of any other executor.

        `grant_required`: whether a lender without a grant lends nothing.
        """
        self.lends = bool(job)
        """Whether all grants apply; otherwise only drains and cells do."""
        self._job = job
        self._grant_required = grant_required
        self._grants: dict[GrantSource, ReceivedGrant] = {}

    def on_grant(self, grant: CapacityGrant | None, now: float, *, source: GrantSource, live: bool) -> bool:
        """Record the newest grant of one source; None if the grant was deleted. Return whether its terms are new.

        `live`: whether the grant arrived while the topic was followed, and was not read back.
        """
        before = self._grants.get(source)
        if before is not None and before.grant == grant:
            return False  # read again after an error of the bus: the lease began at the first read
        if grant is None and before is not None and before.grant.lease_seconds:
            self._grants[source] = replace(before, expires_at=now)
        elif grant is None:
            self._grants.pop(source, None)
        else:
            self._grants[source] = ReceivedGrant(grant, now, _expiry(grant, before, now, live=live))
        return before is None or grant is None or not _is_renewal(before.grant, grant)

    def permission(self, now: float) -> Permission:
        """Return the permission at `now`, monotonic seconds."""
        named = self._grants.get(GrantSource.CELL)
        allowed = self._permission(now)
        return allowed if named is None else replace(allowed, cell=named.grant.cell)

    def _permission(self, now: float) -> Permission:
        drain = self._grants.get(GrantSource.DRAIN)
        if drain is not None:
            why = f"{DRAINED_REASON}{f': {drain.grant.reason}' if drain.grant.reason else ''}"
            return Permission(denied_reason=why, may_finish=now < drain.received_at + drain.grant.finish_seconds)
        if not self.lends:
            return UNRESTRICTED
        read = self._grants.get(GrantSource.BY_HAND) or self._grants.get(GrantSource.LEASED)
        if read is None:
            return (
                Permission(denied_reason="it has no grant, and needs one (lender.needs_grant)")
                if self._grant_required
                else UNRESTRICTED
            )
        grant = read.grant
        if not grant.lend:
            return Permission(denied_reason=f"a grant parked it{f': {grant.reason}' if grant.reason else ''}")
        if grant.job and grant.job != self._job:
            return Permission(denied_reason=f"it is granted to {grant.job}, and this is {self._job}")
        if grant.lease_seconds and read.expires_at is None:
            return Permission(denied_reason="its grant is from before it began to listen, and was not renewed since")
        if grant.lease_seconds and read.expires_at is not None and now >= read.expires_at:
            return Permission(denied_reason=f"its grant ran out: it was not renewed for {grant.lease_seconds:g} s")
        return Permission(kv_bytes=grant.kv_bytes, token_budget=grant.token_budget)


def _expiry(grant: CapacityGrant, before: ReceivedGrant | None, now: float, *, live: bool) -> float | None:
    """Return when the lease of a grant that is received at `now` ends; None if that is not known.

    The lease of a grant that is not `live` ends no later than the lease that the grant renews.
    """
    until = now + grant.lease_seconds
    if live:
        return until
    if before is None or before.expires_at is None or not _is_renewal(before.grant, grant):
        return None
    return min(before.expires_at, until)


def _is_renewal(earlier: CapacityGrant, later: CapacityGrant) -> bool:
    """Whether `later` has the terms of `earlier`. The reasons may differ if both grants have a lease."""
    terms = [(each.lend, each.kv_bytes, each.token_budget, each.job, each.cell) for each in (earlier, later)]
    return terms[0] == terms[1] and (
        earlier.reason == later.reason or bool(earlier.lease_seconds and later.lease_seconds)
    )


POLL_SECONDS = 0.2
"""Seconds between two checks for a stop."""

log = structlog.get_logger("executor")


class GrantFollower:
    """Follows the grants of one executor on a thread. Call `permission` at any time, and `stop` at the end."""

    def __init__(self, settings: BusSettings, worker: str, lease: Lease) -> None:
        self._lease = lease
        self._worker = worker
        self._follower = TableFollower(settings, GRANTS, f"{worker}-grants", self._on_grant)

    def wait_until_read(self, stop: Event) -> None:
        """Wait until all existing grants have been read, or `stop` is set. Raises RoseError if the follower failed."""
        while not self._follower.is_caught_up.wait(POLL_SECONDS) and not stop.is_set():
            if self._follower.failure is not None:
                raise self._follower.failure
            reason = "waits for its grants, which the broker has not delivered yet"
            HEALTH.report(reason, ready=False, lasts_seconds=START_SECONDS)

    def permission(self) -> Permission:
        """Return what the executor may do now."""
        return self._lease.permission(time.monotonic())

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._follower.stop()

    def _on_grant(self, item: Envelope, live: bool) -> None:
        worker, source = parse_grant_key(item.key)
        if worker != self._worker or source is None:
            return
        grant = item.record if isinstance(item.record, CapacityGrant) else None
        if self._lease.on_grant(grant, time.monotonic(), source=source, live=live):
            summary = "none" if grant is None else _summary(grant, source)
            log.info("grant_changed", worker=self._worker, grant=summary, reason="" if grant is None else grant.reason)


def _summary(grant: CapacityGrant, source: GrantSource) -> str:
    if source is GrantSource.CELL:
        return f"cell {grant.cell}"
    if source is GrantSource.DRAIN:
        return "drain"
    return "lend" if grant.lend else "park"
