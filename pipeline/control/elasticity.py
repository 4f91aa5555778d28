"""Elasticity: which serving workers lend to this RL job, and where workers are, from one summary per cell and second.

Keeps true
- At most `most_lenders` have a grant to lend that has not run out, and each grant says why: by what is known when it is
  written, also where it renews another.
- A worker lends to one RL job: who has a grant of another one that has not run out is left alone, and so is who was
  told by hand, or is drained.
- A lender is woken when it would be at work for more than the margin before what waits is done, its wake and the
  catching up of its weights counted; the one whose users ask least first. Where nobody else would ever do what waits,
  one is woken however little that is. It is parked once, for a while, the others had room for what it holds and would
  have been done with that, and with what waits, within half of the margin. Of several who runs nothing goes first, and
  who runs turns stays until no such one is of no use; then whose users ask most.
- A place goes to who takes it: a lender that does not come, or that closes for long and runs nothing, is parked for a
  while, longer each time that it does not come.
- It settles: once somebody was parked for being of no use, nobody is worth waking before more waits. So under a
  constant load wakes and parkings both end. Who was woken or parked stays so for the dwell.
- Which cell a worker is to be in, `rebalancing` decides, of those who are neither drained, told by hand nor another
  job's. It holds without a lease: with nobody to decide they stay where they are.
- Grants are leases, renewed while the summaries of their cell come. Silence means no: of a cell that is not heard of
  nothing is renewed, and its lenders park by themselves.
- What was once granted to a worker that is gone is deleted, whichever job it was for, so neither the log nor this grows
  with every name there ever was. Nobody counts as gone before all cells were heard for as long, without a gap, and none
  named it.

Pure: `now` is unix seconds that never jump; no other clock is compared with it.

Example, margin 2 s
    40 turns wait, done in 30 s by w1 alone; w2 would need 9 s to come  -> w2 is to lend: done in 20 s instead of 30 s
    nothing waits, w2 holds nothing                                     -> 10 s later w2 is to park
    no summary for 5 s                                                  -> no grant is renewed
"""

import math
from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from rose.pipeline.control.config import ControlConfig
from rose.pipeline.control.forecast import (
    CompletionForecast,
    RemainingCapacity,
    WorkerEstimates,
    WorkShare,
    finish_seconds,
)
from rose.pipeline.control.rebalancing import FORGET_SECONDS, CellCrew, Rebalancer
from rose.schemas.cells import CellSummary, ExecutorLine
from rose.schemas.grants import CapacityGrant, GrantSource
from rose.schemas.heartbeats import ExecutorState

GRACE_SECONDS = 2.0
"""By which a lease may end later with its lender: a grant is on its way for some time."""

HOLD_SECONDS = 60.0
"""One that was given up is left parked for so long, and twice as long each further time."""

MAX_FAILURES = 6
"""Of them the hold grows no more."""

USER_REQUESTS_WEIGHT = 0.1
"""Of the newest summary in how much a worker's own users ask of it."""


class LeasedGrant(NamedTuple):
    """A leased grant on the log."""

    grant: CapacityGrant
    written_at: float
    """When it was written here, or read."""

    def expires_at(self) -> float:
        """When its lender surely counts it no more."""
        return self.written_at + self.grant.lease_seconds + GRACE_SECONDS


@dataclass(slots=True)
class Lender:
    """One serving worker that follows grants."""

    line: ExecutorLine
    """The newest."""
    cell: int
    heard_at: float
    lends: bool | None = None
    """Whether it is to; None before that was decided."""
    reason: str = ""
    """Of one that lends, by the newest summary of its cell; of any other, when that was decided."""
    since: float = 0.0
    """When that was decided."""
    renewed_at: float | None = None
    """When a grant to lend was written last; None before, and once it is parked."""
    woken_at: float | None = None
    """When it was woken, until it is open."""
    guest_built_at: float | None = None
    """When its guest was there after that, its weights not yet."""
    closed_since: float | None = None
    """Of one that is to lend: since when it has been closed and has held nothing, as each summary said."""
    idle_since: float | None = None
    failures: int = 0
    """Times on end that it was given up; none any more once it was woken and came."""
    parked_until: float = 0.0
    user_requests: float = 0.0
    """Requests of its own users, in the mean."""

    @property
    def park_priority(self) -> tuple[bool, float]:
        """Its place among those that may be parked: who runs nothing first, then whose users ask most."""
        return self.line.held_turns > 0, -self.user_requests

    @property
    def absent_since(self) -> float | None:
        """Since when it is to lend and does not: it did not come, or it closed. One that runs turns may be full."""
        return self.closed_since if self.woken_at is None else self.woken_at

    def on_line(self, line: ExecutorLine, cell: int, now: float, *, after_gap: bool) -> None:
        """Its newest line. `after_gap`: of the time since the one before nobody knows."""
        self.line, self.cell, self.heard_at = line, cell, now
        self.user_requests += USER_REQUESTS_WEIGHT * (line.serving_running + line.serving_waiting - self.user_requests)
        if not self.lends or line.open or line.held_turns:
            self.closed_since = None
        elif self.closed_since is None or after_gap:
            self.closed_since = now

    def give_up(self, now: float) -> None:
        """It is left parked for a while, longer each time."""
        self.failures = min(self.failures + 1, MAX_FAILURES)
        self.parked_until = now + HOLD_SECONDS * 2 ** (self.failures - 1)

    def decide(self, lends: bool, reason: str, now: float) -> None:
        """Change it."""
        self.lends, self.reason, self.since = lends, reason, now
        self.woken_at = now if lends and not self.line.open else None
        self.guest_built_at = self.closed_since = self.idle_since = self.renewed_at = None


STALE_SECONDS = 5.0
"""A cell that was not heard of for so long is decided nothing about; its router speaks every second."""

SETTLE_SECONDS = 3.0
"""Before the first decision: by then every cell has spoken."""

RENEWALS_PER_LEASE = 3
"""Of a lease, in its time."""

MIN_PATIENCE_SECONDS = 60.0
"""With a lender that was woken, or that has closed; at least four times what a wake is expected to take."""


class CellView(NamedTuple):
    """One cell, as it was heard of last."""

    summary: CellSummary
    heard_at: float
    continuous_since: float
    """From when on it was heard without a gap."""


class ElasticityCore:
    """All that the control app knows; the app hands it records and writes what it decides."""

    def __init__(self, config: ControlConfig, job: str) -> None:
        """`job`: the RL job that is lent to, `namespace:run`."""
        self.config = config
        self.job = job
        self.cells: dict[int, CellView] = {}
        self.lenders: dict[str, Lender] = {}
        self.estimates = WorkerEstimates()
        self.leases: dict[str, LeasedGrant] = {}
        """By worker, the newest leased grant on the log."""
        self.manual_grants: dict[str, CapacityGrant] = {}
        self.drains: dict[str, CapacityGrant] = {}
        self.rebalancer = Rebalancer(config)
        self.woken = self.parked = 0
        """Times that one was, since the start."""
        self._started_at: float | None = None

    def on_summary(self, summary: CellSummary, now: float) -> None:
        """A cell's newest summary. One of a cell that there is not tells nothing."""
        if summary.cell >= summary.cells:
            return
        self._started_at = now if self._started_at is None else self._started_at
        previous = self.cells.get(summary.cell)
        goes_on = previous is not None and now - previous.heard_at < STALE_SECONDS
        self.cells[summary.cell] = CellView(
            summary, now, previous.continuous_since if previous is not None and goes_on else now
        )
        if summary.waiting_turns:
            self.estimates.on_waiting(summary.waiting_turns, summary.prefill_tokens, summary.new_tokens)
        for line in summary.executors:
            self.rebalancer.on_worker_named(line.worker, summary.cell, now)
            if line.open:
                self.estimates.on_open(line)
            if line.serving and line.by_grant:
                self._on_line(line, summary.cell, now)

    def on_grant(
        self, worker: str, grant: CapacityGrant | None, now: float, *, source: GrantSource = GrantSource.LEASED
    ) -> None:
        """The newest grant of a worker on the log; None once it was deleted. One without a lease is by hand."""
        if source is GrantSource.CELL:
            self.rebalancer.on_target_read(worker, None if grant is None else grant.cell, now)
        elif source is not GrantSource.LEASED or (grant is not None and not grant.lease_seconds):
            grants = self.drains if source is GrantSource.DRAIN else self.manual_grants
            grants.pop(worker, None)
            if grant is not None:
                grants[worker] = grant
        elif grant is None:
            self.leases.pop(worker, None)
        elif worker not in self.leases or self.leases[worker].grant != grant:  # what was written here is known
            self.leases[worker] = LeasedGrant(grant, now)

    def tick(self, now: float) -> list[CapacityGrant]:
        """Time has passed: what is granted now."""
        if self._started_at is None or now < self._started_at + SETTLE_SECONDS:
            return []
        self._forget(now)
        for name, lender in self.lenders.items():
            self._review(name, lender, now)
        live_cells = [summary.cell for summary in self.live_summaries(now)]
        for number in live_cells:
            self._park_idle(number, now)
        self._enforce_cap(now)
        for number in live_cells:
            self._wake(number, now)
        leases = [grant for name in sorted(self.lenders) if (grant := self._due_grant(name, now)) is not None]
        return leases + self._rebalance(now)

    def expired_grants(self, now: float) -> list[tuple[str, GrantSource]]:
        """Whose grants, by which voice, are to be deleted: nobody has named the worker for long. They are told once."""
        live = self.live_summaries(now)
        if not live or len(live) < max(summary.cells for summary in live):
            return []
        if now - max(self.cells[summary.cell].continuous_since for summary in live) < FORGET_SECONDS:
            return []  # a router that has just begun has not heard its workers yet
        old = (name for name, lease in self.leases.items() if now >= lease.expires_at() + FORGET_SECONDS)
        gone = [name for name in old if name not in self.lenders]
        for name in gone:
            del self.leases[name]
        expired_cells = ((name, GrantSource.CELL) for name in self.rebalancer.expired_targets(now))
        return [*((name, GrantSource.LEASED) for name in gone), *expired_cells]

    def live_summaries(self, now: float) -> list[CellSummary]:
        """Of the cells that are heard, by their number."""
        cells = sorted(self.cells.items())
        return [cell.summary for _, cell in cells if now - cell.heard_at < STALE_SECONDS]

    def is_managed(self, name: str, now: float) -> bool:
        """Whether this decides about a worker now: it is heard of, not drained, and has no grant by hand or of another
        job.
        """
        lender, lease = self.lenders.get(name), self.leases.get(name)
        if (
            lender is None
            or name in self.manual_grants
            or name in self.drains
            or now - lender.heard_at >= STALE_SECONDS
        ):
            return False
        return lease is None or lease.grant.job == self.job or not lease.grant.lend or now >= lease.expires_at()

    def lending_workers(self, now: float) -> list[str]:
        """Those that count for the cap: told to lend by this or by hand, and heard of, or their lease still holds."""
        return [name for name in dict.fromkeys((*self.lenders, *self.leases)) if self._counts_as_lending(name, now)]

    def _counts_as_lending(self, name: str, now: float) -> bool:
        if name in self.drains:
            return False
        lender, lease = self.lenders.get(name), self.leases.get(name)
        lease_holds = (
            lease is not None and lease.grant.lend and lease.grant.job == self.job and now < lease.expires_at()
        )
        if lender is None:
            return lease_holds
        if name in self.manual_grants:
            return lease_holds or self.manual_grants[name].lend
        return bool(lender.lends) or (lease_holds and not self.is_managed(name, now))

    def _on_line(self, line: ExecutorLine, cell: int, now: float) -> None:
        lender = self.lenders.get(line.worker)
        if lender is None:
            lender = self.lenders[line.worker] = Lender(line, cell, now)
        lender.on_line(line, cell, now, after_gap=now - lender.heard_at >= STALE_SECONDS)
        if lender.woken_at is None:
            return
        if lender.guest_built_at is None and line.state is not ExecutorState.PAUSED:
            lender.guest_built_at = now
            self.estimates.wake.add(line.worker, now - lender.woken_at)
        if line.open and lender.guest_built_at is not None:
            self.estimates.catch_up.add(line.worker, now - lender.guest_built_at)
            lender.woken_at, lender.failures = None, 0

    def _forget(self, now: float) -> None:
        gone = [name for name, lender in self.lenders.items() if now - lender.heard_at >= FORGET_SECONDS]
        for name in gone:
            del self.lenders[name]
        for name in (*gone, *self.rebalancer.forget(now)):
            self.estimates.forget(name)

    def _review(self, name: str, lender: Lender, now: float) -> None:
        """What follows for one worker alone."""
        if not self.is_managed(name, now):
            lease_over = (
                lender.renewed_at is None or now >= lender.renewed_at + self.config.lease_seconds + GRACE_SECONDS
            )
            if lender.lends and (lease_over or now - lender.heard_at < STALE_SECONDS):
                lender.lends = None
        elif lender.lends is None:
            self._adopt(name, lender, now)
        elif lender.lends and lender.absent_since is not None:
            patience = max(MIN_PATIENCE_SECONDS, 4 * self._opening_delay(name, lender, lender.absent_since))
            if now - lender.absent_since >= patience:
                lender.give_up(now)
                cause = "has taken no turns for" if lender.woken_at is None else "did not come in"
                self._park(lender, f"it {cause} {patience:.0f} s; it is {lender.line.state.value}", now)

    def _adopt(self, name: str, lender: Lender, now: float) -> None:
        """A worker is met: it goes on as it is."""
        lease = self.leases.get(name)
        if lease is not None and lease.grant.lend and lease.grant.job == self.job:
            lender.decide(True, "it was to lend before", now)
        elif lease is None and (lender.line.open or lender.line.held_turns):
            lender.decide(True, "it lent already", now)
        else:
            lender.decide(False, "no work has waited for it", now)
            lender.since = now - self.config.dwell_seconds  # nobody has parked it: it may be woken at once

    def _park(self, lender: Lender, reason: str, now: float) -> None:
        self.parked += 1
        lender.decide(False, reason, now)

    def _park_idle(self, number: int, now: float) -> None:
        """Note which lenders of a cell are of no use, and park those that were not for long enough."""
        summary, shares = self.cells[number].summary, self._shares(number, now)
        free = [(each.free_turns, each.free_tokens) for each in summary.executors if each.worker in shares]
        turns, tokens = (sum(column) for column in zip(*free, strict=True)) if free else (0, 0)
        remaining = RemainingCapacity(shares, CompletionForecast(shares.values()), summary.waiting_turns, turns, tokens)
        done_seconds, target_seconds, keeps_idle = (
            finish_seconds(shares.values(), remaining.turns),
            self.config.margin_seconds / 2,
            False,
        )
        for name, lender in sorted(self._lenders_of(number, now), key=lambda each: (each[1].park_priority, each[0])):
            if not lender.lends:
                continue
            if remaining.is_needed(name, lender.line, target_seconds):
                lender.idle_since, lender.reason = (
                    None,
                    _lending_reason(lender.line, summary.waiting_turns, done_seconds, target_seconds),
                )
                continue
            lender.idle_since = now if lender.idle_since is None else lender.idle_since
            idle_for = now - lender.idle_since
            if keeps_idle and lender.line.held_turns:
                lender.reason = f"of no use for {idle_for:.0f} s; it runs turns, and one that runs none is parked first"
            elif now - lender.since < self.config.dwell_seconds or idle_for < self.config.idle_seconds:
                lender.reason = f"of no use for {idle_for:.0f} s, and not for long enough"
                keeps_idle = keeps_idle or not lender.line.held_turns
            else:
                remaining.remove(name, lender.line)
                self._park(lender, f"of no use for {idle_for:.0f} s", now)

    def _spare_lenders(self, now: float) -> float:
        """How many more may lend."""
        max_lenders = self.config.most_lenders
        return max_lenders - len(self.lending_workers(now)) if max_lenders else math.inf

    def _enforce_cap(self, now: float) -> None:
        """Park those over the cap. Who was not heard since the start does not put them there: whoever granted it kept
        the cap, and its lease may have run out long ago.
        """
        lending, max_lenders = (
            [name for name in self.lending_workers(now) if name in self.lenders],
            self.config.most_lenders,
        )
        excess = len(lending) - max_lenders if max_lenders else 0
        managed = sorted((self.lenders[name].park_priority, name) for name in lending if self.is_managed(name, now))
        for _, name in managed[: max(0, excess)]:
            self._park(self.lenders[name], f"more than {max_lenders} would lend", now)

    def _wake(self, number: int, now: float) -> None:
        """Wake those of a cell that are worth it, whose users ask least first."""
        turns, shares = self.cells[number].summary.waiting_turns, self._shares(number, now)
        spare = self._spare_lenders(now)
        if not turns or spare <= 0:
            return
        forecast, woken = CompletionForecast(shares.values()), list[Lender]()
        finish_without = finish_seconds(shares.values(), turns)
        for name, lender in sorted(self._lenders_of(number, now), key=lambda each: (each[1].user_requests, each[0])):
            rested = now - lender.since >= self.config.dwell_seconds and now >= lender.parked_until
            if lender.lends or not rested or lender.line.serving_waiting:
                continue
            share = WorkShare(self._opening_delay(name, lender, now), self.estimates.turns_per_second(name))
            margin = self.config.margin_seconds
            first_of_all = finish_without == math.inf and not woken
            if first_of_all or forecast.turns_done_by(share.free_at + margin) + share.rate * margin < turns:
                forecast.add(share)
                shares[name] = share
                woken.append(lender)
                if len(woken) == spare:
                    break
        finish = finish_seconds(shares.values(), turns)
        company = f" and {len(woken) - 1} more" if len(woken) > 1 else ""
        for lender in woken:
            reason = f"{turns} turns wait: done {_when(finish)} with it{company}, {_when(finish_without)} without"
            lender.decide(True, reason, now)
        self.woken += len(woken)

    def _rebalance(self, now: float) -> list[CapacityGrant]:
        """What is said of a worker's cell, if anything."""
        live = self.live_summaries(now)
        if all(each.cells == 1 for each in live):
            return []
        named = Counter(line.worker for each in live for line in each.executors)
        may_wake = self._spare_lenders(now) > 0
        crews: dict[int, CellCrew] = {}
        for each in live:
            shares = self._shares(each.cell, now)
            once = [line for line in each.executors if named[line.worker] == 1]
            spare = {line.worker: line for line in once if self._may_move(line, shares, now, may_wake=may_wake)}
            crews[each.cell] = CellCrew(each, shares, spare)
        move = self.rebalancer.decide(crews, now)
        if move is None:
            return []
        grant = CapacityGrant(
            worker=move.worker,
            lend=True,
            kv_bytes=0,
            token_budget=0,
            granted_at=now,
            reason=move.reason,
            job=self.job,
            cell=move.cell,
        )
        return [grant]

    def _may_move(self, line: ExecutorLine, shares: Container[str], now: float, *, may_wake: bool) -> bool:
        """Whether one may be told of another cell. `room`: one lender more may lend."""
        if line.worker in self.drains or line.worker in self.manual_grants:
            return False
        lender = self.lenders.get(line.worker) if line.serving and line.by_grant else None
        if lender is None or lender.lends:
            return line.open and line.worker in shares
        may_be_woken = may_wake and now >= lender.parked_until and not line.serving_waiting
        return lender.lends is False and may_be_woken and self.is_managed(line.worker, now)

    def _lenders_of(self, number: int, now: float) -> Iterable[tuple[str, Lender]]:
        """The lenders in a cell's newest summary that this decides about."""
        heard_at = self.cells[number].heard_at
        return [
            (name, lender)
            for name, lender in self.lenders.items()
            if lender.cell == number and lender.heard_at >= heard_at and self.is_managed(name, now)
        ]

    def _shares(self, number: int, now: float) -> dict[str, WorkShare]:
        """Who takes part in a cell's work: who is open and is not to park, and who was woken."""
        shares: dict[str, WorkShare] = {}
        for line in self.cells[number].summary.executors:
            lender = self.lenders.get(line.worker) if line.serving and line.by_grant else None
            if lender is None or not self.is_managed(line.worker, now):
                takes_part = line.open
            else:
                takes_part = bool(lender.lends) and (line.open or lender.woken_at is not None)
            if takes_part:
                is_opening = lender is not None and not line.open
                free_at = self._opening_delay(line.worker, lender, now) if is_opening and lender else line.load_seconds
                shares[line.worker] = WorkShare(free_at, self.estimates.turns_per_second(line.worker))
        return shares

    def _opening_delay(self, name: str, lender: Lender, now: float) -> float:
        """Seconds from now until a worker is open, if it is woken now or was before."""
        total = self.estimates.wake.expected(name) + self.estimates.catch_up.expected(name)
        return total if lender.woken_at is None else max(0.0, total - (now - lender.woken_at))

    def _due_grant(self, name: str, now: float) -> CapacityGrant | None:
        """The grant that is due, if any; it counts as on the log."""
        lender, lease = self.lenders[name], self.leases.get(name)
        if lender.lends is None or not self.is_managed(name, now):
            return None
        if lender.lends:
            if (
                lender.renewed_at is not None
                and now - lender.renewed_at < self.config.lease_seconds / RENEWALS_PER_LEASE
            ):
                return None
            lender.renewed_at = now
        elif lease is not None and lease.grant.job == self.job and not lease.grant.lend:
            return None
        grant = CapacityGrant(
            worker=name,
            lend=lender.lends,
            kv_bytes=0,
            token_budget=0,
            granted_at=now,
            reason=lender.reason,
            lease_seconds=self.config.lease_seconds,
            job=self.job,
        )
        self.leases[name] = LeasedGrant(grant, now)
        return grant


def _lending_reason(line: ExecutorLine, waiting: int, done_seconds: float, target: float) -> str:
    """Why one goes on lending. `done_seconds`: seconds until all that waits is; `target`: those in which all should
    be.
    """
    if waiting:
        return f"{waiting} turns wait: done {_when(done_seconds)} with all that lend"
    return f"it runs {line.held_turns} turns, and the others have no room for them or take longer than {target:g} s"


def _when(seconds: float) -> str:
    return "never" if seconds == math.inf else f"in {seconds:.0f} s"
