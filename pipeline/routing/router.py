"""The router's core: which turn goes where, when, and what becomes of turns whose executor leaves.

Keeps true
- Nothing is lost: `requested = finished + failed + outstanding + waiting`, after every event.
- A turn is dispatched only to an executor that is LIVE and ready, within what its newest heartbeat allows.
- A turn is in the books of one executor at most. When that one leaves, starts anew, preempts, refuses or loses it, the
  turn waits again under a new attempt, once; or comes back to an executor that turns out to hold it still.
- What a PREEMPTED result holds of a turn is not generated again: each dispatch after it carries the most that is known.
- Only what is somebody's fault counts against a turn (`Retries`). A refusal for lack of room, a preemption and a
  silence that ended are nobody's.
- The first COMPLETED result of a turn finishes it, whichever attempt it is of.
- Of a context it knows the length. A turn whose context no executor can read back waits until it is asked for again, by
  a request that carries it whole: that is nobody's fault.
- A turn whose attempt ended without its result waits again under a new attempt, once; where its context is missing,
  for its anchor. It is FAILED after `max_attempts` attempts that ended by somebody's fault, or once its patience
  has passed without progress. No timeout applies to a running turn.
- Decisions are a function of the events and their times: the same history gives the same bytes.

A trajectory has one present turn. A request for its next one proves that the present one was applied, even if the
result has not been read yet.

Pure: `now` is seconds on the router's own clock, which the dispatches say as well; no other clock is compared with it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from rose.pipeline.routing.assignments import Assignments
from rose.pipeline.routing.candidates import PlacementQuery
from rose.pipeline.routing.config import RouterConfig
from rose.pipeline.routing.liveness import Executor, ExecutorStatus, Liveness
from rose.pipeline.routing.placement import Choice, Placement
from rose.pipeline.routing.prefix_cache import CachedPrefix, PrefixLocations
from rose.pipeline.routing.turn import LengthsByEnvironment, Turn
from rose.pipeline.routing.turn_queue import ReceivedRequest, TurnQueue
from rose.schemas.arrays import count
from rose.schemas.heartbeats import SlackHeartbeat
from rose.schemas.record import Record
from rose.schemas.turns import Refusal, TurnDispatch, TurnOutcome, TurnRequest, TurnResult, TurnTimes


@dataclass(slots=True)
class Counters:
    """What has happened since the start. All only grow."""

    requested: int = 0
    """Turns taken in."""
    finished: int = 0
    failed: int = 0
    """Turns given up by the router."""
    dispatched: int = 0
    reissued: int = 0
    """Times that a turn waited again."""
    late: int = 0
    """Results of executions that no longer mattered."""
    duplicate: int = 0
    """Requests for turns already known."""
    lost: int = 0
    """Dispatches that a living executor did not hold."""
    context_missing: int = 0
    """Times that a turn waited for an anchor."""
    overtaken: int = 0
    """Turns finished by the request for the next one, which was read before their result."""


ATTEMPT_LIMIT = 2**16
"""As many as a dispatch can number; a turn that was moved so often is given up."""


class Retries:
    """The ways of a turn from an executor: to those that wait, or out of the router's books."""

    def __init__(
        self,
        turns: dict[str, Turn],
        queue: TurnQueue,
        assignments: Assignments,
        placement: Placement,
        prefixes: PrefixLocations,
        counters: Counters,
        *,
        max_attempts: int,
    ) -> None:
        self._turns = turns
        self._queue = queue
        self._assignments = assignments
        self._placement = placement
        self._prefixes = prefixes
        self._counters = counters
        self._max_attempts = max_attempts

    def reissue(self, turn: Turn, reason: str, now: float, *, fault: bool) -> list[TurnResult]:
        """Let a turn that nobody has any more wait under a new attempt; it fails when that is one too many."""
        turn.failures += fault
        turn.queued_at = now
        turn.attempt = min(turn.next_attempt, ATTEMPT_LIMIT - 1)
        self._queue.push(turn)
        if turn.failures >= self._max_attempts:
            return [self._fail(turn, f"{turn.failures} attempts have failed, the last: {reason}", now)]
        if turn.next_attempt >= ATTEMPT_LIMIT:
            return [self._fail(turn, f"it was moved {ATTEMPT_LIMIT} times, the last: {reason}", now)]
        self._counters.reissued += 1
        return []

    def await_anchor(self, turn: Turn, now: float) -> None:
        """Nobody can read the turn's context back: it waits for its anchor."""
        turn.queued_at = now
        turn.attempt = min(turn.next_attempt, ATTEMPT_LIMIT - 1)
        self._queue.await_anchor(turn)
        self._counters.context_missing += 1

    def fail_overdue(self, now: float) -> list[TurnResult]:
        """Give up the turns that made no progress within their patience."""
        old = [turn for turn in self._turns.values() if turn.queued_at + turn.patience_seconds <= now]
        late = [turn for turn in old if self._assignments.last_progress_at(turn) + turn.patience_seconds <= now]
        return [self.fail_out_of_patience(turn, now) for turn in late]

    def fail_out_of_patience(self, turn: Turn, now: float) -> TurnResult:
        """Its patience is over: it fails, and the reason says what it waited for."""
        patience = f"{turn.patience_seconds:g} s"
        if turn.worker:
            return self._fail(turn, f"{turn.worker}, which has it, was not heard to run it for {patience}", now)
        if turn.seeded and self._placement.refuses_seeds:
            return self._fail(turn, "no executor takes turns with a seed", now)
        if turn.context_missing:
            return self._fail(turn, f"its context is torn, and nobody asked again with an anchor in {patience}", now)
        return self._fail(turn, f"no executor has taken it up in {patience}", now)

    def remove(self, turn: Turn, *, answered: bool) -> None:
        """Take a turn out of the books. `answered`: its executor has ended the execution, whose room is free."""
        if not turn.worker:
            self._queue.remove(turn)
        elif answered:
            self._assignments.complete(turn)
        else:
            self._assignments.revoke(turn, charged=False)
        del self._turns[turn.trajectory_id]
        self._prefixes.on_turn_finished(turn.trajectory_id, turn.trajectory, turn.turn)

    def _fail(self, turn: Turn, reason: str, now: float) -> TurnResult:
        self.remove(turn, answered=False)
        self._counters.failed += 1
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


Decision = TurnDispatch | TurnResult
"""A dispatch for an executor's inbox, or the FAILED result of a turn that is given up."""

EXPIRY_SECONDS = 0.1
"""How often silence is looked for."""

SWEEP_SECONDS = 1.0
"""How often turns without progress are looked for."""

COMPLETED, FAILED, PREEMPTED = TurnOutcome.COMPLETED, TurnOutcome.FAILED, TurnOutcome.PREEMPTED
"""Looked up once: Python takes its time over the members of an Enum."""

BLAMELESS_REFUSALS = (Refusal.ROOM, Refusal.VERSION, Refusal.CONTEXT)


class Router:
    """All that the router knows; the loop hands it records and writes what it decides."""

    def __init__(self, config: RouterConfig | None = None, *, fencing_tokens: Mapping[int, int] | None = None) -> None:
        """`fencing_tokens`: the offset of this router's claim in each inbox slot; none where nobody else could
        route.
        """
        config = config or RouterConfig()
        self.fencing_tokens = dict(fencing_tokens or {})
        self.liveness = Liveness(max_lag_versions=config.max_lag_versions)
        self.placement = Placement()
        self.prefix_locations = PrefixLocations(config.remembered_trajectories)
        self.lengths = LengthsByEnvironment()
        self.turns: dict[str, Turn] = {}
        """The unfinished turn of each trajectory that has one, oldest request first."""
        self.queue = TurnQueue()
        self.assignments = Assignments(self.turns, self.liveness, self.placement, self.queue)
        self.counters = Counters()
        self.retries = Retries(
            self.turns,
            self.queue,
            self.assignments,
            self.placement,
            self.prefix_locations,
            self.counters,
            max_attempts=config.max_attempts,
        )
        self.epoch = 0
        """Counted up by the caller; every turn remembers the epoch in which it was asked for."""
        self._next_expiry = self._next_sweep = 0.0

    @property
    def outstanding(self) -> int:
        """Turns that executors hold."""
        return len(self.turns) - len(self.queue)

    @property
    def oldest_epoch(self) -> int:
        """The epoch of the oldest unfinished turn; the present one if all are finished."""
        oldest = next(iter(self.turns.values()), None)
        return self.epoch if oldest is None else oldest.epoch

    def on_event(self, event: Record | ReceivedRequest, now: float) -> list[Decision]:
        """Take any record of the router's inputs in, as a replayed log has them."""
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
        """An environment worker asks for a turn."""
        known = self.turns.get(received.request.trajectory_id)
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
        """An execution has ended, one way or the other."""
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
            self.retries.remove(turn, answered=is_current)
            self.counters.finished += 1
            return self._dispatch_waiting(now)
        if result.outcome is FAILED:
            self.retries.remove(turn, answered=False)
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
            self.retries.await_anchor(turn, now)
            return self._dispatch_waiting(now)
        fault = result.outcome is TurnOutcome.REFUSED and result.refusal not in BLAMELESS_REFUSALS
        decisions = self.retries.reissue(turn, f"{result.outcome.value}: {result.reason}", now, fault=fault)
        return [*decisions, *self._dispatch_waiting(now)]

    def on_heartbeat(self, heartbeat: SlackHeartbeat, now: float) -> list[Decision]:
        """An executor says what it has."""
        newest_version = self.liveness.current_version
        replaced, returned = self.liveness.on_heartbeat(heartbeat, now)
        executor = self.liveness.executors[heartbeat.worker]
        decisions: list[Decision] = []
        if replaced is not None:
            decisions += self._release_executor(replaced, f"{heartbeat.worker} started anew", now)
        if executor.heartbeat is not heartbeat:  # of an older start
            return [*decisions, *self._dispatch_waiting(now)]
        if returned:
            self.assignments.forgive(executor)
        stopped = executor.status is ExecutorStatus.GONE
        for turn in self.assignments.reconcile(executor, now):
            if stopped:
                self.assignments.complete(turn)
                decisions += self.retries.reissue(turn, f"{heartbeat.worker} has stopped", now, fault=False)
            else:
                self.counters.lost += 1
                self.assignments.revoke(turn, charged=True)
                decisions += self.retries.reissue(turn, f"{heartbeat.worker} does not hold it", now, fault=True)
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
        """Send nothing to these inboxes before their executors are heard again."""
        for executor in self.liveness.executors.values():
            if executor.heartbeat is not None and executor.heartbeat.slot in slots:
                executor.rejected = True
                self.placement.close(executor.worker)

    def tick(self, now: float) -> list[Decision]:
        """Time has passed. Cheap when there is nothing to look for yet."""
        if now < self._next_expiry:
            return []
        self._next_expiry = now + EXPIRY_SECONDS
        decisions: list[Decision] = []
        newest_version = self.liveness.current_version
        for executor in self.liveness.expire():
            self.placement.close(executor.worker)
            for turn in self.assignments.turns_of(executor):
                self.assignments.revoke(turn, charged=True)
                decisions += self.retries.reissue(turn, f"{executor.worker} fell silent", now, fault=True)
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
        """Rebuild the state from the log after a restart; call it before any other event.

        Turns found outstanding stay with their executors, who have UNHEARD_TTL_SECONDS to be heard from. Reading may
        take long: all times begin once it is over. `dispatches` are those that their executors took for valid.
        """
        started_at = clock()
        for received in requests:
            known = self.turns.get(received.request.trajectory_id)
            if known is not None and self._attach_anchor(known, received, started_at):
                continue
            opened = self._accept(known, received, started_at)
            if opened is not None:
                self.queue.push(opened)
        decisions: list[Decision] = []
        orphans = self.assignments.restore(dispatches, started_at)
        for result in results:
            decisions += self.on_result(result, started_at)
        for turn in [unanswered for unanswered in orphans if unanswered.worker]:
            self.assignments.complete(turn)
            decisions += self.retries.reissue(turn, "its executor started anew", started_at, fault=True)
        now = clock()
        for turn in self.turns.values():
            turn.queued_at = turn.seen_at = now
            turn.due = now + turn.patience_seconds
            if not turn.worker and not turn.context_missing:
                self.queue.remove(turn)
                self.queue.push(turn)
        return decisions

    def _accept(self, known: Turn | None, received: ReceivedRequest, now: float) -> Turn | None:
        """Take a request in; None if it asks for nothing new. `known`: the trajectory's turn, if it has one."""
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

    def _attach_anchor(self, turn: Turn, received: ReceivedRequest, now: float) -> bool:
        """Whether this asks again for the trajectory's turn, with its context whole."""
        request = received.request
        if turn.turn != request.turn or not request.is_anchor or turn.is_anchor:
            return False
        if (request.digest, request.context_tokens) != (turn.digest, turn.context_tokens):
            return False
        turn.replace_request(request, received.request_bytes, received.offset)
        if not turn.worker:  # else its executor may have the context, whoever had it not
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
        self.retries.remove(turn, answered=False)
        self.counters.finished += 1
        self.counters.overtaken += 1

    def _update_offer(self, executor: Executor) -> bool:
        """Hand an executor's newest heartbeat to the placement; whether it may now run what it could not before."""
        if executor.heartbeat is None:
            return False
        first = executor.worker not in self.placement.candidates
        grew = self.placement.offer(
            executor.heartbeat, is_open=executor.is_open, lag_versions=self.liveness.lag_versions(executor)
        )
        for room_tokens, new_tokens in (
            self.assignments.reservations(executor) if first else ()
        ):  # known from the log alone
            self.placement.reserve(executor.worker, room_tokens, new_tokens)
        return grew

    def _update_offers(self, previous_version: int) -> None:
        """Everybody's standing and lag have changed if the newest version has."""
        if self.liveness.current_version != previous_version:
            opened = [self._update_offer(executor) for executor in self.liveness.executors.values()]
            if any(opened):
                self.queue.restore_skipped()

    def _dispatch_waiting(self, now: float) -> list[Decision]:
        """Dispatch waiting turns in their order until one has to wait on."""
        decisions: list[Decision] = []
        while self.queue.heap and (turn := self.queue.first()) is not None:
            if turn.queued_at + turn.patience_seconds <= now:
                decisions.append(self.retries.fail_out_of_patience(turn, now))
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
        begun = turn.partial_tokens
        context_tokens = turn.context_tokens + begun
        new_tokens = turn.lengths.expected(turn.turn, turn.max_tokens) - begun
        return PlacementQuery(
            context_tokens,
            new_tokens if new_tokens > 1.0 else 1.0,
            turn.context_tokens + turn.max_tokens,
            turn.trajectory_id if turn.turn else turn.group_id,
            self.prefix_locations.cached_tokens(
                turn.trajectory, turn.group_id, context_tokens, self.liveness.executors
            ),
            turn.seeded,
        )

    def _dispatch(self, turn: Turn, query: PlacementQuery, choice: Choice, now: float) -> TurnDispatch:
        """Send a turn that does not wait any more."""
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
            asked=msgspec.Raw(wire),
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
            begun=turn.partial,
        )

    def _record_prefix(self, turn: Turn, result: TurnResult, resumed_tokens: int) -> None:
        """The tokens of an execution stay in its executor's cache, under the version that it began with.

        `resumed_tokens`: how many of the result's tokens it went on from.
        """
        for span in result.spans:
            if span.end > resumed_tokens and result.worker is not None:
                tokens = turn.context_tokens + count(result.tokens)
                executor = self.liveness.executors.get(result.worker)
                cache = 0 if executor is None else executor.cache_generation
                turn.trajectory.set_prefix(result.worker, result.incarnation, cache, span.version, tokens)
                return

    def _release_executor(self, executor: Executor, reason: str, now: float) -> list[Decision]:
        """A start of an executor has ended for good: its turns wait again, and it runs nothing more."""
        decisions: list[Decision] = []
        for turn in self.assignments.turns_of(executor):
            self.assignments.complete(turn)
            decisions += self.retries.reissue(turn, reason, now, fault=executor.status is not ExecutorStatus.GONE)
        executor.holds.clear()
        self.assignments.drop_ghosts(executor)
        return decisions

    def _sweep(self, now: float) -> list[Decision]:
        decisions: list[Decision] = [*self.retries.fail_overdue(now)]
        for worker in self.liveness.forget_gone():
            self.placement.remove(worker)
        return decisions
