"""The process that plays a fleet of emulated executors on a real bus: one thread for all of them.

    python -m bench.fleet.fleet PLAN       (as `bench.elastic` starts it)

Keeps true
- Each executor has an inbox, incarnations, heartbeats and turns of its own, as if it were a process. What they share is
  librdkafka's clients, the thread that follows grants, and the contexts that any of them has served (what a turn that
  moves reads back is `bench.contexts`' to measure).
- `go` on standard input begins the clock of users and of what is done to executors; its end, or SIGTERM, has all of
  them stop as executors do.
- What happened is in the journal, a JSON line each, when it ends.

It decides nothing: `executor` does. Killed is an executor that falls silent with all that it held; frozen one that does
nothing until it is thawed, and then goes on with what came meanwhile.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread

import msgspec

from bench.fleet.engine import Lengths
from bench.fleet.executor import Back, FleetExecutor, Note, Said, Terms, Wanted
from bench.fleet.users import Pace, Step, Users, users_of
from rose.pipeline.process_setup import stop_on_signals
from rose.schemas.contexts import ContextMissing
from rose.schemas.grants import CapacityGrant, GrantSource, parse_grant_key
from rose.schemas.heartbeats import SlackHeartbeat
from rose.schemas.turns import FENCING_KEY, TurnDispatch, TurnOutcome, TurnResult
from rose.topics.catalog import COMPLETED, DISPATCHED, GRANTS, HEARTBEATS
from rose.topics.reader import Reader
from rose.topics.records import Envelope, Item
from rose.topics.settings import BusSettings
from rose.topics.table_follower import TableFollower
from rose.topics.writer import Writer
from rose.workers.executor.cell_membership import INCARNATION_RANDOM_BITS
from rose.workers.executor.contexts import ContextStore
from rose.workers.executor.grants import Lease
from rose.workers.executor.loop import INBOX_BATCH
from rose.workers.lender.kv_budget import KvBudget, KvLimits
from rose.workers.loadgen.traces import read_trace

STEP_SECONDS = 0.04
"""Between two looks at each executor: turns end, users come and leases end within it."""

NAME = "emulated-fleet"

NOBODY = Step(0.0, 0, 0)

BLOCK_TOKENS = 16


class Act(Enum):
    """What is done to an executor."""

    START = "start"
    STOP = "stop"
    KILL = "kill"
    """It falls silent."""
    FREEZE = "freeze"
    THAW = "thaw"


class Deed(msgspec.Struct, frozen=True, kw_only=True):
    """One of them; left out where it cannot be done."""

    at: float
    """Seconds after `go`."""
    worker: str
    act: Act


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """Whom lenders serve, and with what."""

    trace: str
    pace: Pace
    speed: float
    """Seconds of the trace in each second."""
    kv_bytes: int
    """Of both tenants; a token of serving's takes one."""
    headroom: float
    """Share of them that is left free for serving, as in `rose.workers.lender.config`."""
    quiet_seconds: float
    """Of the trace: so long after a cut a guest may grow again."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet, from its start to its end."""

    bus: BusSettings
    job: str
    """That lenders lend to."""
    executors: tuple[Terms, ...]
    """Those that are there from the start, and those that deeds start."""
    lengths: Lengths
    serving: Serving | None = None
    """None where nobody lends."""
    deeds: tuple[Deed, ...] = ()
    journal: str


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """Of the journal: what became of one executor, or of all at the end."""

    worker: str
    what: str
    at: float
    since: float = 0.0
    reason: str = ""


Taking = Callable[[FleetExecutor, float], Sequence[Said]]
"""Something that an executor takes in at a moment."""


@dataclass(slots=True, eq=False)
class Seat:
    """The place of one executor, whether it is there or not."""

    terms: Terms
    users: Users | None
    executor: FleetExecutor | None = None
    frozen: bool = False
    missed: "list[Taking]" = field(default_factory=list)
    """What came while it was frozen."""
    looked_at: float = 0.0
    """Unix seconds."""


class Fleet:
    """All of them, and what they share."""

    def __init__(self, plan: Plan) -> None:
        """Raises TraceError, TopicMissing or BusError."""
        self._plan = plan
        self._began = time.time() - time.monotonic()
        self._gone_at: float | None = None
        lenders = [terms for terms in plan.executors if terms.lends]
        self._users = _users_of(plan.serving, len(lenders))
        by_name = dict(zip((terms.name for terms in lenders), self._users, strict=True))
        self._seats = {terms.name: Seat(terms, by_name.get(terms.name)) for terms in plan.executors}
        self._by_slot: dict[int, list[Seat]] = {}
        for seat in self._seats.values():
            self._by_slot.setdefault(seat.terms.slot, []).append(seat)
        self._deeds = sorted(plan.deeds, key=lambda deed: -deed.at)
        self._lines: list[Line] = []
        self._starts = count()
        self._turns = dict.fromkeys(TurnOutcome, 0)
        self._contexts = ContextStore(plan.bus, NAME)
        self._writer = Writer(plan.bus, NAME)
        self._reader = Reader(plan.bus, NAME)
        self._reader.assign(
            {(DISPATCHED, slot): self._reader.watermarks((DISPATCHED, slot))[1] for slot in self._by_slot}
        )
        self._grants: SimpleQueue[tuple[Envelope, bool]] = SimpleQueue()
        self._following = TableFollower(
            plan.bus, GRANTS, f"{NAME}-grants", lambda item, seen: self._grants.put((item, seen))
        )

    def run(self, go: Event, stop: Event, ready: Callable[[], None]) -> None:
        """Until `stop` is set. `ready` is called once all are there that begin with it."""
        first = {deed.worker: deed.act for deed in self._deeds}  # the earliest one of each comes last
        for name, seat in self._seats.items():
            if first.get(name) is not Act.START:
                self._start(seat)
        self._writer.flush()
        ready()
        step_at = 0.0
        while not stop.is_set():
            self._take(self._reader.read(INBOX_BATCH, max(0.0, step_at - self._now())))
            if go.is_set() and self._gone_at is None:
                self._gone_at = self._now()
                self._turns = dict.fromkeys(TurnOutcome, 0)
            now = self._now()
            if now >= step_at:
                step_at = now + STEP_SECONDS
                self._do(now)
                self._hear_grants()
                for seat in self._seats.values():
                    self._look(seat, now)
            for dispatch, context, _ in self._contexts.take_found():
                self._deliver(self._seats[dispatch.worker], partial(_context, dispatch, context))
            self._writer.poll()
        self._end()

    def _now(self) -> float:
        """Unix seconds that never jump."""
        return self._began + time.monotonic()

    def _start(self, seat: Seat) -> None:
        """Mark the start in its inbox; it is there once that is on the log."""
        terms = seat.terms

        def marked(_: int, offset: int) -> None:
            now = self._now()
            incarnation = offset << INCARNATION_RANDOM_BITS | next(self._starts)
            lends = terms.lends and self._plan.serving is not None
            lease = Lease(self._plan.job, grant_required=True) if lends else None
            memory = memory_of(terms, self._plan.serving) if lends and self._plan.serving else None
            seat.executor = FleetExecutor(terms, self._plan.lengths, incarnation, now, lease=lease, memory=memory)
            seat.frozen, seat.looked_at = False, now
            seat.missed.clear()
            self._note(terms.name, Act.START.value, now)

        self._writer.tombstone(DISPATCHED, key=terms.name, partition=terms.slot, on_delivery=marked)

    def _do(self, now: float) -> None:
        """What is due to be done to executors."""
        while self._deeds and self._gone_at is not None and self._gone_at + self._deeds[-1].at <= now:
            deed = self._deeds.pop()
            seat = self._seats[deed.worker]
            if deed.act is Act.START and seat.executor is None:
                self._start(seat)
            elif deed.act is not Act.START and seat.executor is not None:
                self._do_to(seat, seat.executor, deed.act, now)

    def _do_to(self, seat: Seat, executor: FleetExecutor, act: Act, now: float) -> None:
        self._note(seat.terms.name, act.value, now)
        if act is Act.FREEZE:
            seat.frozen = True
        elif act is Act.KILL:
            seat.executor = None
        else:  # who is to stop is thawed for it, as a process is
            if seat.frozen:
                seat.frozen, seat.looked_at, missed = False, now, [*seat.missed]
                seat.missed.clear()
                for take in missed:
                    self._carry(seat, take(executor, now))
            if act is Act.STOP:
                self._leave(seat, executor, now)

    def _leave(self, seat: Seat, executor: FleetExecutor, now: float) -> None:
        *back, last = executor.stop(now)
        self._carry(seat, back)
        self._writer.flush()  # its last heartbeat lists answers that are on the log
        self._carry(seat, [last])
        seat.executor = None

    def _take(self, items: Iterable[Item]) -> None:
        for item in items:
            if not isinstance(item, Envelope):
                continue
            record, offset = item.record, item.offset
            if isinstance(record, TurnDispatch):
                if (seat := self._seats.get(record.worker)) is not None:
                    self._deliver(seat, partial(_dispatched, record, offset))
            elif item.key == FENCING_KEY:
                for seat in self._by_slot[item.partition]:
                    self._deliver(seat, partial(_claimed, offset))

    def _hear_grants(self) -> None:
        while True:
            try:
                item, seen = self._grants.get_nowait()
            except Empty:
                return
            worker, voice = parse_grant_key(item.key)
            seat = self._seats.get(worker)
            grant = item.record if isinstance(item.record, CapacityGrant) else None
            if seat is not None and seat.terms.lends and voice is not None:
                self._deliver(seat, partial(_granted, grant, voice, seen))

    def _deliver(self, seat: Seat, take: Taking) -> None:
        """Have the executor take something in, now or once it is thawed."""
        if seat.executor is not None and seat.frozen:
            seat.missed.append(take)
        elif seat.executor is not None:
            self._carry(seat, take(seat.executor, self._now()))

    def _look(self, seat: Seat, now: float) -> None:
        if seat.executor is None or seat.frozen:
            return
        since, seat.looked_at = seat.looked_at, now
        users, idle = NOBODY, now - since
        if seat.users is not None and self._gone_at is not None:
            users = seat.users.at(now - self._gone_at)
            users = users._replace(at=users.at + self._gone_at)
            idle = seat.users.idle(max(0.0, since - self._gone_at), now - self._gone_at)
        self._carry(seat, seat.executor.step(users, idle, now))

    def _carry(self, seat: Seat, said: Iterable[Said]) -> None:
        """Out of the core, onto the bus and into the journal."""
        for each in said:
            match each:
                case TurnResult():
                    self._write(each)
                case SlackHeartbeat():
                    self._writer.write(HEARTBEATS, each, key=seat.terms.name, partition=0)
                case Wanted(dispatch):
                    context = self._contexts.find(dispatch)
                    if context is not None:
                        self._deliver(seat, partial(_context, dispatch, context))
                case Back(results, note):
                    left = iter(range(len(results) - 1, -1, -1))
                    for result in results:
                        self._write(result, partial(self._answered, seat.terms.name, note, left))
                case Note():
                    self._note(seat.terms.name, each.what.value, each.at, each.since, each.reason)

    def _answered(self, worker: str, note: Note, left: Iterator[int], *_: int) -> None:
        """One of those that had to go is on the log."""
        if next(left) == 0:
            self._note(worker, note.what.value, self._now(), note.since, note.reason)

    def _write(self, result: TurnResult, on_delivery: Callable[[int, int], None] | None = None) -> None:
        self._turns[result.outcome] += 1
        name = result.trajectory_id
        self._writer.write(
            COMPLETED, result, key=name, partition=result.home, trajectory_id=name, on_delivery=on_delivery
        )

    def _note(self, worker: str, what: str, at: float, since: float = 0.0, reason: str = "") -> None:
        self._lines.append(Line(worker=worker, what=what, at=at, since=since, reason=reason))

    def _end(self) -> None:
        """All of them stop, and the journal is written."""
        now = self._now()
        for seat in self._seats.values():
            if seat.executor is not None:
                self._do_to(seat, seat.executor, Act.STOP, now)
        self._writer.flush()
        for outcome, many in self._turns.items():
            self._note(NAME, outcome.value, now, reason=str(many))
        Path(self._plan.journal).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in self._lines))
        self._following.stop()
        self._contexts.close()
        self._writer.close()
        self._reader.close()


def _dispatched(dispatch: TurnDispatch, offset: int, executor: FleetExecutor, now: float) -> Sequence[Said]:
    return executor.dispatched(dispatch, offset, now)


def _context(
    dispatch: TurnDispatch, context: bytes | ContextMissing, executor: FleetExecutor, now: float
) -> Sequence[Said]:
    return executor.context(dispatch, context, now) if dispatch.incarnation == executor.incarnation else ()


def _claimed(claim: int, executor: FleetExecutor, _: float) -> Sequence[Said]:
    executor.claimed(claim)
    return ()


def _granted(
    grant: CapacityGrant | None, voice: GrantSource, seen: bool, executor: FleetExecutor, now: float
) -> Sequence[Said]:
    return executor.granted(grant, now, voice=voice, seen=seen)


def _users_of(serving: Serving | None, lenders: int) -> Sequence[Users]:
    if serving is None or not lenders:
        return ()
    return users_of(read_trace(serving.trace), serving.pace, workers=lenders, speed=serving.speed)


def memory_of(terms: Terms, serving: Serving) -> KvBudget:
    """How a lender shares its KV memory with its users."""
    pool = terms.rates.kv_tokens * terms.kv_bytes_per_token
    bounds = KvLimits(
        total_bytes=serving.kv_bytes,
        pool_bytes=pool,
        block_bytes=BLOCK_TOKENS * terms.kv_bytes_per_token,
        headroom_bytes=int(serving.headroom * serving.kv_bytes),
        quiet_seconds=serving.quiet_seconds / serving.speed,
        piece_bytes=pool,
        transferable=True,
    )
    return KvBudget(bounds)


def main() -> None:
    """See the module."""
    plan = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Plan)
    go, stop = Event(), stop_on_signals()

    def heed() -> None:
        for line in sys.stdin:
            if line.strip() == "go":
                go.set()
        stop.set()

    Thread(target=heed, daemon=True).start()
    Fleet(plan).run(go, stop, lambda: print("ready", flush=True))


if __name__ == "__main__":
    main()
