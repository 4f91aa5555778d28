"""The waiting work by home, cell and inbox, from the log and the broker's answers. Pure.

Keeps true
- A home is stalled from the time when its work was there, its owner had room for the work, and no work of that kind was
  taken. A condition that held at the first answer may have held for long: timestamps bound how long.
- Homes of one worker with waiting prompts compete for the worker's window: while the worker opens groups of one home,
  the others wait.
- An inbox counts as unread from the time when it got a record until its executor holds a turn or has ended one.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rose.pipeline.monitor.facts import CellFacts, ExecutorFacts, HomeFacts, StalledWork
from rose.pipeline.monitor.run_state import RunState
from rose.pipeline.monitor.stage_clock import ConditionTimer, Stage
from rose.topics.catalog import DISPATCHED, partitions_of_cell

if TYPE_CHECKING:
    from rose.pipeline.monitor.broker_probe import BrokerSnapshot, WorkerMember

STALE_SECONDS = 10.0
"""Age in seconds above which the broker's answers are not used for homes."""


@dataclass(slots=True)
class Backlog:
    """The waiting work of a run. Give it the broker's snapshots as they arrive."""

    view: RunState
    window_groups: int
    """Maximum number of open groups of one worker."""
    cells: int = 1
    began: float = 0.0
    """When the broker answered first."""
    _snapshot: "BrokerSnapshot | None" = None
    _asked_at: float = 0.0
    """When the broker answered last."""
    _owned: ConditionTimer = field(default_factory=ConditionTimer)
    """Pairs of home and name of the worker that owns it."""
    _roomy: ConditionTimer = field(default_factory=ConditionTimer)
    """Homes whose worker has room in its window."""
    _unreadable: ConditionTimer = field(default_factory=ConditionTimer)
    """Homes whose prompts are behind an open transaction."""
    _prompts: ConditionTimer = field(default_factory=ConditionTimer)
    """Homes with waiting prompts."""
    _results: ConditionTimer = field(default_factory=ConditionTimer)
    """Homes with waiting results."""
    _sent: dict[int, tuple[float, float]] = field(default_factory=dict)
    """The times of the two answers between which an inbox last got a record, by inbox."""
    _unread: dict[str, float] = field(default_factory=dict)
    """Time since which the inbox has unread records, by executor."""

    def on_snapshot(self, snapshot: "BrokerSnapshot", now: float) -> None:
        """Fold a snapshot of the broker."""
        before, self._snapshot = self._snapshot, snapshot
        if before is None:
            self.began = self._asked_at = now
        else:
            got = (place for place, end in snapshot.ends.items() if end > before.ends.get(place, end))
            self._sent.update({slot: (self._asked_at, now) for topic, slot in got if topic is DISPATCHED})
        groups = self.view.open_groups_by_home()
        able = [each for each in snapshot.workers if sum(groups[home] for home in each.homes) < self.window_groups]
        self._owned.set_active([(home, each.name) for each in snapshot.workers for home in each.homes], now)
        self._roomy.set_active([home for each in able for home in each.homes], now)
        self._unreadable.set_active(snapshot.held_at, now)
        self._prompts.set_active(snapshot.waiting_at, now)
        self._results.set_active(snapshot.results_at, now)
        self._unread = dict(self._unread_now())
        self._asked_at = now

    def add_absence(self, seconds: float) -> None:
        """Move all times forward: the reader did not read for `seconds` until now."""
        for held in (self._owned, self._roomy, self._unreadable, self._prompts, self._results):
            held.add_absence(seconds)
        self._sent = {slot: (since + seconds, at + seconds) for slot, (since, at) in self._sent.items()}
        self._unread = {worker: at + seconds for worker, at in self._unread.items()}
        self.began, self._asked_at = self.began + seconds, self._asked_at + seconds

    @property
    def openable(self) -> int:
        """Number of prompts that wait for a worker with room in its window."""
        waiting = self._snapshot.waiting_at if self._snapshot else {}
        return sum(count for home, count in waiting.items() if self._roomy.is_active(home))

    def held_homes(self) -> list[int]:
        """The homes whose prompts cannot be read because of an open transaction."""
        return sorted(self._snapshot.held_at) if self._snapshot else []

    def held_seconds(self, now: float) -> float:
        """Longest time for which a home was seen to be held by an open transaction."""
        return max((self._unreadable.seen_seconds(home, now) for home in self.held_homes()), default=0.0)

    def homes(self, now: float, *, later: float = 0.0) -> Iterator[HomeFacts]:
        """The homes that have an owner and waiting work; `later` as in `RunFollower.facts`."""
        if self._snapshot is None or now - self._asked_at > STALE_SECONDS:
            return
        live, then = self.view.live_by_home(), now + later
        for owner in self._snapshot.workers:
            idle = self.view.stage_clock.seconds_still(then, Stage.OPENED, Stage.APPLIED, homes=owner.homes)
            for home in sorted(owner.homes):
                prompts = self._prompts_of(owner, home, then)
                results = self._results_of(owner, home, then) if live[home] else None  # else no result is of use
                if prompts is not None or results is not None:
                    yield HomeFacts(home=home, worker=owner.name, idle_seconds=idle, prompts=prompts, results=results)

    def executors(self, now: float, *, later: float = 0.0) -> list[ExecutorFacts]:
        """The executors with the unread time of their inboxes; `later` as in `RunFollower.facts`."""
        unread = {worker: max(0.0, now + later - at) for worker, at in self._unread.items()}
        return [replace(each, unread_seconds=unread.get(each.worker, 0.0)) for each in self.view.present_executors(now)]

    def cell_facts(self, executors: Sequence[ExecutorFacts], now: float, *, later: float = 0.0) -> Iterator[CellFacts]:
        """The facts of each cell if there are several; `later` as in `RunFollower.facts`."""
        if self.cells == 1 or self._snapshot is None:
            return
        live, then = self.view.live_by_home(), now + later
        for cell in range(self.cells):
            homes = partitions_of_cell(cell, self.cells, self.view.homes)
            there = [each for each in executors if each.slot % self.cells == cell]
            sent = [at for slot, (_, at) in self._sent.items() if slot % self.cells == cell]
            able = self.view.able_seconds(now, {each.worker for each in there})
            yield CellFacts(
                cell=cell,
                executors=there,
                in_a_turn=sum(live[home] for home in homes),
                results_waiting=sum(self._snapshot.results_at.get(home, 0) for home in homes),
                applied_seconds=self.view.stage_clock.seconds_still(then, Stage.APPLIED, homes=homes),
                dispatched_seconds=then - max(sent, default=self.began),
                able_seconds=able + later if able else 0.0,
            )

    def _prompts_of(self, owner: "WorkerMember", home: int, now: float) -> StalledWork | None:
        assert self._snapshot is not None
        if home not in self._snapshot.waiting_at or not self._roomy.is_active(home):
            return None
        moments, stamp = self.view.stage_clock, self._snapshot.waiting_stamps.get(home)
        rivals = [other for other in owner.homes if other in self._snapshot.waiting_at]
        opened = moments.seconds_still(now, Stage.OPENED, homes=rivals)
        made_room = moments.seconds_still_before(now, Stage.SETTLED, homes=owner.homes)
        room = self._roomy.most_seconds(home, now)
        return StalledWork(
            count=self._snapshot.waiting_at[home],
            seconds=min(
                opened,
                room if made_room is None else min(room, max(made_room, self._roomy.seen_seconds(home, now))),
                self._owned.most_seconds((home, owner.name), now),
                self._waited(self._prompts, home, stamp, now),
            ),
            seen_seconds=min(self._roomy.seen_seconds(home, now), self._seen(self._prompts, owner, home, now)),
        )

    def _results_of(self, owner: "WorkerMember", home: int, now: float) -> StalledWork | None:
        assert self._snapshot is not None
        if home not in self._snapshot.results_at:
            return None
        return StalledWork(
            count=self._snapshot.results_at[home],
            seconds=min(
                self.view.stage_clock.seconds_still(now, Stage.APPLIED, homes=(home,)),
                self._owned.most_seconds((home, owner.name), now),
                self._waited(self._results, home, self._snapshot.results_stamps.get(home), now),
            ),
            seen_seconds=self._seen(self._results, owner, home, now),
        )

    def _waited(self, waits: ConditionTimer, home: int, stamp: float | None, now: float) -> float:
        """Return the longest time for which work may have waited in the home; `stamp` is that of the oldest record."""
        by_stamp = math.inf if stamp is None else self.view.stage_clock.since_stamp(now, stamp)
        return min(waits.most_seconds(home, now), max(by_stamp, waits.seen_seconds(home, now)))

    def _seen(self, waits: ConditionTimer, owner: "WorkerMember", home: int, now: float) -> float:
        """Return for how long work was seen to wait in the home under this owner."""
        return min(waits.seen_seconds(home, now), self._owned.seen_seconds((home, owner.name), now))

    def _unread_now(self) -> Iterator[tuple[str, float]]:
        slots = [state.heartbeat.slot for state in self.view.executors.values()]
        for worker, state in self.view.executors.items():
            since, at = self._sent.get(state.heartbeat.slot, (-math.inf, -math.inf))
            alone = slots.count(state.heartbeat.slot) == 1  # else the executor that should read is unknown
            if alone and state.took_at < since and state.able_at <= at:
                yield worker, self._unread.get(worker, at)
