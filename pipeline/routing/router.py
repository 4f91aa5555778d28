"""The router's core: chooses an executor for each turn, and reissues the turns of executors that leave.

Keeps true
- No turn is lost: `requested = finished + failed + withdrawn + outstanding + waiting`, after every event.
- A turn is dispatched only to an executor that is LIVE and ready, within the limits of the executor's newest heartbeat,
  and a turn with a pinned version only to an executor whose newest heartbeat has that version.
- A turn is assigned to at most one executor. When the executor leaves, restarts, preempts, refuses or loses the turn,
  the turn is queued once under a new attempt. If an executor turns out to hold a queued turn still, the turn is
  assigned to that executor again.
- Tokens in a PREEMPTED result are not generated again: every later dispatch carries the longest known partial.
- Only attempts that end by a fault count against a turn (`_reissue`). A refusal for lack of room, a preemption and a
  silence that ended are no faults.
- The first COMPLETED result of a turn finishes the turn, whichever attempt the result belongs to.
- The router knows the length of a context, not its tokens. A turn whose context no executor can read back waits for a
  request with an anchor. A missing context is no fault.
- A turn that is withdrawn or on hold is not dispatched, and each executor that may run the turn is told once to stop.
  A turn on hold keeps its partial, and goes on once it is requested again.
- A turn becomes FAILED after `max_attempts` attempts that ended by a fault, or once its patience has passed without
  progress. No timeout applies to a running turn.
- Decisions are a function of the events and their times: the same history gives the same bytes.

A trajectory has one unfinished turn at most. A request for the next turn proves that the present turn was applied,
even if its result has not been read yet.

Pure: `now` is seconds on the router's own clock. Dispatches carry the time of this clock; no other clock is compared
with it.
"""

from collections.abc import Callable, Collection, Iterable

import msgspec

from rose.pipeline.routing.assignments import Assignments
from rose.pipeline.routing.candidates import ANY_VERSION, PlacementQuery
from rose.pipeline.routing.config import RouterConfig
from rose.pipeline.routing.counters import Counters
from rose.pipeline.routing.liveness import Executor, ExecutorStatus, Liveness
from rose.pipeline.routing.placement import Choice, Placement
from rose.pipeline.routing.prefix_cache import CachedPrefix, PrefixLocations
from rose.pipeline.routing.stops import RestoredStops, stops_of
from rose.pipeline.routing.turn import LengthsByEnvironment, Turn
from rose.pipeline.routing.turn_queue import ReceivedRequest, TurnQueue
from rose.schemas.arrays import count
from rose.schemas.heartbeats import SlackHeartbeat
from rose.schemas.record import Record
from rose.schemas.turns import (
    Refusal,
    TurnDispatch,
    TurnOutcome,
    TurnRequest,
    TurnResult,
    TurnTimes,
)

ATTEMPT_LIMIT = 2**16
"""Attempts that a dispatch can number. A turn that has used all of them fails."""


Decision = TurnDispatch | TurnResult
"""A dispatch for an executor's inbox, or the FAILED result of a turn."""

EXPIRY_SECONDS = 0.1
"""Time between two checks for silent executors."""

SWEEP_SECONDS = 1.0
"""Time between two checks for turns without progress."""

COMPLETED, FAILED, PREEMPTED = TurnOutcome.COMPLETED, TurnOutcome.FAILED, TurnOutcome.PREEMPTED
"""Module constants, because the attribute access of an Enum member is slow in Python."""

BLAMELESS_REFUSALS = (Refusal.ROOM, Refusal.VERSION, Refusal.CONTEXT)


class Router:
    """State and decisions of one cell. The cell session passes records in and writes the returned decisions."""

    def __init__(self, config: RouterConfig | None = None, placement: Placement | None = None) -> None:
        """`placement`: None is the placement of production."""
        config = config or RouterConfig()
        self.fencing_tokens: dict[int, int] = {}
        """This router's fencing token by inbox slot. A slot that is missing has token 0."""
        self.liveness = Liveness(max_lag_versions=config.max_lag_versions)
        self.placement = placement or Placement()
        self.prefix_locations = PrefixLocations(config.remembered_trajectories)
        self.lengths = LengthsByEnvironment()
        self.turns: dict[str, Turn] = {}
        """Unfinished turns by trajectory, oldest request first."""
        self.queue = TurnQueue()
        self.assignments = Assignments(self.turns, self.liveness, self.placement, self.queue)
        self.counters = Counters()
        self._max_attempts = config.max_attempts
        self.epoch = 0
        """The caller increases the epoch; every turn remembers the epoch in which its request was accepted."""
        self._next_expiry = self._next_sweep = 0.0

    @property
    def outstanding(self) -> int:
        """Turns that executors hold."""
        return len(self.turns) - len(self.queue)

    @property
    def oldest_epoch(self) -> int:
        """The epoch of the oldest unfinished turn; the present epoch if all turns are finished."""
        oldest = next(iter(self.turns.values()), None)
        return self.epoch if oldest is None else oldest.epoch

    def on_event(self, event: Record | ReceivedRequest, now: float) -> list[Decision]:
        """Handle a request, result or heartbeat, for example from a replayed log.

        Raises TypeError if the router does not read records of this type.
        """
        if isinstance(event, ReceivedRequest):
            return self.on_request(event, now)
        if isinstance(event, TurnResult):
            return self.on_result(event, now)
        if isinstance(event, SlackHeartbeat):
            return self.on_heartbeat(event, now)
        if isinstance(event, TurnRequest):
            return self.on_request(ReceivedRequest.from_record(event), now)
        raise TypeError(f"{type(event).__name__} is no input of the router")

    def on_request(self, received: ReceivedRequest, now: float) -> list[Decision]:
        """Accept a request for a turn, the anchor of a known turn, or a withdrawal; return dispatches and failures."""
        known = self.turns.get(received.request.trajectory_id)
        if received.request.stops:
            stops = self._stop(received, now)
            return [*stops, *self._dispatch_waiting(now)] if known is not None else []
        if known is not None and known.on_hold and known.turn == received.request.turn:
            self._release(known, received, now)
            return self._dispatch_waiting(now)
        if known is not None and self._attach_anchor(known, received, now):
            return self._dispatch_waiting(now)
        turn = self._accept(known, received, now)
        if turn is None:
            return []
        if not self.queue.heap or self.queue.first() is None:
            query = self._query(turn)
            choice = self.placement.choose(query, now)
            if choice is not None:
                return [self._dispatch(turn, query, choice, now)]
        self.queue.push(turn)
        return self._dispatch_waiting(now)

    def on_result(self, result: TurnResult, now: float) -> list[Decision]:
        """Handle the result of an execution: the turn finishes, or is queued again."""
        self.assignments.on_result(result)
        turn = self.turns.get(result.trajectory_id)
        if turn is None or turn.turn != result.turn:
            self.counters.late += result.outcome is not FAILED  # FAILED is what the router itself wrote
            return self._dispatch_waiting(now)
        is_current = bool(turn.worker) and turn.worker == result.worker and turn.attempt == result.attempt
        resumed_tokens = turn.partial_tokens if is_current else 0
        if result.outcome is COMPLETED:
            self._record_prefix(turn, result, resumed_tokens)
            turn.lengths.record(turn.turn, count(result.tokens), turn.max_tokens)
            self._remove(turn, answered=is_current)
            self.counters.finished += 1
            return self._dispatch_waiting(now)
        if result.outcome is FAILED:
            self._remove(turn, answered=False)
            self.counters.failed += 1
            return self._dispatch_waiting(now)
        if result.outcome is PREEMPTED:
            turn.keep_partial(result.part)
        if not is_current:
            self.counters.late += 1
            return self._dispatch_waiting(now)
        context_missing = result.refusal is Refusal.CONTEXT
        executor = self.liveness.executors.get(turn.worker)
        if executor is not None and executor.incarnation == result.incarnation and not context_missing:
            executor.rejected, executor.full = True, result.refusal is Refusal.ROOM
            self.placement.close(turn.worker)
            self._record_prefix(turn, result, resumed_tokens)
        if result.outcome is PREEMPTED:
            turn.preempted_by = turn.worker
        self.assignments.complete(turn)
        if context_missing and not turn.is_anchor:
            turn.queued_at, turn.attempt = now, min(turn.next_attempt, ATTEMPT_LIMIT - 1)
            self.queue.await_anchor(turn)
            self.counters.context_missing += 1
            return self._dispatch_waiting(now)
        fault = result.outcome is TurnOutcome.REFUSED and result.refusal not in BLAMELESS_REFUSALS
        decisions = self._reissue(turn, f"{result.outcome.value}: {result.reason}", now, fault=fault)
        return [*decisions, *self._dispatch_waiting(now)]

    def on_heartbeat(self, heartbeat: SlackHeartbeat, now: float) -> list[Decision]:
        """Update an executor's status, assignments and offer from its heartbeat."""
        newest_version = self.liveness.current_version
        replaced, returned = self.liveness.on_heartbeat(heartbeat, now)
        executor = self.liveness.executors[heartbeat.worker]
        decisions: list[Decision] = []
        if replaced is not None:
            fault = replaced.status is not ExecutorStatus.GONE
            for turn in self.assignments.turns_of(replaced):
                self.assignments.complete(turn)
                decisions += self._reissue(turn, f"{heartbeat.worker} restarted", now, fault=fault)
            replaced.holds.clear()
            self.assignments.drop_ghosts(replaced)
        if executor.heartbeat is not heartbeat:  # the heartbeat belongs to an older incarnation
            return [*decisions, *self._dispatch_waiting(now)]
        if returned:
            self.assignments.forgive(executor)
        stopped = executor.status is ExecutorStatus.GONE
        for turn in self.assignments.reconcile(executor, now):
            if stopped:
                self.assignments.complete(turn)
                decisions += self._reissue(turn, f"{heartbeat.worker} has stopped", now, fault=False)
            else:
                self.counters.lost += 1
                self.assignments.revoke(turn, charged=True)
                decisions += self._reissue(turn, f"{heartbeat.worker} does not hold it", now, fault=True)
        self._update_offers(newest_version)
        if self._update_offer(executor):
            self.queue.restore_skipped()
        if heartbeat.rollout.waiting:
            self.placement.set_prefill_backlog(
                heartbeat.worker, self.assignments.prefill_backlog_seconds(executor), now
            )
        if self.queue.heap:
            decisions += self._dispatch_waiting(now)
        return decisions

    def close_inboxes(self, slots: Collection[int]) -> None:
        """Dispatch nothing to these inboxes before the next heartbeat of their executors."""
        for executor in self.liveness.executors.values():
            if executor.heartbeat is not None and executor.heartbeat.slot in slots:
                executor.rejected = True
                self.placement.close(executor.worker)

    def tick(self, now: float) -> list[Decision]:
        """Take turns from silent executors and fail overdue turns. Returns at once if called within EXPIRY_SECONDS."""
        if now < self._next_expiry:
            return []
        self._next_expiry = now + EXPIRY_SECONDS
        decisions: list[Decision] = []
        newest_version = self.liveness.current_version
        for executor in self.liveness.expire():
            self.placement.close(executor.worker)
            for turn in self.assignments.turns_of(executor):
                self.assignments.revoke(turn, charged=True)
                decisions += self._reissue(turn, f"{executor.worker} fell silent", now, fault=True)
        self._update_offers(newest_version)
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_SECONDS
            decisions += self._sweep(now)
        return [*decisions, *self._dispatch_waiting(now)]

    def restore(
        self,
        requests: Iterable[ReceivedRequest],
        dispatches: Iterable[TurnDispatch],
        results: Iterable[TurnResult],
        clock: Callable[[], float],
    ) -> list[Decision]:
        """Rebuild the state from the log after a restart. Call this before any other event.

        Outstanding turns stay assigned to their executors, which have RESTORED_TTL_SECONDS to send a heartbeat. Reading
        the log may take long, so all times of turns begin at its end. `dispatches` has no dispatch that executors drop
        because of its fencing token.
        """
        started_at = clock()
        stops = RestoredStops()
        for received in requests:
            known = self.turns.get(received.request.trajectory_id)
            if received.request.stops:
                stops.on_stopping_request(received)
                self._stop(received, started_at)
                continue
            if known is not None and known.on_hold and known.turn == received.request.turn:
                stops.on_request_again(received)
                self._release(known, received, started_at)
                continue
            if known is not None and self._attach_anchor(known, received, started_at):
                continue
            opened = self._accept(known, received, started_at)
            if opened is not None:
                self.queue.push(opened)
        decisions: list[Decision] = []
        held = [turn for turn in self.turns.values() if turn.on_hold]
        orphans = self.assignments.restore(stops.reading(dispatches), started_at)
        for turn in held:
            if not turn.on_hold:  # it was assigned to the executor of its newest dispatch
                self._put_on_hold(turn)
        for result in results:
            decisions += self.on_result(result, started_at)
        decisions += stops.missing(self.liveness.executors.values(), self.fencing_tokens, started_at)
        for turn in [unanswered for unanswered in orphans if unanswered.worker]:
            self.assignments.complete(turn)
            decisions += self._reissue(turn, "its executor restarted", started_at, fault=True)
        now = clock()
        for turn in self.turns.values():
            turn.queued_at = turn.seen_at = now
            turn.due = now + turn.patience_seconds
            if not turn.worker and not turn.context_missing and not turn.on_hold:
                self.queue.remove(turn)
                self.queue.push(turn)
        return decisions

    def _accept(self, known: Turn | None, received: ReceivedRequest, now: float) -> Turn | None:
        """Make a turn of a request; None if the request asks for nothing new.

        `known`: the unfinished turn of the trajectory, if there is one.
        """
        request = received.request
        trajectory = self.prefix_locations.trajectory(request.trajectory_id) if known is None else known.trajectory
        if request.turn <= (trajectory.turn if known is None else known.turn):
            self.counters.duplicate += 1
            return None
        if known is not None:
            self._overtake(known)
        self.counters.requested += 1
        lengths = self.lengths.for_environment(request.environment)
        turn = Turn.from_request(*received, trajectory=trajectory, lengths=lengths, epoch=self.epoch, now=now)
        self.turns[request.trajectory_id] = turn
        return turn

    def _stop(self, received: ReceivedRequest, now: float) -> list[Decision]:
        """Drop a withdrawn turn, or put a turn on hold; return a dispatch for each execution that may run: it stops."""
        request = received.request
        turn = self.turns.get(request.trajectory_id)
        if turn is None or turn.turn != request.turn or (request.hold and turn.on_hold):
            return []
        executors: Iterable[Executor] = self.liveness.executors.values()
        if turn.worker and turn.next_attempt == 1:  # the usual case: no attempt was taken from another executor
            executors = [self.liveness.executors[turn.worker]]
        if request.withdrawn:
            self._remove(turn, answered=False)
            self.counters.withdrawn += 1
        else:
            self._put_on_hold(turn)
        return list(stops_of(received, turn.next_attempt, executors, self.fencing_tokens, now))

    def _put_on_hold(self, turn: Turn) -> None:
        if turn.worker:
            self.assignments.revoke(turn, charged=False)
            turn.attempt = min(turn.next_attempt, ATTEMPT_LIMIT - 1)
        else:
            self.queue.remove(turn)
        self.queue.hold(turn)

    def _release(self, turn: Turn, received: ReceivedRequest, now: float) -> None:
        """Queue a turn on hold, which is requested again."""
        self.queue.remove(turn)
        turn.replace_request(*received)
        turn.queued_at, turn.due = now, now + turn.patience_seconds
        self.queue.push(turn)

    def _attach_anchor(self, turn: Turn, received: ReceivedRequest, now: float) -> bool:
        """Replace the request of `turn` if the received request is an anchor for it; return whether it is."""
        request = received.request
        if turn.turn != request.turn or not request.is_anchor or turn.is_anchor:
            return False
        if (request.digest, request.context_tokens) != (turn.digest, turn.context_tokens):
            return False
        turn.replace_request(request, received.request_bytes, received.offset)
        if not turn.worker:  # an executor that holds the turn may have the context, so an assigned turn stays there
            self.queue.remove(turn)
            turn.queued_at = now
            self.queue.push(turn)
        return True

    def _overtake(self, turn: Turn) -> None:
        executor = self.liveness.executors.get(turn.worker)
        if executor is not None and executor.heartbeat is not None:
            version = executor.heartbeat.policy_version
            turn.trajectory.set_prefix(
                turn.worker, executor.incarnation, executor.cache_generation, version, turn.context_tokens
            )
        self._remove(turn, answered=False)
        self.counters.finished += 1
        self.counters.overtaken += 1

    def _update_offer(self, executor: Executor) -> bool:
        """Pass an executor's newest heartbeat to the placement; return whether a turn fits now that fitted nowhere."""
        if executor.heartbeat is None:
            return False
        first = executor.worker not in self.placement.candidates
        grew = self.placement.offer(
            executor.heartbeat, is_open=executor.is_open, lag_versions=self.liveness.lag_versions(executor)
        )
        for room_tokens, new_tokens in (
            self.assignments.reservations(executor) if first else ()
        ):  # turns and ghosts that were restored from the log
            self.placement.reserve(executor.worker, room_tokens, new_tokens)
        return grew

    def _update_offers(self, previous_version: int) -> None:
        """Update the offers of all executors if the newest version has changed: status and lag depend on it."""
        if self.liveness.current_version != previous_version:
            opened = [self._update_offer(executor) for executor in self.liveness.executors.values()]
            if any(opened):
                self.queue.restore_skipped()

    def _dispatch_waiting(self, now: float) -> list[Decision]:
        """Dispatch waiting turns in order of urgency until the first turn has to wait for room."""
        decisions: list[Decision] = []
        while self.queue.heap and (turn := self.queue.first()) is not None:
            if turn.queued_at + turn.patience_seconds <= now:
                decisions.append(self._fail_out_of_patience(turn, now))
                continue
            query = self._query(turn)
            choice = self.placement.choose(query, now)
            if choice is not None:
                self.queue.remove(turn)
                decisions.append(self._dispatch(turn, query, choice, now))
            elif self.placement.fits_when_idle(query):
                break
            else:
                self.queue.skip_first()
        return decisions

    def _query(self, turn: Turn) -> PlacementQuery:
        partial_tokens = turn.partial_tokens
        context_tokens = turn.context_tokens + partial_tokens
        new_tokens = turn.lengths.expected(turn.turn, turn.max_tokens) - partial_tokens
        return PlacementQuery(
            context_tokens,
            new_tokens if new_tokens > 1.0 else 1.0,
            turn.context_tokens + turn.max_tokens,
            turn.trajectory_id if turn.turn else turn.group_id,
            self.prefix_locations.cached_tokens(
                turn.trajectory, turn.group_id, context_tokens, self.liveness.executors
            ),
            turn.seeded,
            turn.pinned_version,
        )

    def _dispatch(self, turn: Turn, query: PlacementQuery, choice: Choice, now: float) -> TurnDispatch:
        """Assign a turn, which has left the queue, to the chosen executor; return its dispatch."""
        wire, cut = turn.request_bytes, turn.by_reference
        self.placement.charge(choice, query, now)
        self.assignments.assign(turn, choice.worker, now)
        turn.room_tokens, turn.new_tokens = query.room_tokens, query.new_tokens
        turn.prefill_seconds = choice.cost.prefill_seconds
        if turn.preempted_by:
            self.placement.record_recomputed(turn.preempted_by, query.context_tokens - choice.cost.cached_tokens)
            turn.preempted_by = ""
        if turn.turn == 0:
            executor = self.liveness.executors[choice.worker]
            assert executor.heartbeat is not None
            prefix = CachedPrefix(
                choice.incarnation, executor.cache_generation, executor.heartbeat.policy_version, turn.context_tokens
            )
            self.prefix_locations.on_prompt_dispatched(turn.group_id, choice.worker, prefix)
        self.counters.dispatched += 1
        return TurnDispatch(
            request_wire=msgspec.Raw(wire),
            home=turn.home,
            offset=turn.offset,
            cut=cut,
            attempt=turn.attempt,
            worker=choice.worker,
            slot=choice.slot,
            incarnation=choice.incarnation,
            claim=self.fencing_tokens.get(choice.slot, 0),
            failures=turn.failures,
            dispatched_at=now,
            cost=choice.cost,
            queued_at=turn.queued_at,
            partial=turn.partial,
        )

    def _record_prefix(self, turn: Turn, result: TurnResult, resumed_tokens: int) -> None:
        """Record that the tokens of an execution are in its executor's cache, under the version that it began with.

        `resumed_tokens`: number of the result's tokens that the dispatch carried as a partial.
        """
        for span in result.spans:
            if span.end > resumed_tokens and result.worker is not None:
                tokens = turn.context_tokens + count(result.tokens)
                executor = self.liveness.executors.get(result.worker)
                cache = 0 if executor is None else executor.cache_generation
                turn.trajectory.set_prefix(result.worker, result.incarnation, cache, span.version, tokens)
                return

    def _reissue(self, turn: Turn, reason: str, now: float, *, fault: bool) -> list[TurnResult]:
        """Queue a turn that no executor has under a new attempt, or fail the turn if it has no attempts left.

        `fault`: whether the ended attempt counts as a failure. Returns the FAILED result, or nothing.
        """
        turn.failures += fault
        turn.queued_at, turn.attempt = now, min(turn.next_attempt, ATTEMPT_LIMIT - 1)
        self.queue.push(turn)
        if turn.failures >= self._max_attempts:
            return [self._fail(turn, f"{turn.failures} attempts have failed, the last: {reason}", now)]
        if turn.next_attempt >= ATTEMPT_LIMIT:
            return [self._fail(turn, f"it was moved {ATTEMPT_LIMIT} times, the last: {reason}", now)]
        self.counters.reissued += 1
        return []

    def _remove(self, turn: Turn, *, answered: bool) -> None:
        """Remove a finished turn. `answered`: its executor has ended the execution, so the room is free."""
        if not turn.worker:
            self.queue.remove(turn)
        elif answered:
            self.assignments.complete(turn)
        else:
            self.assignments.revoke(turn, charged=False)
        del self.turns[turn.trajectory_id]
        self.prefix_locations.on_turn_finished(turn.trajectory_id, turn.trajectory, turn.turn)

    def _fail_out_of_patience(self, turn: Turn, now: float) -> TurnResult:
        """Fail a turn whose patience has passed."""
        lacks_version = turn.pinned_version != ANY_VERSION and not self.placement.has_version(turn.pinned_version)
        reason = turn.patience_reason(refuses_seeds=self.placement.refuses_seeds, lacks_version=lacks_version)
        return self._fail(turn, reason, now)

    def _fail(self, turn: Turn, reason: str, now: float) -> TurnResult:
        self._remove(turn, answered=False)
        self.counters.failed += 1
        return TurnResult(
            trajectory_id=turn.trajectory_id,
            group_id=turn.group_id,
            home=turn.home,
            turn=turn.turn,
            attempt=turn.attempt,
            outcome=TurnOutcome.FAILED,
            reason=f"turn {turn.turn} was given up: {reason}"[:4096],
            context_tokens=turn.context_tokens,
            times=TurnTimes(requested_at=turn.requested_at, finished_at=now),
        )

    def _sweep(self, now: float) -> list[Decision]:
        """Fail the turns that made no progress within their patience, and forget executors that are gone."""
        waiting = [turn for turn in self.turns.values() if not turn.on_hold]
        old = [turn for turn in waiting if turn.queued_at + turn.patience_seconds <= now]
        late = [turn for turn in old if self.assignments.last_progress_at(turn) + turn.patience_seconds <= now]
        decisions: list[Decision] = [self._fail_out_of_patience(turn, now) for turn in late]
        for worker in self.liveness.forget_gone():
            self.placement.remove(worker)
        return decisions
