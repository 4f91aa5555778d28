"""The grants of one executor, followed on a thread.

Keeps true
- The topic is compacted: what was granted before this process began is read back, and after trouble with the bus again.
  What lies before the end of the log as it was met then was not seen to come, so its lease has not begun (`Lease`).
- A broker that is away changes nothing, until the lease of what was read ends.
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

    denied_reason: str = ""
    """Why it may not; empty where it may."""
    may_finish: bool = False
    """Though it may not, the turns that run may go on for now."""
    kv_bytes: int = 0
    """That turns may hold; 0 sets no limit."""
    token_budget: int = 0
    cell: int | None = None
    """That it is to be in; None: where it is."""


UNRESTRICTED = Permission()
"""As much as it has."""

PermissionSource = Callable[[], Permission]
"""What an executor may do now."""

MAX_BLOCKED_SECONDS = 5.0
"""Turns whose engine might not compute for so long go back: elsewhere they go on from where they are."""


class IntakeGate:
    """An executor's."""

    def __init__(self, permission: PermissionSource, *, lends: bool) -> None:
        self.lends = lends
        """Whether its engine is a guest, that parks and wakes."""
        self.reason = ""
        """Why no turn is taken; empty where turns are."""
        self.finishing = False
        """Though none is taken, those that run go on."""
        self.allowed_tokens = 0
        """That turns may hold."""
        self.cell = permission().cell
        """That it is to be in; None: where it is."""
        self._permission = permission
        self._last_command: Resume | Suspend | None = None
        """What the guest was told last."""

    @property
    def evicts_running(self) -> bool:
        """Whether what runs goes back as well."""
        return bool(self.reason) and not self.finishing

    def update(self, status: EngineStatus, *, busy: bool, leaving_for: str = "") -> Resume | Suspend | None:
        """Look again, the engine's newest tick at hand; returns what the engine is to be told.

        `busy`: turns run; `leaving`: for where, if it is on its way to another cell.
        """
        permission = self._permission()
        self.cell, self.allowed_tokens = permission.cell, allowed_tokens(status, permission)
        self.reason = permission.denied_reason or unavailable_reason(status) or leaving_for
        self.finishing = permission.may_finish and busy and not unavailable_reason(status)
        command = guest_command(permission)
        if not self.lends or self.finishing or command == self._last_command:
            return None
        self._last_command = command
        return command


def guest_command(permission: Permission) -> Resume | Suspend:
    """What it is to a guest."""
    return Suspend() if permission.denied_reason else Resume(permission.kv_bytes or NO_LIMIT)


def unavailable_reason(status: EngineStatus) -> str:
    """Why its engine can run no turn; empty where it can."""
    if status.suspended_reason:
        return status.suspended_reason
    if status.blocked_seconds >= MAX_BLOCKED_SECONDS:
        return f"serving left it no moment to compute in for {MAX_BLOCKED_SECONDS:.0f} s"
    return ""


def allowed_tokens(status: EngineStatus, permission: Permission) -> int:
    """Tokens that turns may hold: as many as the engine has room for, and no more than its leave says."""
    tokens = status.kv_bytes_total // status.kv_bytes_per_token
    if permission.kv_bytes:
        tokens = min(tokens, permission.kv_bytes // status.kv_bytes_per_token)
    return min(tokens, permission.token_budget) if permission.token_budget else tokens


@dataclass(frozen=True, slots=True)
class ReceivedGrant:
    """A grant as it was read."""

    grant: CapacityGrant
    received_at: float
    expires_at: float | None
    """When its lease ends; None where none was seen to come."""


class Lease:
    """One executor's."""

    def __init__(self, job: str = "", *, grant_required: bool = False) -> None:
        """`job`: `namespace:run` of a lender, "" of any other; `needed`: without a grant it parks."""
        self.lends = bool(job)
        """Whether grants rule it, and not drains alone."""
        self._job = job
        self._grant_required = grant_required
        self._grants: dict[GrantSource, ReceivedGrant] = {}

    def on_grant(self, grant: CapacityGrant | None, now: float, *, source: GrantSource, live: bool) -> bool:
        """The newest under one of its keys; None once it was deleted. Whether that says anything new.

        `seen`: it came while the log was followed, and was not read back.
        """
        before = self._grants.get(source)
        if before is not None and before.grant == grant:
            return False  # read again after trouble with the bus: its time began when it was read first
        if grant is None and before is not None and before.grant.lease_seconds:
            self._grants[source] = replace(before, expires_at=now)
        elif grant is None:
            self._grants.pop(source, None)
        else:
            self._grants[source] = ReceivedGrant(grant, now, _expiry(grant, before, now, live=live))
        return before is None or grant is None or not _is_renewal(before.grant, grant)

    def permission(self, now: float) -> Permission:
        """What it may do, and where."""
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
    """When a lease that is read now ends: one that was not seen to come with that which it renews, or sooner."""
    until = now + grant.lease_seconds
    if live:
        return until
    if before is None or before.expires_at is None or not _is_renewal(before.grant, grant):
        return None
    return min(before.expires_at, until)


def _is_renewal(earlier: CapacityGrant, later: CapacityGrant) -> bool:
    """Whether one renews the other; why it does may have changed."""
    terms = [(each.lend, each.kv_bytes, each.token_budget, each.job, each.cell) for each in (earlier, later)]
    return terms[0] == terms[1] and (
        earlier.reason == later.reason or bool(earlier.lease_seconds and later.lease_seconds)
    )


POLL_SECONDS = 0.2
"""Between two looks at whether to stop."""

log = structlog.get_logger("executor")


class GrantFollower:
    """Ask for `leave`, stop it."""

    def __init__(self, settings: BusSettings, worker: str, lease: Lease) -> None:
        self._lease = lease
        self._worker = worker
        self._follower = TableFollower(settings, GRANTS, f"{worker}-grants", self._on_grant)

    def wait_until_read(self, stop: Event) -> None:
        """Wait until those that were there have been read, or `stop` is set. Raises RoseError for what lasts."""
        while not self._follower.is_caught_up.wait(POLL_SECONDS) and not stop.is_set():
            if self._follower.failure is not None:
                raise self._follower.failure
            reason = "waits for its grants: the broker has not told them yet"
            HEALTH.report(reason, ready=False, lasts_seconds=START_SECONDS)

    def permission(self) -> Permission:
        """What it may do now."""
        return self._lease.permission(time.monotonic())

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._follower.stop()

    def _on_grant(self, item: Envelope, live: bool) -> None:
        worker, voice = parse_grant_key(item.key)
        if worker != self._worker or voice is None:
            return
        grant = item.record if isinstance(item.record, CapacityGrant) else None
        if self._lease.on_grant(grant, time.monotonic(), source=voice, live=live):
            summary = "none" if grant is None else _summary(grant, voice)
            log.info("grant", worker=self._worker, said=summary, reason="" if grant is None else grant.reason)


def _summary(grant: CapacityGrant, source: GrantSource) -> str:
    if source is GrantSource.CELL:
        return f"cell {grant.cell}"
    if source is GrantSource.DRAIN:
        return "drain"
    return "lend" if grant.lend else "park"
