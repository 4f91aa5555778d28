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
- Which cell a worker is to be in, `moves` decides, of those who are neither drained, told by hand nor another job's. It
  holds without a lease: with nobody to decide they stay where they are.
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
from typing import NamedTuple

from pipeline.control.config import ControlConfig
from pipeline.control.forecast import Flow, Learned, Rest, Share, finish_seconds
from pipeline.control.lender import GRACE_SECONDS, Lender, Told
from pipeline.control.moves import FORGET_SECONDS, Crew, Moves
from schemas.capacity import CapacityGrant, Voice
from schemas.cells import CellSummary, ExecutorLine
from schemas.slack import ExecutorState

STALE_SECONDS = 5.0
"""A cell that was not heard of for so long is decided nothing about; its router speaks every second."""

SETTLE_SECONDS = 3.0
"""Before the first decision: by then every cell has spoken."""

RENEWALS = 3
"""Of a lease, in its time."""

LEAST_PATIENCE_SECONDS = 60.0
"""With a lender that was woken, or that has closed; at least four times what a wake is expected to take."""


class Cell(NamedTuple):
    """One cell, as it was heard of last."""

    summary: CellSummary
    heard_at: float
    since: float
    """From when on it was heard without a gap."""


class Control:
    """All that the control app knows; the app hands it records and writes what it decides."""

    def __init__(self, config: ControlConfig, job: str) -> None:
        """`job`: the RL job that is lent to, `namespace:run`."""
        self.config = config
        self.job = job
        self.cells: dict[int, Cell] = {}
        self.lenders: dict[str, Lender] = {}
        self.learned = Learned()
        self.leased: dict[str, Told] = {}
        """By worker, the newest leased grant on the log."""
        self.by_hand: dict[str, CapacityGrant] = {}
        self.drained: dict[str, CapacityGrant] = {}
        self.moves = Moves(config)
        self.woken = self.parked = 0
        """Times that one was, since the start."""
        self._began: float | None = None

    def summarised(self, summary: CellSummary, now: float) -> None:
        """A cell's newest summary. One of a cell that there is not tells nothing."""
        if summary.cell >= summary.cells:
            return
        self._began = now if self._began is None else self._began
        before = self.cells.get(summary.cell)
        goes_on = before is not None and now - before.heard_at < STALE_SECONDS
        self.cells[summary.cell] = Cell(summary, now, before.since if before is not None and goes_on else now)
        if summary.waiting_turns:
            self.learned.saw_waiting(summary.waiting_turns, summary.prefill_tokens, summary.new_tokens)
        for line in summary.executors:
            self.moves.heard(line.worker, summary.cell, now)
            if line.open:
                self.learned.saw_open(line)
            if line.serving and line.by_grant:
                self._heard(line, summary.cell, now)

    def granted(self, worker: str, grant: CapacityGrant | None, now: float, *, voice: Voice = Voice.LEASED) -> None:
        """The newest grant of a worker on the log; None once it was deleted. One without a lease is by hand."""
        if voice is Voice.CELL:
            self.moves.read(worker, None if grant is None else grant.cell, now)
        elif voice is not Voice.LEASED or (grant is not None and not grant.lease_seconds):
            said = self.drained if voice is Voice.DRAIN else self.by_hand
            said.pop(worker, None)
            if grant is not None:
                said[worker] = grant
        elif grant is None:
            self.leased.pop(worker, None)
        elif worker not in self.leased or self.leased[worker].grant != grant:  # what was written here is known
            self.leased[worker] = Told(grant, now)

    def tick(self, now: float) -> list[CapacityGrant]:
        """Time has passed: what is granted now."""
        if self._began is None or now < self._began + SETTLE_SECONDS:
            return []
        self._forget(now)
        for name, lender in self.lenders.items():
            self._look_at(name, lender, now)
        fresh = [summary.cell for summary in self.fresh(now)]
        for number in fresh:
            self._park_useless(number, now)
        self._keep_cap(now)
        for number in fresh:
            self._wake(number, now)
        leases = [grant for name in sorted(self.lenders) if (grant := self._told(name, now)) is not None]
        return leases + self._moved(now)

    def outdated(self, now: float) -> list[tuple[str, Voice]]:
        """Whose grants, by which voice, are to be deleted: nobody has named the worker for long. They are told once."""
        fresh = self.fresh(now)
        if not fresh or len(fresh) < max(summary.cells for summary in fresh):
            return []
        if now - max(self.cells[summary.cell].since for summary in fresh) < FORGET_SECONDS:
            return []  # a router that has just begun has not heard its workers yet
        old = (name for name, told in self.leased.items() if now >= told.runs_out() + FORGET_SECONDS)
        gone = [name for name in old if name not in self.lenders]
        for name in gone:
            del self.leased[name]
        moved = ((name, Voice.CELL) for name in self.moves.outdated(now))
        return [*((name, Voice.LEASED) for name in gone), *moved]

    def fresh(self, now: float) -> list[CellSummary]:
        """Of the cells that are heard, by their number."""
        known = sorted(self.cells.items())
        return [cell.summary for _, cell in known if now - cell.heard_at < STALE_SECONDS]

    def mine(self, name: str, now: float) -> bool:
        """Whether this decides about a worker now: it is heard of, not drained, and has no grant by hand or of another
        job.
        """
        lender, told = self.lenders.get(name), self.leased.get(name)
        if lender is None or name in self.by_hand or name in self.drained or now - lender.heard_at >= STALE_SECONDS:
            return False
        return told is None or told.grant.job == self.job or not told.grant.lend or now >= told.runs_out()

    def lending(self, now: float) -> list[str]:
        """Those that count for the cap: told to lend by this or by hand, and heard of, or their lease still holds."""
        return [name for name in dict.fromkeys((*self.lenders, *self.leased)) if self._counts(name, now)]

    def _counts(self, name: str, now: float) -> bool:
        if name in self.drained:
            return False
        lender, told = self.lenders.get(name), self.leased.get(name)
        out = told is not None and told.grant.lend and told.grant.job == self.job and now < told.runs_out()
        if lender is None:
            return out
        if name in self.by_hand:
            return out or self.by_hand[name].lend
        return bool(lender.lends) or (out and not self.mine(name, now))

    def _heard(self, line: ExecutorLine, cell: int, now: float) -> None:
        lender = self.lenders.get(line.worker)
        if lender is None:
            lender = self.lenders[line.worker] = Lender(line, cell, now)
        lender.heard(line, cell, now, anew=now - lender.heard_at >= STALE_SECONDS)
        if lender.asked_at is None:
            return
        if lender.built_at is None and line.state is not ExecutorState.PAUSED:
            lender.built_at = now
            self.learned.wake.saw(line.worker, now - lender.asked_at)
        if line.open and lender.built_at is not None:
            self.learned.catch_up.saw(line.worker, now - lender.built_at)
            lender.asked_at, lender.failures = None, 0

    def _forget(self, now: float) -> None:
        gone = [name for name, lender in self.lenders.items() if now - lender.heard_at >= FORGET_SECONDS]
        for name in gone:
            del self.lenders[name]
        for name in (*gone, *self.moves.forget(now)):
            self.learned.forget(name)

    def _look_at(self, name: str, lender: Lender, now: float) -> None:
        """What follows for one worker alone."""
        if not self.mine(name, now):
            ends = lender.renewed_at is None or now >= lender.renewed_at + self.config.lease_seconds + GRACE_SECONDS
            if lender.lends and (ends or now - lender.heard_at < STALE_SECONDS):
                lender.lends = None
        elif lender.lends is None:
            self._adopt(name, lender, now)
        elif lender.lends and lender.missed_since is not None:
            patience = max(LEAST_PATIENCE_SECONDS, 4 * self._delay(name, lender, lender.missed_since))
            if now - lender.missed_since >= patience:
                lender.given_up(now)
                why = "has taken no turns for" if lender.asked_at is None else "did not come in"
                self._park(lender, f"it {why} {patience:.0f} s; it is {lender.line.state.value}", now)

    def _adopt(self, name: str, lender: Lender, now: float) -> None:
        """A worker is met: it goes on as it is."""
        told = self.leased.get(name)
        if told is not None and told.grant.lend and told.grant.job == self.job:
            lender.decide(True, "it was to lend before", now)
        elif told is None and (lender.line.open or lender.line.held_turns):
            lender.decide(True, "it lent already", now)
        else:
            lender.decide(False, "no work has waited for it", now)
            lender.since = now - self.config.dwell_seconds  # nobody has parked it: it may be woken at once

    def _park(self, lender: Lender, reason: str, now: float) -> None:
        self.parked += 1
        lender.decide(False, reason, now)

    def _park_useless(self, number: int, now: float) -> None:
        """Note which lenders of a cell are of no use, and park those that were not for long enough."""
        summary, shares = self.cells[number].summary, self._shares(number, now)
        free = [(each.free_turns, each.free_tokens) for each in summary.executors if each.worker in shares]
        turns, tokens = (sum(column) for column in zip(*free, strict=True)) if free else (0, 0)
        rest = Rest(shares, Flow(shares.values()), summary.waiting_turns, turns, tokens)
        done, soon, idle = finish_seconds(shares.values(), rest.turns), self.config.margin_seconds / 2, False
        for name, lender in sorted(self._of(number, now), key=lambda each: (each[1].parks_at, each[0])):
            if not lender.lends:
                continue
            if rest.needs(name, lender.line, soon):
                lender.useless_since, lender.reason = None, _needed(lender.line, summary.waiting_turns, done, soon)
                continue
            lender.useless_since = now if lender.useless_since is None else lender.useless_since
            useless = now - lender.useless_since
            if idle and lender.line.held_turns:
                lender.reason = f"of no use for {useless:.0f} s; it runs turns, and one that runs none is parked first"
            elif now - lender.since < self.config.dwell_seconds or useless < self.config.idle_seconds:
                lender.reason = f"of no use for {useless:.0f} s, and not for long enough"
                idle = idle or not lender.line.held_turns
            else:
                rest.leave(name, lender.line)
                self._park(lender, f"of no use for {useless:.0f} s", now)

    def _room(self, now: float) -> float:
        """How many more may lend."""
        most = self.config.most_lenders
        return most - len(self.lending(now)) if most else math.inf

    def _keep_cap(self, now: float) -> None:
        """Park those over the cap. Who was not heard since the start does not put them there: whoever granted it kept
        the cap, and its lease may have run out long ago.
        """
        lending, most = [name for name in self.lending(now) if name in self.lenders], self.config.most_lenders
        over = len(lending) - most if most else 0
        mine = sorted((self.lenders[name].parks_at, name) for name in lending if self.mine(name, now))
        for _, name in mine[: max(0, over)]:
            self._park(self.lenders[name], f"more than {most} would lend", now)

    def _wake(self, number: int, now: float) -> None:
        """Wake those of a cell that are worth it, whose users ask least first."""
        turns, shares = self.cells[number].summary.waiting_turns, self._shares(number, now)
        room = self._room(now)
        if not turns or room <= 0:
            return
        flow, woken = Flow(shares.values()), list[Lender]()
        without = finish_seconds(shares.values(), turns)
        for name, lender in sorted(self._of(number, now), key=lambda each: (each[1].busy, each[0])):
            rested = now - lender.since >= self.config.dwell_seconds and now >= lender.held_until
            if lender.lends or not rested or lender.line.serving_waiting:
                continue
            share = Share(self._delay(name, lender, now), self.learned.turns_per_second(name))
            margin = self.config.margin_seconds
            first_of_all = without == math.inf and not woken
            if first_of_all or flow.done_by(share.free_at + margin) + share.rate * margin < turns:
                flow.add(share)
                shares[name] = share
                woken.append(lender)
                if len(woken) == room:
                    break
        done = finish_seconds(shares.values(), turns)
        others = f" and {len(woken) - 1} more" if len(woken) > 1 else ""
        for lender in woken:
            reason = f"{turns} turns wait: done {_in(done)} with it{others}, {_in(without)} without"
            lender.decide(True, reason, now)
        self.woken += len(woken)

    def _moved(self, now: float) -> list[CapacityGrant]:
        """What is said of a worker's cell, if anything."""
        fresh = self.fresh(now)
        if all(each.cells == 1 for each in fresh):
            return []
        named = Counter(line.worker for each in fresh for line in each.executors)
        room = self._room(now) > 0
        crews: dict[int, Crew] = {}
        for each in fresh:
            shares = self._shares(each.cell, now)
            once = [line for line in each.executors if named[line.worker] == 1]
            spare = {line.worker: line for line in once if self._may_go(line, shares, now, room=room)}
            crews[each.cell] = Crew(each, shares, spare)
        move = self.moves.decide(crews, now)
        if move is None:
            return []
        said = CapacityGrant(
            worker=move.worker,
            lend=True,
            kv_bytes=0,
            token_budget=0,
            granted_at=now,
            reason=move.reason,
            job=self.job,
            cell=move.cell,
        )
        return [said]

    def _may_go(self, line: ExecutorLine, shares: Container[str], now: float, *, room: bool) -> bool:
        """Whether one may be told of another cell. `room`: one lender more may lend."""
        if line.worker in self.drained or line.worker in self.by_hand:
            return False
        lender = self.lenders.get(line.worker) if line.serving and line.by_grant else None
        if lender is None or lender.lends:
            return line.open and line.worker in shares
        waked = room and now >= lender.held_until and not line.serving_waiting
        return lender.lends is False and waked and self.mine(line.worker, now)

    def _of(self, number: int, now: float) -> Iterable[tuple[str, Lender]]:
        """The lenders in a cell's newest summary that this decides about."""
        heard_at = self.cells[number].heard_at
        return [
            (name, lender)
            for name, lender in self.lenders.items()
            if lender.cell == number and lender.heard_at >= heard_at and self.mine(name, now)
        ]

    def _shares(self, number: int, now: float) -> dict[str, Share]:
        """Who takes part in a cell's work: who is open and is not to park, and who was woken."""
        shares: dict[str, Share] = {}
        for line in self.cells[number].summary.executors:
            lender = self.lenders.get(line.worker) if line.serving and line.by_grant else None
            if lender is None or not self.mine(line.worker, now):
                takes_part = line.open
            else:
                takes_part = bool(lender.lends) and (line.open or lender.asked_at is not None)
            if takes_part:
                comes = lender is not None and not line.open
                free_at = self._delay(line.worker, lender, now) if comes and lender else line.load_seconds
                shares[line.worker] = Share(free_at, self.learned.turns_per_second(line.worker))
        return shares

    def _delay(self, name: str, lender: Lender, now: float) -> float:
        """Seconds from now until a worker is open, if it is woken now or was before."""
        whole = self.learned.wake.expected(name) + self.learned.catch_up.expected(name)
        return whole if lender.asked_at is None else max(0.0, whole - (now - lender.asked_at))

    def _told(self, name: str, now: float) -> CapacityGrant | None:
        """The grant that is due, if any; it counts as on the log."""
        lender, told = self.lenders[name], self.leased.get(name)
        if lender.lends is None or not self.mine(name, now):
            return None
        if lender.lends:
            if lender.renewed_at is not None and now - lender.renewed_at < self.config.lease_seconds / RENEWALS:
                return None
            lender.renewed_at = now
        elif told is not None and told.grant.job == self.job and not told.grant.lend:
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
        self.leased[name] = Told(grant, now)
        return grant


def _needed(line: ExecutorLine, waiting: int, done: float, soon: float) -> str:
    """Why one goes on lending. `done`: seconds until all that waits is; `soon`: those in which all should be."""
    if waiting:
        return f"{waiting} turns wait: done {_in(done)} with all that lend"
    return f"it runs {line.held_turns} turns, and the others have no room for them or take longer than {soon:g} s"


def _in(seconds: float) -> str:
    return "never" if seconds == math.inf else f"in {seconds:.0f} s"
