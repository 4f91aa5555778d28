"""The process that runs a fleet of emulated executors on a real bus, with one thread for all executors.

    python -m bench.fleet.fleet PLAN       (as `bench.elastic` starts it)

Keeps true
- Each executor has its own inbox, incarnations, heartbeats and turns, as a process has. All executors share
  librdkafka's clients, the thread that follows grants, and the contexts that any executor has served (`bench.contexts`
  measures the read-back of moved turns).
- `go` on standard input starts the clock of users and of actions on executors. The end of the input, or SIGTERM, stops
  all executors in the regular way.
- At its end the process writes the journal, with one line of JSON for each event.

All decisions are in `executor`. A killed executor falls silent with all its turns. A frozen executor does nothing until
it is thawed, and then takes in everything that arrived in the meantime.
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
from bench.fleet.executor import ContextRequest, ExecutorSpec, FleetExecutor, Note, Output, ReturnedTurns
from bench.fleet.users import ServingRates, Step, Users, users_of
from rose.pipeline.process_setup import stop_on_signals
from rose.schemas.grants import CapacityGrant, GrantSource, parse_grant_key
from rose.schemas.heartbeats import SlackHeartbeat
from rose.schemas.turns import FENCING_KEY, ContextMissing, TurnDispatch, TurnOutcome, TurnResult
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
"""Time between two looks at each executor, in which turns end, users come and go, and leases end."""

NAME = "emulated-fleet"

NOBODY = Step(0.0, 0, 0)

BLOCK_TOKENS = 16


class Action(Enum):
    """An action on an executor."""

    START = "start"
    STOP = "stop"
    KILL = "kill"
    """The executor falls silent."""
    FREEZE = "freeze"
    THAW = "thaw"


class PlannedAction(msgspec.Struct, frozen=True, kw_only=True):
    """One planned action; it is skipped if it is impossible."""

    at: float
    """Seconds after `go`."""
    worker: str
    action: Action


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """The users of lenders, and the lenders' memory."""

    trace: str
    rates: ServingRates
    speed: float
    """Seconds of the trace in each second."""
    kv_bytes: int
    """KV memory of serving and guest; a token of serving takes one byte."""
    headroom: float
    """Share of the KV memory that is left free for serving, as in `rose.workers.lender.config`."""
    quiet_seconds: float
    """Time after a cut before a guest may grow again, in seconds of the trace."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet, from its start to its end."""

    bus: BusSettings
    job: str
    """Job to which lenders lend."""
    executors: tuple[ExecutorSpec, ...]
    """All executors: the ones that run from the start, and the ones that actions start."""
    lengths: Lengths
    serving: Serving | None = None
    """None if no executor lends."""
    actions: tuple[PlannedAction, ...] = ()
    journal: str


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the journal: one event of one executor, or of all executors at the end."""

    worker: str
    what: str
    at: float
    since: float = 0.0
    reason: str = ""


Taking = Callable[[FleetExecutor, float], Sequence[Output]]
"""Input of an executor at a time."""


@dataclass(slots=True, eq=False)
class Member:
    """One executor of the plan, running or not."""

    spec: ExecutorSpec
    users: Users | None
    executor: FleetExecutor | None = None
    frozen: bool = False
    missed: "list[Taking]" = field(default_factory=list)
    """Inputs that arrived while it was frozen."""
    looked_at: float = 0.0
    """Time of the last look, in unix seconds."""


class Fleet:
    """All executors, and the parts that they share."""

    def __init__(self, plan: Plan) -> None:
        """Prepare the fleet. Raises TraceError, TopicMissing or BusError."""
        self._plan = plan
        self._began = time.time() - time.monotonic()
        self._gone_at: float | None = None
        lenders = [spec for spec in plan.executors if spec.lends]
        self._users = _users_of(plan.serving, len(lenders))
        by_name = dict(zip((spec.name for spec in lenders), self._users, strict=True))
        self._members = {spec.name: Member(spec, by_name.get(spec.name)) for spec in plan.executors}
        self._by_slot: dict[int, list[Member]] = {}
        for member in self._members.values():
            self._by_slot.setdefault(member.spec.slot, []).append(member)
        self._actions = sorted(plan.actions, key=lambda planned: -planned.at)
        self._lines: list[Line] = []
        self._starts = count()
        self._turns = dict.fromkeys(TurnOutcome, 0)
        self._prompts: dict[str, int] = {}
        """Tokens of the prompt of each group."""
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
        """Run until `stop` is set. `ready` is called once all initial executors run."""
        # The actions are sorted in reverse, so the earliest action of each worker wins.
        first = {planned.worker: planned.action for planned in self._actions}
        for name, member in self._members.items():
            if first.get(name) is not Action.START:
                self._start(member)
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
                self._read_grants()
                for member in self._members.values():
                    self._look(member, now)
            for dispatch, context, _ in self._contexts.take_found():
                self._deliver(self._members[dispatch.worker], partial(_context, dispatch, context))
            self._writer.poll()
        self._end()

    def _now(self) -> float:
        """Return unix seconds that never jump."""
        return self._began + time.monotonic()

    def _start(self, member: Member) -> None:
        """Write the executor's start to its inbox; the executor runs once the start is on the log."""
        spec = member.spec

        def marked(_: int, offset: int) -> None:
            now = self._now()
            incarnation = offset << INCARNATION_RANDOM_BITS | next(self._starts)
            lends = spec.lends and self._plan.serving is not None
            lease = Lease(self._plan.job, grant_required=True) if lends else None
            memory = memory_of(spec, self._plan.serving) if lends and self._plan.serving else None
            member.executor = FleetExecutor(
                spec, self._plan.lengths, incarnation, now, lease=lease, memory=memory, prompts=self._prompts
            )
            member.frozen, member.looked_at = False, now
            member.missed.clear()
            self._note(spec.name, Action.START.value, now)

        self._writer.tombstone(DISPATCHED, key=spec.name, partition=spec.slot, on_delivery=marked)

    def _do(self, now: float) -> None:
        """Run the due actions."""
        while self._actions and self._gone_at is not None and self._gone_at + self._actions[-1].at <= now:
            planned = self._actions.pop()
            member = self._members[planned.worker]
            if planned.action is Action.START and member.executor is None:
                self._start(member)
            elif planned.action is not Action.START and member.executor is not None:
                self._do_to(member, member.executor, planned.action, now)

    def _do_to(self, member: Member, executor: FleetExecutor, action: Action, now: float) -> None:
        self._note(member.spec.name, action.value, now)
        if action is Action.FREEZE:
            member.frozen = True
        elif action is Action.KILL:
            member.executor = None
        else:  # an executor that is to stop is thawed first, as a process is
            if member.frozen:
                member.frozen, member.looked_at, missed = False, now, [*member.missed]
                member.missed.clear()
                for take in missed:
                    self._carry(member, take(executor, now))
            if action is Action.STOP:
                self._leave(member, executor, now)

    def _leave(self, member: Member, executor: FleetExecutor, now: float) -> None:
        *back, last = executor.stop(now)
        self._carry(member, back)
        self._writer.flush()  # its last heartbeat lists answers that are on the log
        self._carry(member, [last])
        member.executor = None

    def _take(self, items: Iterable[Item]) -> None:
        for item in items:
            if not isinstance(item, Envelope):
                continue
            record, offset = item.record, item.offset
            if isinstance(record, TurnDispatch):
                if (member := self._members.get(record.worker)) is not None:
                    self._deliver(member, partial(_dispatched, record, offset))
            elif item.key == FENCING_KEY:
                for member in self._by_slot[item.partition]:
                    self._deliver(member, partial(_claimed, offset))

    def _read_grants(self) -> None:
        while True:
            try:
                item, seen = self._grants.get_nowait()
            except Empty:
                return
            worker, source = parse_grant_key(item.key)
            member = self._members.get(worker)
            grant = item.record if isinstance(item.record, CapacityGrant) else None
            if member is not None and member.spec.lends and source is not None:
                self._deliver(member, partial(_granted, grant, source, seen))

    def _deliver(self, member: Member, take: Taking) -> None:
        """Pass an input to the executor, now or once it is thawed."""
        if member.executor is not None and member.frozen:
            member.missed.append(take)
        elif member.executor is not None:
            self._carry(member, take(member.executor, self._now()))

    def _look(self, member: Member, now: float) -> None:
        if member.executor is None or member.frozen:
            return
        since, member.looked_at = member.looked_at, now
        users, idle = NOBODY, now - since
        if member.users is not None and self._gone_at is not None:
            users = member.users.at(now - self._gone_at)
            users = users._replace(at=users.at + self._gone_at)
            idle = member.users.idle(max(0.0, since - self._gone_at), now - self._gone_at)
        self._carry(member, member.executor.step(users, idle, now))

    def _carry(self, member: Member, outputs: Iterable[Output]) -> None:
        """Write the executor's outputs to the bus and to the journal."""
        for each in outputs:
            match each:
                case TurnResult():
                    self._write(each)
                case SlackHeartbeat():
                    self._writer.write(HEARTBEATS, each, key=member.spec.name, partition=0)
                case ContextRequest(dispatch):
                    context = self._contexts.find(dispatch)
                    if context is not None:
                        self._deliver(member, partial(_context, dispatch, context))
                case ReturnedTurns(results, note):
                    left = iter(range(len(results) - 1, -1, -1))
                    for result in results:
                        self._write(result, partial(self._answered, member.spec.name, note, left))
                case Note():
                    self._note(member.spec.name, each.what.value, each.at, each.since, each.reason)

    def _answered(self, worker: str, note: Note, left: Iterator[int], *_: int) -> None:
        """Count a returned turn that is on the log."""
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
        """Stop all executors, and write the journal."""
        now = self._now()
        for member in self._members.values():
            if member.executor is not None:
                self._do_to(member, member.executor, Action.STOP, now)
        self._writer.flush()
        for outcome, many in self._turns.items():
            self._note(NAME, outcome.value, now, reason=str(many))
        Path(self._plan.journal).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in self._lines))
        self._following.stop()
        self._contexts.close()
        self._writer.close()
        self._reader.close()


def _dispatched(dispatch: TurnDispatch, offset: int, executor: FleetExecutor, now: float) -> Sequence[Output]:
    return executor.on_dispatch(dispatch, offset, now)


def _context(
    dispatch: TurnDispatch, context: bytes | ContextMissing, executor: FleetExecutor, now: float
) -> Sequence[Output]:
    return executor.on_context(dispatch, context, now) if dispatch.incarnation == executor.incarnation else ()


def _claimed(claim: int, executor: FleetExecutor, _: float) -> Sequence[Output]:
    executor.on_claim(claim)
    return ()


def _granted(
    grant: CapacityGrant | None, source: GrantSource, live: bool, executor: FleetExecutor, now: float
) -> Sequence[Output]:
    return executor.on_grant(grant, now, source=source, live=live)


def _users_of(serving: Serving | None, lenders: int) -> Sequence[Users]:
    if serving is None or not lenders:
        return ()
    return users_of(read_trace(serving.trace), serving.rates, workers=lenders, speed=serving.speed)


def memory_of(spec: ExecutorSpec, serving: Serving) -> KvBudget:
    """Return the KV budget of a lender with its users."""
    pool = spec.rates.kv_tokens * spec.kv_bytes_per_token
    bounds = KvLimits(
        total_bytes=serving.kv_bytes,
        pool_bytes=pool,
        block_bytes=BLOCK_TOKENS * spec.kv_bytes_per_token,
        headroom_bytes=int(serving.headroom * serving.kv_bytes),
        quiet_seconds=serving.quiet_seconds / serving.speed,
        piece_bytes=pool,
        transferable=True,
    )
    return KvBudget(bounds)


def main() -> None:
    """Run a fleet; see the module."""
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
