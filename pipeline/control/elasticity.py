"""The elasticity core: which serving workers lend to this RL job, and in which cell each worker is.

The input is one summary per cell and second, and the grants on the log.

Keeps true
- At most `most_lenders` workers have a valid grant to lend. Each grant has a reason, computed when the grant is
  written, also when it renews another grant.
- A worker lends to one RL job. A worker with a valid grant of another job is not managed, and neither is a worker with
  a manual grant or a drained worker.
- A lender is woken if it would work for more than `margin_seconds` before the waiting turns are done, after its wake
  and the staging of its weights. The lender with the fewest user requests is woken first. If no open executor would
  ever do the waiting turns, one lender is woken however few turns wait.
- A lender is also woken if it would add at least `min_gain` of an executor's work to the held turns (`shared_steps`).
  This must have held for as long as its wake and the staging of its weights take: work that has lasted for some time is
  expected to last as long again.
- A lender is parked if for some time it has added less than `min_gain / 2`, and the other executors had room for the
  turns that it holds, and would have finished these turns and the waiting turns within `margin_seconds / 2`. Lenders
  without turns are parked before lenders with turns, and then the lender with the most user requests first.
- A lender that does not open after a wake, or that is closed for long and runs no turns, is parked for some time, and
  for longer after each further failure.
- Hysteresis: after a lender was parked as idle, no lender is worth waking before more turns wait. So under a constant
  load wakes and parks end. A lender that was woken or parked stays so for `dwell_seconds`.
- `rebalancing` decides the cell of each worker that is neither drained, nor under a manual grant, nor granted to
  another job. Cell grants have no lease: if no control app decides, workers stay in their cells.
- Grants to lend are leases, renewed while the summaries of the lender's cell arrive. If a cell sends no summaries, its
  leases are not renewed, and its lenders park when their leases end.
- Grants of a worker that is gone are deleted, for whichever job, so the log and this state do not grow with every name
  that was ever used. A worker is gone only if all cells were heard without a gap for FORGET_SECONDS and no summary
  named the worker.

Pure: `now` is unix seconds that never jump; no other clock is compared with it.

Example, margin 2 s
    40 turns wait, done in 30 s by w1 alone; w2 would open after 9 s  -> w2 is woken: done in 20 s instead of 30 s
    no turns wait, w1 runs 16 in steps of 16 ms, 8 ms without turns   -> w2 is woken after 9 s: steps of 12 ms
    no turns wait, w2 holds no turns                                  -> w2 is parked 10 s later
    no summary for 5 s                                                -> no grant is renewed
"""

import math
from collections import Counter
from collections.abc import Container, Iterable, Sized
from typing import NamedTuple

from rose.pipeline.control.config import ControlConfig
from rose.pipeline.control.forecast import (
    CompletionForecast,
    RemainingCapacity,
    WorkerEstimates,
    WorkShare,
    finish_seconds,
)
from rose.pipeline.control.lenders import Lender
from rose.pipeline.control.rebalancing import FORGET_SECONDS, CellCrew, Rebalancer
from rose.pipeline.control.shared_steps import SharedSteps
from rose.schemas.cells import CellSummary, ExecutorLine
from rose.schemas.grants import CapacityGrant, GrantSource
from rose.schemas.heartbeats import ExecutorState

GRACE_SECONDS = 2.0
"""How much later than here a lease may end at its lender, because a grant takes time to arrive."""


class LeasedGrant(NamedTuple):
    """A grant with a lease on the log."""

    grant: CapacityGrant
    written_at: float
    """When the grant was written by this control app, or read from the log."""

    def expires_at(self) -> float:
        """Time from which the lender certainly treats the grant as ended."""
        return self.written_at + self.grant.lease_seconds + GRACE_SECONDS


STALE_SECONDS = 5.0
"""Nothing is decided about a cell without a summary for this time. A router writes a summary every second."""

SETTLE_SECONDS = 3.0
"""Time from the first summary to the first decision. By then every live cell has sent a summary."""

RENEWALS_PER_LEASE = 3
"""Renewals of a grant within one lease."""

MIN_PATIENCE_SECONDS = 60.0
"""Least wait for a lender that was woken or has closed. The wait is at least four times the expected time of a wake."""


class CellView(NamedTuple):
    """The newest summary of one cell."""

    summary: CellSummary
    heard_at: float
    continuous_since: float
    """Since when summaries arrive without a gap of STALE_SECONDS."""


class ElasticityCore:
    """State and decisions of the control app. The app passes records in and writes the grants that are returned."""

    def __init__(self, config: ControlConfig, job: str, estimates: WorkerEstimates | None = None) -> None:
        """`job`: the RL job that workers lend to, `namespace:run`. `estimates`: what is known of workers before."""
        self.config = config
        self.job = job
        self.cells: dict[int, CellView] = {}
        self.lenders: dict[str, Lender] = {}
        self.estimates = estimates or WorkerEstimates()
        self.leases: dict[str, LeasedGrant] = {}
        """The newest leased grant on the log, by worker."""
        self.manual_grants: dict[str, CapacityGrant] = {}
        self.drains: dict[str, CapacityGrant] = {}
        self.rebalancer = Rebalancer(config)
        self.woken = self.parked = 0
        """Number of wakes and of parks since the start."""
        self._started_at: float | None = None

    def on_summary(self, summary: CellSummary, now: float) -> None:
        """Take a cell's newest summary. A summary of a cell number that does not exist is ignored."""
        if summary.cell >= summary.cells:
            return
        self._started_at = now if self._started_at is None else self._started_at
        previous = self.cells.get(summary.cell)
        goes_on = previous is not None and now - previous.heard_at < STALE_SECONDS
        self.cells[summary.cell] = CellView(summary, now, previous.continuous_since if previous and goes_on else now)
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
        """Take a worker's newest grant on the log; None if it was deleted.

        `source`: the source in the key. A LEASED grant without a lease counts as a manual grant.
        """
        if source is GrantSource.CELL:
            self.rebalancer.on_target_read(worker, None if grant is None else grant.cell, now)
        elif source is not GrantSource.LEASED or (grant is not None and not grant.lease_seconds):
            grants = self.drains if source is GrantSource.DRAIN else self.manual_grants
            grants.pop(worker, None)
            if grant is not None:
                grants[worker] = grant
        elif grant is None:
            self.leases.pop(worker, None)
        elif worker not in self.leases or self.leases[worker].grant != grant:  # grants that this app wrote are known
            self.leases[worker] = LeasedGrant(grant, now)

    def tick(self, now: float) -> list[CapacityGrant]:
        """Decide; return the grants that are to be written now. Call this about once a second."""
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
        """Worker and source of each grant that is to be deleted, because no summary names the worker; returned once."""
        live = self.live_summaries(now)
        if not live or len(live) < max(summary.cells for summary in live):
            return []
        if now - max(self.cells[summary.cell].continuous_since for summary in live) < FORGET_SECONDS:
            return []  # a router that has just started has not received the heartbeats of its executors yet
        old = (name for name, lease in self.leases.items() if now >= lease.expires_at() + FORGET_SECONDS)
        gone = [name for name in old if name not in self.lenders]
        for name in gone:
            del self.leases[name]
        expired_cells = ((name, GrantSource.CELL) for name in self.rebalancer.expired_targets(now))
        return [*((name, GrantSource.LEASED) for name in gone), *expired_cells]

    def live_summaries(self, now: float) -> list[CellSummary]:
        """The newest summaries of the cells that are not stale, in order of cell number."""
        cells = sorted(self.cells.items())
        return [cell.summary for _, cell in cells if now - cell.heard_at < STALE_SECONDS]

    def is_managed(self, name: str, now: float) -> bool:
        """Whether this core decides about a worker now.

        It does if a recent summary names the worker, and the worker is not drained and has no manual grant and no valid
        grant of another job.
        """
        lender, lease = self.lenders.get(name), self.leases.get(name)
        if (
            lender is None
            or now - lender.heard_at >= STALE_SECONDS
            or name in self.manual_grants
            or name in self.drains
        ):
            return False
        return lease is None or lease.grant.job == self.job or not lease.grant.lend or now >= lease.expires_at()

    def lending_workers(self, now: float) -> list[str]:
        """Return the workers that count for `most_lenders`.

        These are the known workers that shall lend by a decision or a manual grant, and the workers whose lease of this
        job is still valid.
        """
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
            lender.woken_at = None
            lender.backoff.succeeded()

    def _forget(self, now: float) -> None:
        gone = [name for name, lender in self.lenders.items() if now - lender.heard_at >= FORGET_SECONDS]
        for name in gone:
            del self.lenders[name]
        for name in (*gone, *self.rebalancer.forget(now)):
            self.estimates.forget(name)

    def _review(self, name: str, lender: Lender, now: float) -> None:
        """Decide what depends on one worker alone: adopt a new worker, or give up a worker that does not lend."""
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
                lender.backoff.failed(now)
                cause = "has taken no turns for" if lender.woken_at is None else "did not come in"
                self._park(lender, f"it {cause} {patience:.0f} s; it is {lender.line.state.value}", now)

    def _adopt(self, name: str, lender: Lender, now: float) -> None:
        """Decide about a new worker: it goes on as it is."""
        lease = self.leases.get(name)
        if lease is not None and lease.grant.lend and lease.grant.job == self.job:
            lender.decide(True, "it was to lend before", now)
        elif lease is None and (lender.line.open or lender.line.held_turns):
            lender.decide(True, "it lent already", now)
        else:
            lender.decide(False, "no work has waited for it", now)
            lender.since = now - self.config.dwell_seconds  # no decision parked it, so it may be woken at once

    def _park(self, lender: Lender, reason: str, now: float) -> None:
        self.parked += 1
        lender.decide(False, reason, now)

    def _park_idle(self, number: int, now: float) -> None:
        """Find the lenders of a cell that are not needed, and park those that were not needed for `idle_seconds`."""
        summary, shares = self.cells[number].summary, self._shares(number, now)
        free = [(each.free_turns, each.free_tokens) for each in summary.executors if each.worker in shares]
        turns, tokens = (sum(column) for column in zip(*free, strict=True)) if free else (0, 0)
        remaining = RemainingCapacity(shares, CompletionForecast(shares.values()), summary.waiting_turns, turns, tokens)
        steps, turn_tokens = self._shared_steps(number, shares)
        done_seconds = finish_seconds(shares.values(), remaining.turns)
        target_seconds = self.config.margin_seconds / 2
        keeps_idle = False
        for name, lender in sorted(self._lenders_of(number, now), key=lambda each: (each[1].park_priority, each[0])):
            if not lender.lends:
                continue
            if remaining.is_needed(name, lender.line, target_seconds):
                lender.idle_since = None
                lender.reason = (
                    f"{summary.waiting_turns} turns wait: done {_when(done_seconds)} with all that lend"
                    if summary.waiting_turns
                    else f"it runs {lender.line.held_turns} turns, and the others have no room for them or take longer "
                    f"than {target_seconds:g} s"
                )
                continue
            step_share = self.estimates.step_share(name, turn_tokens) if name in shares else None
            gain = steps.lost_gain(step_share) if step_share is not None else 0.0
            if gain >= self.config.min_gain / 2:
                lender.idle_since = None
                lender.reason = f"{_describe(steps)}; it adds {gain:.2f} of an executor's work"
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
                if step_share is not None:
                    steps.remove(step_share)
                self._park(lender, f"of no use for {idle_for:.0f} s", now)

    def _spare_lenders(self, now: float) -> float:
        """How many more workers may lend; infinite without a bound, negative if too many lend."""
        max_lenders = self.config.most_lenders
        return max_lenders - len(self.lending_workers(now)) if max_lenders else math.inf

    def _enforce_cap(self, now: float) -> None:
        """Park lenders in excess of `most_lenders`.

        A worker that no summary has named since the start does not count here: its grant was written within the bound,
        and its lease may have ended long ago.
        """
        lending = [name for name in self.lending_workers(now) if name in self.lenders]
        max_lenders = self.config.most_lenders
        excess = len(lending) - max_lenders if max_lenders else 0
        managed = sorted((self.lenders[name].park_priority, name) for name in lending if self.is_managed(name, now))
        for _, name in managed[: max(0, excess)]:
            self._park(self.lenders[name], f"more than {max_lenders} would lend", now)

    def _wake(self, number: int, now: float) -> None:
        """Wake the lenders of a cell that are worth waking, in order of their user requests."""
        spare = self._spare_lenders(now)
        if spare <= 0:
            return
        turns, shares = self.cells[number].summary.waiting_turns, self._shares(number, now)
        forecast, finish_without = CompletionForecast(shares.values()), finish_seconds(shares.values(), turns)
        steps, turn_tokens = self._shared_steps(number, shares)
        before = _describe(steps)
        for_waiting, for_steps = list[Lender](), list[Lender]()
        for name, lender in sorted(self._lenders_of(number, now), key=lambda each: (each[1].user_requests, each[0])):
            rested = now - lender.since >= self.config.dwell_seconds and now >= lender.backoff.until
            if lender.lends or not rested or lender.line.serving_waiting:
                continue
            if len(for_waiting) + len(for_steps) == spare:
                break
            delay, step_share = self._opening_delay(name, lender, now), self.estimates.step_share(name, turn_tokens)
            gain = steps.gain(step_share) if step_share is not None else 0.0
            share, margin = WorkShare(delay, self.estimates.turns_per_second(name)), self.config.margin_seconds
            first_of_all = finish_without == math.inf and not for_waiting
            if first_of_all or forecast.turns_done_by(delay + margin) + share.rate * margin < turns:
                for_waiting.append(lender)
            elif lender.gains_for(gain, self.config.min_gain, now) >= delay:
                for_steps.append(lender)
            else:
                continue
            forecast.add(share)
            shares[name] = share
            if step_share is not None:
                steps.add(step_share)
        finish = finish_seconds(shares.values(), turns)
        for lender in for_waiting:
            done = f"done {_when(finish)} with it{_company(for_waiting)}, {_when(finish_without)} without"
            lender.decide(True, f"{turns} turns wait: {done}", now)
        for lender in for_steps:
            after = f"{1e3 * steps.step_seconds:.1f} ms with it{_company(for_steps)}"
            lender.decide(True, f"{before}, {after}", now)
        self.woken += len(for_waiting) + len(for_steps)

    def _rebalance(self, now: float) -> list[CapacityGrant]:
        """The cell grant that is due, if there is one."""
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
        return [self._grant(move.worker, move.reason, now, lend=True, cell=move.cell)]

    def _may_move(self, line: ExecutorLine, shares: Container[str], now: float, *, may_wake: bool) -> bool:
        """Whether a worker may be moved to another cell.

        `shares`: the workers that take part in the work of its cell. `may_wake`: whether one more worker may lend.
        """
        if line.worker in self.drains or line.worker in self.manual_grants:
            return False
        lender = self.lenders.get(line.worker) if line.serving and line.by_grant else None
        if lender is None or lender.lends:
            return line.open and line.worker in shares
        may_be_woken = may_wake and now >= lender.backoff.until and not line.serving_waiting
        return lender.lends is False and may_be_woken and self.is_managed(line.worker, now)

    def _lenders_of(self, number: int, now: float) -> Iterable[tuple[str, Lender]]:
        """The managed lenders in a cell's newest summary."""
        heard_at = self.cells[number].heard_at
        return [
            (name, lender)
            for name, lender in self.lenders.items()
            if lender.cell == number and lender.heard_at >= heard_at and self.is_managed(name, now)
        ]

    def _shares(self, number: int, now: float) -> dict[str, WorkShare]:
        """Work shares of a cell: of the open executors that shall not park, and of the lenders that were woken."""
        shares: dict[str, WorkShare] = {}
        for line in self.cells[number].summary.executors:
            lender = self.lenders.get(line.worker) if line.serving and line.by_grant else None
            if lender is None or not self.is_managed(line.worker, now):
                takes_part = line.open
            else:
                takes_part = bool(lender.lends) and (line.open or lender.woken_at is not None)
            if takes_part:
                opens = lender is not None and not line.open
                free_at = self._opening_delay(line.worker, lender, now) if lender and opens else line.load_seconds
                shares[line.worker] = WorkShare(free_at, self.estimates.turns_per_second(line.worker))
        return shares

    def _shared_steps(self, number: int, workers: Container[str]) -> tuple[SharedSteps, float]:
        """The held turns of a cell's workers and the steps that they share; mean tokens that are held for a turn."""
        lines = [line for line in self.cells[number].summary.executors if line.worker in workers]
        turns = sum(line.held_turns for line in lines)
        turn_tokens = sum(line.held_tokens for line in lines) / turns if turns else 0.0
        shares = (self.estimates.step_share(line.worker, turn_tokens) for line in lines)
        return SharedSteps((share for share in shares if share is not None), turns), turn_tokens

    def _opening_delay(self, name: str, lender: Lender, now: float) -> float:
        """Expected seconds until a worker is open: from its wake, or from now if it was not woken yet."""
        total = self.estimates.wake.expected(name) + self.estimates.catch_up.expected(name)
        return total if lender.woken_at is None else max(0.0, total - (now - lender.woken_at))

    def _due_grant(self, name: str, now: float) -> CapacityGrant | None:
        """The grant of a lender that is due, if there is one.

        The grant is entered in `leases` as if it were on the log.
        """
        lender, lease = self.lenders[name], self.leases.get(name)
        if lender.lends is None or not self.is_managed(name, now):
            return None
        if lender.lends:
            interval = self.config.lease_seconds / RENEWALS_PER_LEASE
            if lender.renewed_at is not None and now - lender.renewed_at < interval:
                return None
            lender.renewed_at = now
        elif lease is not None and lease.grant.job == self.job and not lease.grant.lend:
            return None
        grant = self._grant(name, lender.reason, now, lend=lender.lends, lease_seconds=self.config.lease_seconds)
        self.leases[name] = LeasedGrant(grant, now)
        return grant

    def _grant(
        self, worker: str, reason: str, now: float, *, lend: bool, lease_seconds: float = 0.0, cell: int | None = None
    ) -> CapacityGrant:
        """Return a grant of this job without a limit. `lease_seconds`: 0 is no lease. `cell`: None keeps the cell."""
        return CapacityGrant(
            worker=worker,
            lend=lend,
            kv_bytes=0,
            token_budget=0,
            granted_at=now,
            reason=reason,
            lease_seconds=lease_seconds,
            job=self.job,
            cell=cell,
        )


def _describe(steps: SharedSteps) -> str:
    return f"{steps.turns} turns share the steps of {steps.executors} executors, {1e3 * steps.step_seconds:.1f} ms each"


def _company(woken: Sized) -> str:
    return f" and {len(woken) - 1} more" if len(woken) > 1 else ""


def _when(seconds: float) -> str:
    return "never" if seconds == math.inf else f"in {seconds:.0f} s"
