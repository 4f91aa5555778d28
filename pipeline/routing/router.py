"""The router's core: which turn goes where, when, and what becomes of turns whose executor leaves.

Keeps true
- Nothing is lost: `requested = finished + failed + outstanding + waiting`, after every event.
- A turn is dispatched only to an executor that is LIVE and ready, within what its newest heartbeat allows.
- A turn is in the books of one executor at most. When that one leaves, starts anew, preempts, refuses or loses it, the
  turn waits again under a new attempt, once; or comes back to an executor that turns out to hold it still.
- What a PREEMPTED result holds of a turn is not generated again: each dispatch after it carries the most that is known.
- Only what is somebody's fault counts against a turn (`attempts`). A refusal for lack of room, a preemption and a
  silence that ended are nobody's.
- The first COMPLETED result of a turn finishes it, whichever attempt it is of.
- Of a context it knows the length. A turn whose context no executor can read back waits until it is asked for again, by
  a request that carries it whole: that is nobody's fault.
- Decisions are a function of the events and their times: the same history gives the same bytes.

A trajectory has one present turn. A request for its next one proves that the present one was applied, even if the
result has not been read yet.

Pure: `now` is seconds on the router's own clock, which the dispatches say as well; no other clock is compared with it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec

from pipeline.routing.attempts import Attempts
from pipeline.routing.config import RouterConfig
from pipeline.routing.counters import Counters
from pipeline.routing.custody import Custody
from pipeline.routing.lengths import Lengths
from pipeline.routing.liveness import Executor, Liveness, Standing
from pipeline.routing.peers import Ask
from pipeline.routing.placement import Choice, Placement
from pipeline.routing.prefixes import Prefix, Prefixes
from pipeline.routing.turn import Turn
from pipeline.routing.waiting import Asked, Waiting
from schemas.arrays import count
from schemas.record import Record
from schemas.slack import SlackHeartbeat
from schemas.turns import Refusal, TurnDispatch, TurnOutcome, TurnRequest, TurnResult

Decision = TurnDispatch | TurnResult
"""A dispatch for an executor's inbox, or the FAILED result of a turn that is given up."""

LIVENESS_SECONDS = 0.1
"""How often silence is looked for."""

SWEEP_SECONDS = 1.0
"""How often turns without progress are looked for."""

COMPLETED, FAILED, PREEMPTED = TurnOutcome.COMPLETED, TurnOutcome.FAILED, TurnOutcome.PREEMPTED
"""Looked up once: Python takes its time over the members of an Enum."""

NOBODYS_FAULT = (Refusal.ROOM, Refusal.VERSION, Refusal.CONTEXT)


class Router:
    """All that the router knows; the loop hands it records and writes what it decides."""

    def __init__(self, config: RouterConfig | None = None, *, claims: Mapping[int, int] | None = None) -> None:
        """`claims`: the offset of this router's claim in each inbox slot; none where nobody else could route."""
        config = config or RouterConfig()
        self.claims = dict(claims or {})
        self.liveness = Liveness(max_lag_versions=config.max_lag_versions)
        self.placement = Placement()
        self.prefixes = Prefixes(config.remembered_trajectories)
        self.lengths = Lengths()
        self.turns: dict[str, Turn] = {}
        """The unfinished turn of each trajectory that has one, oldest request first."""
        self.waiting = Waiting()
        self.custody = Custody(self.turns, self.liveness, self.placement, self.waiting)
        self.counters = Counters()
        self.attempts = Attempts(
            self.turns,
            self.waiting,
            self.custody,
            self.placement,
            self.prefixes,
            self.counters,
            max_attempts=config.max_attempts,
        )
        self.epoch = 0
        """Counted up by the caller; every turn remembers the epoch in which it was asked for."""
        self._next_liveness = self._next_sweep = 0.0

    @property
    def outstanding(self) -> int:
        """Turns that executors hold."""
        return len(self.turns) - len(self.waiting)

    @property
    def oldest_epoch(self) -> int:
        """The epoch of the oldest unfinished turn; the present one if all are finished."""
        oldest = next(iter(self.turns.values()), None)
        return self.epoch if oldest is None else oldest.epoch

    def on(self, event: Record | Asked, now: float) -> list[Decision]:
        """Take any record of the router's inputs in, as a replayed log has them."""
        if isinstance(event, Asked):
            return self.requested(event, now)
        if isinstance(event, TurnResult):
            return self.completed(event, now)
        if isinstance(event, SlackHeartbeat):
            return self.heard(event, now)
        if isinstance(event, TurnRequest):
            return self.requested(Asked.anew(event), now)
        raise TypeError(f"{type(event).__name__} is no input of the router")

    def requested(self, asked: Asked, now: float) -> list[Decision]:
        """An environment worker asks for a turn."""
        known = self.turns.get(asked.request.trajectory_id)
        if known is not None and self._mended(known, asked, now):
            return self._drain(now)
        turn = self._open(known, asked, now)
        if turn is None:
            return []
        if not self.waiting.heap or self.waiting.first() is None:
            ask = self._ask(turn)
            choice = self.placement.choose(ask, now)
            if choice is not None:
                return [self._dispatch(turn, ask, choice, now)]
        self.waiting.push(turn)
        return self._drain(now)

    def completed(self, result: TurnResult, now: float) -> list[Decision]:
        """An execution has ended, one way or the other."""
        self.custody.answered(result)
        turn = self.turns.get(result.trajectory_id)
        if turn is None or turn.turn != result.turn:
            self.counters.late += result.outcome is not FAILED  # FAILED is what the router itself wrote
            return self._drain(now)
        present = bool(turn.worker) and turn.worker == result.worker and turn.attempt == result.attempt
        behind = turn.begun_tokens if present else 0
        if result.outcome is COMPLETED:
            self._remember(turn, result, behind)
            turn.lengths.saw(turn.turn, count(result.tokens), turn.max_tokens)
            self.attempts.finish(turn, answered=present)
            self.counters.finished += 1
            return self._drain(now)
        if result.outcome is FAILED:
            self.attempts.finish(turn, answered=False)
            self.counters.failed += 1
            return self._drain(now)
        if result.outcome is PREEMPTED:
            turn.keep(result.part)
        if not present:
            self.counters.late += 1
            return self._drain(now)
        torn = result.refusal is Refusal.CONTEXT
        executor = self.liveness.executors.get(turn.worker)
        if executor is not None and executor.incarnation == result.incarnation and not torn:
            executor.rejected, executor.full = True, result.refusal is Refusal.ROOM
            self.placement.close(turn.worker)
            self._remember(turn, result, behind)
        if result.outcome is PREEMPTED:
            turn.taken_by = turn.worker
        self.custody.ended(turn)
        if torn and not turn.anchors:
            self.attempts.hold(turn, now)
            return self._drain(now)
        fault = result.outcome is TurnOutcome.REFUSED and result.refusal not in NOBODYS_FAULT
        decisions = self.attempts.reissue(turn, f"{result.outcome.value}: {result.reason}", now, fault=fault)
        return [*decisions, *self._drain(now)]

    def heard(self, beat: SlackHeartbeat, now: float) -> list[Decision]:
        """An executor says what it has."""
        newest_version = self.liveness.current_version
        replaced, back = self.liveness.heard(beat, now)
        executor = self.liveness.executors[beat.worker]
        decisions: list[Decision] = []
        if replaced is not None:
            decisions += self._let_go(replaced, f"{beat.worker} started anew", now)
        if executor.beat is not beat:  # of an older start
            return [*decisions, *self._drain(now)]
        if back:
            self.custody.excuse(executor)
        stopped = executor.standing is Standing.GONE
        for turn in self.custody.reconcile(executor, now):
            if stopped:
                self.custody.ended(turn)
                decisions += self.attempts.reissue(turn, f"{beat.worker} has stopped", now, fault=False)
            else:
                self.counters.lost += 1
                self.custody.taken(turn, charged=True)
                decisions += self.attempts.reissue(turn, f"{beat.worker} does not hold it", now, fault=True)
        self._reoffer(newest_version)
        if self._offer(executor):
            self.waiting.recall()
        if beat.rollout.waiting:
            self.placement.owes(beat.worker, self.custody.not_begun(executor), now)
        if self.waiting.heap:
            decisions += self._drain(now)
        return decisions

    def shut(self, slots: Collection[int]) -> None:
        """Send nothing to these inboxes before their executors are heard again."""
        for executor in self.liveness.executors.values():
            if executor.beat is not None and executor.beat.slot in slots:
                executor.rejected = True
                self.placement.close(executor.worker)

    def tick(self, now: float) -> list[Decision]:
        """Time has passed. Cheap when there is nothing to look for yet."""
        if now < self._next_liveness:
            return []
        self._next_liveness = now + LIVENESS_SECONDS
        decisions: list[Decision] = []
        newest_version = self.liveness.current_version
        for executor in self.liveness.expire():
            self.placement.close(executor.worker)
            for turn in self.custody.held_by(executor):
                self.custody.taken(turn, charged=True)
                decisions += self.attempts.reissue(turn, f"{executor.worker} fell silent", now, fault=True)
        self._reoffer(newest_version)
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_SECONDS
            decisions += self._sweep(now)
        return [*decisions, *self._drain(now)]

    def restore(
        self,
        requests: Iterable[Asked],
        dispatches: Iterable[TurnDispatch],
        results: Iterable[TurnResult],
        clock: Callable[[], float],
    ) -> list[Decision]:
        """Rebuild the state from the log after a restart; call it before any other event.

        Turns found outstanding stay with their executors, who have UNHEARD_TTL_SECONDS to be heard from. Reading may
        take long: all times begin once it is over. `dispatches` are those that their executors took for valid.
        """
        began = clock()
        for asked in requests:
            known = self.turns.get(asked.request.trajectory_id)
            if known is not None and self._mended(known, asked, began):
                continue
            opened = self._open(known, asked, began)
            if opened is not None:
                self.waiting.push(opened)
        decisions: list[Decision] = []
        orphans = self.custody.put_back(dispatches, began)
        for result in results:
            decisions += self.completed(result, began)
        for turn in [unanswered for unanswered in orphans if unanswered.worker]:
            self.custody.ended(turn)
            decisions += self.attempts.reissue(turn, "its executor started anew", began, fault=True)
        now = clock()
        for turn in self.turns.values():
            turn.queued_at = turn.seen_at = now
            turn.due = now + turn.patience_seconds
            if not turn.worker and not turn.torn:
                self.waiting.remove(turn)
                self.waiting.push(turn)
        return decisions

    def _open(self, known: Turn | None, asked: Asked, now: float) -> Turn | None:
        """Take a request in; None if it asks for nothing new. `known`: the trajectory's turn, if it has one."""
        request = asked.request
        trajectory = self.prefixes.trajectory(request.trajectory_id) if known is None else known.trajectory
        if request.turn <= (trajectory.turn if known is None else known.turn):
            self.counters.duplicate += 1
            return None
        if known is not None:
            self._overtake(known)
        self.counters.requested += 1
        lengths = self.lengths.of(request.environment)
        turn = Turn.of(*asked, trajectory=trajectory, lengths=lengths, epoch=self.epoch, now=now)
        self.turns[request.trajectory_id] = turn
        return turn

    def _mended(self, turn: Turn, asked: Asked, now: float) -> bool:
        """Whether this asks again for the trajectory's turn, with its context whole."""
        request = asked.request
        if turn.turn != request.turn or not request.anchors or turn.anchors:
            return False
        if (request.digest, request.context_tokens) != (turn.digest, turn.context_tokens):
            return False
        turn.asked_by(request, asked.wire, asked.offset)
        if not turn.worker:  # else its executor may have the context, whoever had it not
            self.waiting.remove(turn)
            turn.queued_at = now
            self.waiting.push(turn)
        return True

    def _overtake(self, turn: Turn) -> None:
        executor = self.liveness.executors.get(turn.worker)
        if executor is not None and executor.beat is not None:
            version = executor.beat.policy_version
            turn.trajectory.left(turn.worker, executor.incarnation, executor.cache, version, turn.context_tokens)
        self.attempts.finish(turn, answered=False)
        self.counters.finished += 1
        self.counters.overtaken += 1

    def _offer(self, executor: Executor) -> bool:
        """Hand an executor's newest heartbeat to the placement; whether it may now run what it could not before."""
        if executor.beat is None:
            return False
        first = executor.worker not in self.placement.seats
        more = self.placement.offer(executor.beat, open=executor.open, lag_versions=self.liveness.lag(executor))
        for room_tokens, new_tokens in self.custody.room_of(executor) if first else ():  # known from the log alone
            self.placement.hold(executor.worker, room_tokens, new_tokens)
        return more

    def _reoffer(self, version_before: int) -> None:
        """Everybody's standing and lag have changed if the newest version has."""
        if self.liveness.current_version != version_before:
            opened = [self._offer(executor) for executor in self.liveness.executors.values()]
            if any(opened):
                self.waiting.recall()

    def _drain(self, now: float) -> list[Decision]:
        """Dispatch waiting turns in their order until one has to wait on."""
        decisions: list[Decision] = []
        while self.waiting.heap and (turn := self.waiting.first()) is not None:
            if turn.queued_at + turn.patience_seconds <= now:
                decisions.append(self.attempts.give_up(turn, now))
                continue
            ask = self._ask(turn)
            choice = self.placement.choose(ask, now)
            if choice is not None:
                self.waiting.remove(turn)
                decisions.append(self._dispatch(turn, ask, choice, now))
            elif self.placement.could_run(ask):
                break
            else:
                self.waiting.set_aside()
        return decisions

    def _ask(self, turn: Turn) -> Ask:
        begun = turn.begun_tokens
        context_tokens = turn.context_tokens + begun
        new_tokens = turn.lengths.expected(turn.turn, turn.max_tokens) - begun
        return Ask(
            context_tokens,
            new_tokens if new_tokens > 1.0 else 1.0,
            turn.context_tokens + turn.max_tokens,
            turn.trajectory_id if turn.turn else turn.group_id,
            self.prefixes.cached(turn.trajectory, turn.group_id, context_tokens, self.liveness.executors),
            turn.seeded,
        )

    def _dispatch(self, turn: Turn, ask: Ask, choice: Choice, now: float) -> TurnDispatch:
        """Send a turn that does not wait any more."""
        wire, cut = turn.wire, turn.cut
        self.placement.take(choice, ask, now)
        self.custody.give(turn, choice.worker, now)
        turn.room_tokens, turn.new_tokens = ask.room_tokens, ask.new_tokens
        turn.prefill_seconds = choice.cost.prefill_seconds
        if turn.taken_by:
            self.placement.computed_again(turn.taken_by, ask.context_tokens - choice.cost.cached_tokens)
            turn.taken_by = ""
        if turn.turn == 0:
            executor = self.liveness.executors[choice.worker]
            assert executor.beat is not None
            prefix = Prefix(choice.incarnation, executor.cache, executor.beat.policy_version, turn.context_tokens)
            self.prefixes.prompted(turn.group_id, choice.worker, prefix)
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
            claim=self.claims.get(choice.slot, 0),
            failures=turn.failures,
            dispatched_at=now,
            cost=choice.cost,
            queued_at=turn.queued_at,
            begun=turn.begun,
        )

    def _remember(self, turn: Turn, result: TurnResult, behind: int) -> None:
        """The tokens of an execution stay in its executor's cache, under the version that it began with.

        `behind`: how many of the result's tokens it went on from.
        """
        for span in result.spans:
            if span.end > behind and result.worker is not None:
                tokens = turn.context_tokens + count(result.tokens)
                executor = self.liveness.executors.get(result.worker)
                cache = 0 if executor is None else executor.cache
                turn.trajectory.left(result.worker, result.incarnation, cache, span.version, tokens)
                return

    def _let_go(self, executor: Executor, reason: str, now: float) -> list[Decision]:
        """A start of an executor has ended for good: its turns wait again, and it runs nothing more."""
        decisions: list[Decision] = []
        for turn in self.custody.held_by(executor):
            self.custody.ended(turn)
            decisions += self.attempts.reissue(turn, reason, now, fault=executor.standing is not Standing.GONE)
        executor.holds.clear()
        self.custody.clear(executor)
        return decisions

    def _sweep(self, now: float) -> list[Decision]:
        decisions: list[Decision] = [*self.attempts.overdue(now)]
        for worker in self.liveness.forget():
            self.placement.remove(worker)
        return decisions
