"""A simulation around the router's core: executors that join and leave, trajectories that request turns, and the
invariants.

The executors behave like real executors: they keep every accepted turn until they answer it or end, and their
heartbeats list it. The simulation derives its own books from the records and compares them with the router's after
every event.
"""

import struct
from dataclasses import dataclass, field

import msgspec

from rose.pipeline.routing.config import RouterConfig
from rose.pipeline.routing.liveness import ExecutorStatus
from rose.pipeline.routing.router import Decision, Router
from rose.pipeline.routing.turn_queue import ReceivedRequest, urgency
from rose.schemas.arrays import count
from rose.schemas.heartbeats import ExecutorState, Hardware, SlackHeartbeat, WorkerClass
from rose.schemas.prompts import Sampling
from rose.schemas.record import Record
from rose.schemas.sampled_tokens import VersionSpan
from rose.schemas.turns import (
    PlacementCost,
    Refusal,
    TurnDispatch,
    TurnKey,
    TurnOutcome,
    TurnRequest,
    TurnResult,
    context_fields,
    held_hash,
)
from rose.schemas.wire import encode

TTL_SECONDS = 2.0
INBOXES = 2
"""Number of inboxes that all executors share."""

CONFIG = RouterConfig(max_attempts=4, max_lag_versions=1, remembered_trajectories=50)


def request(
    trajectory: str,
    turn: int = 0,
    *,
    context: int = 20,
    max_tokens: int = 10,
    anchors: bool = False,
    **other: object,
) -> TurnRequest:
    fields: dict[str, object] = {
        "home": 0,
        "environment": "calculator",
        "requested_at": 0.0,
        "patience_seconds": 1e9,
        "sampling": Sampling(max_tokens=max_tokens),
        **other,
    }
    return TurnRequest(
        trajectory_id=trajectory,
        group_id=trajectory.partition(":")[0],
        turn=turn,
        **context_fields(bytes(4 * context), () if turn == 0 or anchors else (0,)),
        **fields,  # type: ignore[arg-type]
    )


def heartbeat(worker: int, **other: object) -> SlackHeartbeat:
    fields: dict[str, object] = {
        "slot": worker % INBOXES,
        "incarnation": 1,
        "sequence": 0,
        "state": ExecutorState.READY,
        "policy_version": 0,
        "hardware": Hardware(prefill_tokens_per_second=1000.0, decode_tokens_per_second=100.0),
        "max_turns": 4,
        "token_budget": 1000,
        "sent_at": 0.0,
        "worker_class": WorkerClass.DEDICATED,
        **other,
    }
    return SlackHeartbeat(
        worker=f"w{worker}",
        kv_bytes_total=0,
        kv_bytes_free=0,
        kv_bytes_per_token=0,
        ttl_seconds=TTL_SECONDS,
        **fields,  # type: ignore[arg-type]
    )


def dispatched(turn_request: TurnRequest, worker: int = 0, **other: object) -> TurnDispatch:
    fields: dict[str, object] = {
        "slot": worker % INBOXES,
        "incarnation": 1,
        "claim": 0,
        "dispatched_at": 0.0,
        **other,
    }
    cost = PlacementCost(wait_seconds=0, prefill_seconds=0, decode_seconds=0)
    return TurnDispatch(
        request_wire=msgspec.Raw(encode(turn_request)),
        home=turn_request.home,
        offset=0,
        worker=f"w{worker}",
        cost=cost,
        **fields,  # type: ignore[arg-type]
    )


def result(
    dispatch: TurnDispatch,
    outcome: TurnOutcome = TurnOutcome.COMPLETED,
    tokens: int = 5,
    refusal: Refusal | None = None,
) -> TurnResult:
    """Return a result. `tokens` is the number sampled by this attempt, after its partial turn."""
    turn_request, so_far = dispatch.request, begun_tokens(dispatch) + tokens
    return TurnResult(
        trajectory_id=turn_request.trajectory_id,
        group_id=turn_request.group_id,
        home=dispatch.home,
        turn=turn_request.turn,
        attempt=dispatch.attempt,
        outcome=outcome,
        refusal=refusal,
        worker=dispatch.worker,
        incarnation=dispatch.incarnation,
        tokens=bytes(4 * so_far),
        logprobs=bytes(4 * so_far),
        spans=(VersionSpan(0, so_far, 0),),
    )


def begun_tokens(dispatch: TurnDispatch) -> int:
    """Return the number of tokens that the dispatch carries from earlier attempts."""
    return 0 if dispatch.partial is None else count(dispatch.partial.tokens)


def packed(dispatches: list[TurnDispatch]) -> bytes:
    """Return `holds` of a heartbeat."""
    return struct.pack(f"<{len(dispatches)}Q", *(held_hash(each.key) for each in dispatches))


@dataclass
class ExecutorModel:
    """The true state of one executor."""

    incarnation: int = 1
    held: dict[TurnKey, TurnDispatch] = field(default_factory=dict)
    beat: SlackHeartbeat | None = None
    heard_at: float = 0.0


@dataclass
class RoutingSimulation:
    """Feeds a router and checks its invariants. `log` holds the records of the topics, `history` the events of the
    router."""

    router: Router = field(default_factory=lambda: Router(CONFIG))
    now: float = 0.0
    version: int = 0
    loses: bool = False
    """Whether the next dispatch never reaches its executor."""
    executors: dict[str, ExecutorModel] = field(default_factory=dict)
    requested: dict[str, tuple[TurnRequest, float]] = field(default_factory=dict)
    """The newest request of each trajectory, as requested, and its time."""
    done: dict[str, int] = field(default_factory=dict)
    """The newest finished turn of each trajectory."""
    torn: set[tuple[str, int]] = field(default_factory=set)
    """Turns with a chain that no executor could read, before the environment worker learns of it."""
    faults: dict[tuple[str, int], int] = field(default_factory=dict)
    """Number of events per turn that may count as a failure."""
    sent: dict[TurnKey, TurnDispatch] = field(default_factory=dict)
    generated: dict[tuple[str, int], int] = field(default_factory=dict)
    """Largest number of tokens per turn in a PREEMPTED result that the router has read."""
    unread: list[TurnDispatch] = field(default_factory=list)
    """Partial results of stopped executors and turns that are on the log and not yet read by the router."""
    withdrawn: set[str] = field(default_factory=set)
    """Trajectories that have ended while a turn was requested."""
    held_back: set[str] = field(default_factory=set)
    """Trajectories whose turn is on hold."""
    ended: int = 0
    history: list[tuple[float, Record | None]] = field(default_factory=list)
    """Events in order; None is a tick."""
    log: list[Record] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    @property
    def running(self) -> list[TurnDispatch]:
        """Return all turns that executors run; a turn may occur twice."""
        return [dispatch for model in self.executors.values() for dispatch in model.held.values()]

    @property
    def held(self) -> dict[str, TurnDispatch]:
        """Return the dispatch of each trajectory in the router's books."""
        return {name: self.sent[turn.key] for name, turn in self.router.turns.items() if turn.worker}

    def feed(self, event: Record | None) -> list[Decision]:
        """Feed one event to the router (None lets time pass) and check all invariants."""
        self.history.append((self.now, event))
        if event is not None:
            self._put_on_log(event)
        decisions = self.router.tick(self.now) if event is None else self.router.on_event(event, self.now)
        self._note_departures()
        for decision in decisions:
            self._note(decision)
        self.decisions += decisions
        self.log += decisions
        self._check_books()
        self._check_nobody_waits_for_nothing()
        return decisions

    def ask(self, requested: TurnRequest) -> None:
        self.held_back.discard(requested.trajectory_id)
        before = self.requested.get(requested.trajectory_id)
        if before is not None and self.done.get(requested.trajectory_id, -1) < before[0].turn:
            self._settle(requested.trajectory_id, before[0].turn)
        self.requested[requested.trajectory_id] = requested, self.now
        self.feed(requested)

    def beat(self, worker: int, *, restart: bool = False, **other: object) -> None:
        model = self.executors.setdefault(f"w{worker}", ExecutorModel())
        if restart:
            for dispatch in model.held.values():
                self._fault(dispatch)
            model.incarnation += 1
            model.held.clear()
        stops = other.get("state") is ExecutorState.STOPPING
        holds = b"" if stops else packed(list(model.held.values()))
        beat = heartbeat(worker, **{"incarnation": model.incarnation, "holds": holds, **other})
        model.beat, model.heard_at = beat, self.now
        if stops:
            model.held.clear()
        self.feed(beat)

    def beat_unread(self, worker: int) -> None:
        """Send a heartbeat of an executor that has not yet read its newest dispatches."""
        model = self.executors.get(f"w{worker}")
        if model is None or model.beat is None:
            return
        listed = {held for (held,) in struct.iter_unpack("<Q", model.beat.holds)}
        old = [each for each in model.held.values() if held_hash(each.key) in listed]
        new = [each for each in model.held.values() if held_hash(each.key) not in listed]
        if all(each.dispatched_at >= min(model.heard_at, self.now - 4.0) for each in new):
            model.beat, model.heard_at = msgspec.structs.replace(model.beat, holds=packed(old)), self.now
            self.feed(model.beat)

    def hand_back(self, worker: int) -> None:
        """Stop an executor. The router learns of the stop before it reads the partial results."""
        model = self.executors.setdefault(f"w{worker}", ExecutorModel())
        given = list(model.held.values())
        for dispatch in given:  # counts as a failure if the results take longer than the TTL
            self._fault(dispatch)
        self.unread += given
        model.held.clear()
        self.beat(worker, state=ExecutorState.STOPPING, holds=packed(given))

    def read_on(self) -> None:
        """Let the router read the results of stopped executors."""
        unread, self.unread = self.unread, []
        for dispatch in unread:
            self.feed(result(dispatch, TurnOutcome.PREEMPTED))

    def complete(self, dispatch: TurnDispatch) -> None:
        requested = dispatch.request
        self.executors[dispatch.worker].held.pop(dispatch.key, None)
        present, _ = self.requested[requested.trajectory_id]
        if present.turn == requested.turn and self.done.get(requested.trajectory_id, -1) < requested.turn:
            self._settle(requested.trajectory_id, requested.turn)
        self.feed(result(dispatch))

    def withdraw(self, trajectory: str) -> None:
        """End a trajectory whose turn is requested."""
        asked, _ = self.requested[trajectory]
        if trajectory not in self.withdrawn and self.done.get(trajectory, -1) < asked.turn:
            self.withdrawn.add(trajectory)
            self._settle(trajectory, asked.turn)
            self.feed(request(trajectory, asked.turn, context=0, anchors=True, withdrawn=True))

    def hold(self, trajectory: str) -> None:
        """Put the requested turn of a trajectory on hold."""
        asked, _ = self.requested[trajectory]
        if trajectory not in self.withdrawn and self.done.get(trajectory, -1) < asked.turn:
            self.held_back.add(trajectory)
            self.feed(request(trajectory, asked.turn, context=0, anchors=True, hold=True))

    def resume(self, trajectory: str) -> None:
        """Request the turn on hold again."""
        self.held_back.discard(trajectory)
        asked, _ = self.requested[trajectory]
        if trajectory not in self.withdrawn and self.done.get(trajectory, -1) < asked.turn:
            whole = context_fields(bytes(4 * asked.context_tokens))
            self.requested[trajectory] = msgspec.structs.replace(asked, **whole), self.now
            self.feed(self.requested[trajectory][0])

    def reject(self, dispatch: TurnDispatch, outcome: TurnOutcome, refusal: Refusal | None = None) -> None:
        self.executors[dispatch.worker].held.pop(dispatch.key, None)
        if outcome is TurnOutcome.REFUSED and refusal is Refusal.ENGINE:
            self._fault(dispatch)
        if refusal is Refusal.CONTEXT:
            self.torn.add((dispatch.request.trajectory_id, dispatch.request.turn))
        self.feed(result(dispatch, outcome, refusal=refusal))

    def mend(self) -> None:
        """Send the anchor of a turn whose chain could not be read, once."""
        for requested, at in list(self.requested.values()):
            name, place = requested.trajectory_id, (requested.trajectory_id, requested.turn)
            if place in self.torn and self.done.get(name, -1) < requested.turn and name not in self.held_back:
                whole = context_fields(bytes(4 * requested.context_tokens))
                self.requested[name] = msgspec.structs.replace(requested, **whole), at
                self.feed(self.requested[name][0])
        self.torn.clear()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.feed(None)

    def restart_router(self) -> None:
        """Kill the router. The next router knows only the log."""
        for dispatch in self.unread:
            self._put_on_log(result(dispatch, TurnOutcome.PREEMPTED))
        self.unread.clear()
        self.router = Router(CONFIG)
        decisions = self.router.restore(
            [ReceivedRequest.from_record(record) for record in self.log if isinstance(record, TurnRequest)],
            [record for record in self.log if isinstance(record, TurnDispatch)],
            [record for record in self.log if isinstance(record, TurnResult)],
            lambda: self.now,
        )
        for decision in decisions:
            self._note(decision)
        self.decisions += decisions
        self.log += decisions
        counters = self.router.counters
        self.ended = counters.finished + counters.failed + counters.withdrawn
        self.history.clear()  # a replay would also have to restore
        self._check_books()

    def _put_on_log(self, event: Record) -> None:
        self.log.append(event)
        if isinstance(event, TurnResult) and event.outcome is TurnOutcome.PREEMPTED:
            place, tokens = (event.trajectory_id, event.turn), count(event.tokens)
            if tokens < self.sent[event.key].request.sampling.max_tokens:
                self.generated[place] = max(tokens, self.generated.get(place, 0))

    def _note_departures(self) -> None:
        for worker, executor in self.router.liveness.executors.items():
            model = self.executors.get(worker)
            if executor.status is not ExecutorStatus.GONE or model is None:
                continue
            if executor.heartbeat is not None and executor.heartbeat is not model.beat:
                continue
            assert model.beat is not None
            if model.beat.state is ExecutorState.STOPPING:
                continue
            if executor.heartbeat is not None:  # otherwise the router knows the executor only from the log
                assert self.now >= model.heard_at + TTL_SECONDS, "an executor was given up within its TTL"
                others = [other.heard_at for name, other in self.executors.items() if name != worker and other.beat]
                assert max(others, default=0.0) >= model.heard_at + TTL_SECONDS, "nobody else was heard: who knows?"
            for dispatch in model.held.values():
                self._fault(dispatch)

    def _fault(self, dispatch: TurnDispatch) -> None:
        place = dispatch.request.trajectory_id, dispatch.request.turn
        self.faults[place] = self.faults.get(place, 0) + 1

    def _note(self, decision: Decision) -> None:
        if isinstance(decision, TurnResult):
            self._note_failure(decision)
            return
        requested = decision.request
        if decision.withdrawn:
            assert requested.trajectory_id in self.withdrawn | self.held_back and decision.key in self.sent
            stopped = self.executors[decision.worker].held.pop(decision.key, None)
            self.unread += [] if stopped is None else [stopped]
            return
        assert requested.trajectory_id not in self.withdrawn, "a withdrawn turn was dispatched"
        assert requested.trajectory_id not in self.held_back, "a turn on hold was dispatched"
        assert decision.key not in self.sent, "an attempt was numbered twice"
        self.sent[decision.key] = decision
        assert decision.failures < CONFIG.max_attempts
        generated = self.generated.get((requested.trajectory_id, requested.turn), 0)
        assert begun_tokens(decision) >= generated, "generated tokens are sampled again"
        model = self.executors[decision.worker]
        beat = model.beat
        assert beat is not None and beat.state is ExecutorState.READY
        assert (decision.incarnation, decision.slot) == (beat.incarnation, beat.slot)
        executor = self.router.liveness.executors[decision.worker]
        assert (
            executor.status is ExecutorStatus.LIVE
            and self.router.liveness.lag_versions(executor) <= CONFIG.max_lag_versions
        )
        if self.loses:
            self.loses = False
            self._fault(decision)
            return
        model.held[decision.key] = decision
        turns, tokens = load(list(model.held.values()))
        assert turns <= beat.max_turns and tokens <= beat.token_budget, "an executor was overfilled"

    def _note_failure(self, failed: TurnResult) -> None:
        assert failed.outcome is TurnOutcome.FAILED
        requested, at = self.requested[failed.trajectory_id]
        faults = self.faults.get((failed.trajectory_id, failed.turn), 0)
        assert faults >= CONFIG.max_attempts or self.now >= at + requested.patience_seconds, "given up for nothing"
        self._settle(failed.trajectory_id, failed.turn)

    def _settle(self, trajectory: str, turn: int) -> None:
        self.done[trajectory] = turn
        self.ended += 1

    def _check_books(self) -> None:
        counters, router = self.router.counters, self.router
        ended = counters.finished + counters.failed + counters.withdrawn
        assert counters.requested == ended + router.outstanding + len(router.queue)
        assert ended == self.ended
        waiting = router.queue
        assert list(waiting.turns.values()) == sorted(
            (turn for turn in router.turns.values() if not turn.worker), key=lambda turn: turn.ticket
        ), "a turn that has left is held"
        assert waiting.skipped.keys() <= waiting.turns.keys()
        for worker, executor in router.liveness.executors.items():
            for execution, turn in executor.holds.items():
                assert router.turns[turn.trajectory_id] is turn and (turn.worker, turn.execution_key) == (
                    worker,
                    execution,
                )
            assert not executor.holds.keys() & executor.ghosts.keys()
        assert sum(len(each.holds) for each in router.liveness.executors.values()) == router.outstanding
        for candidate in router.placement.candidates.values():
            known = router.assignments.reservations(router.liveness.executors[candidate.heartbeat.worker])
            assert (candidate.held_turns, candidate.held_tokens) == (len(known), sum(room for room, _ in known))

    def _check_nobody_waits_for_nothing(self) -> None:
        """Assert that the first waiting turn that an open executor could run finds no room."""
        waiting = [turn for turn in self.router.turns.values() if not turn.worker and not turn.context_missing]
        waiting = [turn for turn in waiting if not turn.on_hold]
        for turn in sorted(waiting, key=urgency):
            need = turn.room_tokens
            able = [
                executor
                for executor in self.router.liveness.executors.values()
                if executor.is_open
                and executor.heartbeat is not None
                and executor.heartbeat.max_turns > 0
                and executor.heartbeat.token_budget >= need
            ]
            if able:
                for executor in able:
                    assert executor.heartbeat is not None
                    known = self.router.assignments.reservations(executor)
                    tokens = sum(room for room, _ in known)
                    full = len(known) >= executor.heartbeat.max_turns or tokens + need > executor.heartbeat.token_budget
                    assert full, "a turn waits beside room"
                return


def load(dispatches: list[TurnDispatch]) -> tuple[int, int]:
    """Return the held turns and tokens of the executors."""
    turn_request = [dispatch.request for dispatch in dispatches]
    return len(turn_request), sum(each.context_tokens + each.sampling.max_tokens for each in turn_request)
