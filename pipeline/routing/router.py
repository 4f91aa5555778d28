"""The router's core: which turn goes where, when, and what becomes of turns whose executor leaves.

Keeps true
- Nothing is lost: `requested = finished + failed + outstanding + waiting`, after every event.
- A turn is dispatched only to an executor that is LIVE and ready, within what its newest heartbeat allows.
- A turn is outstanding at one executor at most. When that one leaves, starts anew, preempts or refuses it, or lets the
  lease run out, the turn waits again as attempt + 1, once; out of attempts or past its deadline it is FAILED.
- The first COMPLETED result of a turn finishes it, whichever attempt it is of.
- Decisions are a function of the events and their times: the same history gives the same bytes.

A trajectory has one present turn. A request for its next one proves that the present one was applied, even if the
result has not been read yet.

Pure: `now` is unix seconds, as in the requests' deadlines.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from pipeline.routing.config import RouterConfig
from pipeline.routing.lengths import Lengths
from pipeline.routing.liveness import Liveness
from pipeline.routing.placement import Ask, Choice, Placement
from pipeline.routing.prefixes import Prefix, Prefixes
from pipeline.routing.waiting import Turn, Waiting
from schemas.record import Record
from schemas.slack import SlackHeartbeat
from schemas.turns import TurnDispatch, TurnOutcome, TurnRequest, TurnResult, TurnTimes
from schemas.weights import WeightManifest

Decision = TurnDispatch | TurnResult
"""A dispatch for an executor's inbox, or the FAILED result of a turn that is given up."""

LIVENESS_SECONDS = 0.1
"""How often silence is looked for."""

SWEEP_SECONDS = 1.0
"""How often leases and the deadlines of waiting turns are looked at."""

LEASE_SECONDS = 30.0
"""Shortest lease of a dispatch."""

LEASE_FACTOR = 10.0
"""A lease is at least this many times as long as the turn should take if it generated all that it may."""


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
    """Attempts after a turn's first."""
    late: int = 0
    """Results of executions that no longer mattered."""
    duplicate: int = 0
    """Requests for turns already known."""
    expired: int = 0
    """Dispatches whose lease ran out."""
    overtaken: int = 0
    """Turns finished by the request for the next one, which was read before their result."""


class Router:
    """All that the router knows; the loop hands it records and writes what it decides."""

    def __init__(self, config: RouterConfig | None = None) -> None:
        config = config or RouterConfig()
        self._max_attempts = config.max_attempts
        self.liveness = Liveness(max_lag_versions=config.max_lag_versions)
        self.placement = Placement()
        self.prefixes = Prefixes(config.remembered_trajectories)
        self.lengths = Lengths()
        self.turns: dict[str, Turn] = {}
        """The unfinished turn of each trajectory that has one, oldest request first."""
        self.waiting = Waiting()
        self.counters = Counters()
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

    def on(self, event: Record, now: float) -> list[Decision]:
        """Take any record of the router's inputs in, as a replayed log has them."""
        if isinstance(event, TurnRequest):
            return self.requested(event, now)
        if isinstance(event, TurnResult):
            return self.completed(event, now)
        if isinstance(event, SlackHeartbeat):
            return self.heard(event, now)
        if isinstance(event, WeightManifest):
            return self.published(event.version, now)
        raise TypeError(f"{type(event).__name__} is no input of the router")

    def requested(self, request: TurnRequest, now: float) -> list[Decision]:
        """An environment worker asks for a turn."""
        turn = self._open(request, now)
        if turn is None:
            return []
        self.waiting.push(turn)
        return self._drain(now)

    def completed(self, result: TurnResult, now: float) -> list[Decision]:
        """An execution has ended, one way or the other."""
        turn = self.turns.get(result.trajectory_id)
        if turn is None or turn.request.turn != result.turn:
            self.counters.late += result.outcome is not TurnOutcome.FAILED  # FAILED is what the router itself wrote
            return []
        if result.outcome is TurnOutcome.COMPLETED:
            self._remember(turn, result)
            self.lengths.saw(len(result.tokens) // 4, turn.request.sampling.max_tokens)
            self._finish(turn)
            self.counters.finished += 1
            return self._drain(now)
        if result.outcome is TurnOutcome.FAILED:
            self._finish(turn)
            self.counters.failed += 1
            return self._drain(now)
        if turn.worker != result.worker or turn.request.attempt != result.attempt:
            self.counters.late += 1
            return []
        executor = self.liveness.executors.get(result.worker)
        if executor is not None and executor.incarnation == result.incarnation:
            executor.rejected = True
            self.placement.close(result.worker)
            self._remember(turn, result)
        return [*self._reissue(turn, f"{result.outcome.value}: {result.reason}", now), *self._drain(now)]

    def heard(self, beat: SlackHeartbeat, now: float) -> list[Decision]:
        """An executor says what it has."""
        returned = self.liveness.heard(beat, now)
        decisions = self._take_back(returned, f"{beat.worker} started anew", now)
        executor = self.liveness.executors[beat.worker]
        if executor.beat is beat and self._offer(beat.worker):
            self.waiting.recall()
        return [*decisions, *self._drain(now)]

    def published(self, version: int, now: float) -> list[Decision]:
        """A policy version is on the log."""
        self.liveness.published(version)
        for worker in self.liveness.executors:
            self._offer(worker)
        return self._drain(now)

    def excuse(self, seconds: float) -> None:
        """The caller could not listen for so long: nobody's silence counts in that time."""
        self.liveness.excuse(seconds)

    def tick(self, now: float) -> list[Decision]:
        """Time has passed. Cheap when there is nothing to look for yet."""
        if now < self._next_liveness:
            return []
        self._next_liveness = now + LIVENESS_SECONDS
        decisions: list[Decision] = []
        for executor in self.liveness.expire(now):
            self.placement.close(executor.worker)
            decisions += self._take_back(list(executor.holds), f"{executor.worker} fell silent", now)
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_SECONDS
            decisions += self._sweep(now)
        return [*decisions, *self._drain(now)]

    def restore(
        self,
        requests: Iterable[TurnRequest],
        dispatches: Iterable[TurnDispatch],
        results: Iterable[TurnResult],
        now: float,
    ) -> list[Decision]:
        """Rebuild the state from the log after a restart; call it before any other event but `published`.

        Turns found outstanding stay with their executors, who have UNHEARD_TTL_SECONDS to be heard from.
        """
        for request in requests:
            turn = self._open(request, now)
            if turn is not None:
                self.waiting.push(turn)
        decisions = self._put_back(dispatches, now)
        for result in results:
            decisions += self.completed(result, now)
        return decisions

    def _open(self, request: TurnRequest, now: float) -> Turn | None:
        """Take a request in; None if it asks for nothing new."""
        known = self.turns.get(request.trajectory_id)
        newest = self.prefixes.finished_turn(request.trajectory_id) if known is None else known.request.turn
        if request.turn <= newest:
            self.counters.duplicate += 1
            return None
        if known is not None:
            self._overtake(known)
        self.counters.requested += 1
        room_tokens = len(request.context) // 4 + request.sampling.max_tokens
        turn = self.turns[request.trajectory_id] = Turn(request, self.epoch, room_tokens, now)
        return turn

    def _overtake(self, turn: Turn) -> None:
        executor = self.liveness.executors.get(turn.worker)
        if executor is not None and executor.beat is not None:
            tokens = len(turn.request.context) // 4
            prefix = Prefix(executor.incarnation, executor.beat.policy_version, tokens)
            self.prefixes.left(turn.request.trajectory_id, turn.worker, prefix)
        self._finish(turn)
        self.counters.finished += 1
        self.counters.overtaken += 1

    def _put_back(self, dispatches: Iterable[TurnDispatch], now: float) -> list[Decision]:
        """Put each turn where its newest dispatch sent it; it waits again if that executor has started anew since."""
        newest: dict[str, TurnDispatch] = {}
        incarnations: dict[str, int] = {}
        for dispatch in dispatches:
            incarnations[dispatch.worker] = max(dispatch.incarnation, incarnations.get(dispatch.worker, 0))
            request = dispatch.request
            turn, known = self.turns.get(request.trajectory_id), newest.get(request.trajectory_id)
            present = turn is not None and turn.request.turn == request.turn
            if present and (known is None or known.request.attempt <= request.attempt):
                newest[request.trajectory_id] = dispatch
        for worker, incarnation in incarnations.items():
            self.liveness.remembered(worker, incarnation, now)
        decisions: list[Decision] = []
        for trajectory_id, dispatch in newest.items():
            turn = self.turns[trajectory_id]
            self.waiting.remove(turn)
            turn.request, turn.worker, turn.lease_until = dispatch.request, dispatch.worker, dispatch.lease_until
            if dispatch.incarnation == incarnations[dispatch.worker]:
                self.liveness.executors[dispatch.worker].holds[trajectory_id] = None
            else:
                decisions += self._reissue(turn, f"{dispatch.worker} started anew", now)
        return decisions

    def _offer(self, worker: str) -> bool:
        """Hand an executor's newest heartbeat to the placement; whether it may now run what it could not before."""
        executor = self.liveness.executors[worker]
        if executor.beat is None:
            return False
        first = worker not in self.placement.index
        more = self.placement.offer(executor.beat, open=executor.open, lag_versions=self.liveness.lag(executor))
        for trajectory_id in executor.holds if first else ():  # put back from the log before it was heard from
            turn = self.turns[trajectory_id]
            self.placement.hold(worker, turn.room_tokens, turn.new_tokens)
        return more

    def _drain(self, now: float) -> list[Decision]:
        """Dispatch waiting turns in their order until one has to wait on."""
        decisions: list[Decision] = []
        while (turn := self.waiting.first()) is not None:
            if turn.request.deadline <= now:
                decisions.append(self._fail(turn, "its deadline has passed", now))
                continue
            ask = self._ask(turn)
            choice = self.placement.choose(ask, now)
            if choice is not None:
                decisions.append(self._dispatch(turn, ask, choice, now))
            elif self.placement.could_run(ask):
                break
            else:
                self.waiting.set_aside()
        return decisions

    def _ask(self, turn: Turn) -> Ask:
        request = turn.request
        return Ask(
            context_tokens=len(request.context) // 4,
            new_tokens=self.lengths.expected(request.sampling.max_tokens),
            room_tokens=turn.room_tokens,
            tie_key=request.trajectory_id if request.turn else request.group_id,
            min_version=request.min_policy_version,
            max_version=request.max_policy_version,
            cached=self.prefixes.cached(request, self.liveness.executors),
        )

    def _dispatch(self, turn: Turn, ask: Ask, choice: Choice, now: float) -> TurnDispatch:
        request = turn.request
        self.waiting.remove(turn)
        self.placement.take(choice, ask, now)
        executor = self.liveness.executors[choice.worker]
        executor.holds[request.trajectory_id] = None
        assert executor.beat is not None
        if request.turn == 0:
            prefix = Prefix(choice.incarnation, executor.beat.policy_version, ask.context_tokens)
            self.prefixes.prompted(request.group_id, choice.worker, prefix)
        cost = choice.cost
        longest = request.sampling.max_tokens * choice.decode_seconds_per_token
        longest += cost.wait_seconds + cost.prefill_seconds
        turn.worker, turn.new_tokens = choice.worker, ask.new_tokens
        turn.lease_until = now + max(LEASE_SECONDS, LEASE_FACTOR * longest)
        self.counters.dispatched += 1
        return TurnDispatch(
            request=request,
            worker=choice.worker,
            slot=choice.slot,
            incarnation=choice.incarnation,
            lease_until=turn.lease_until,
            dispatched_at=now,
            cost=cost,
            queued_at=turn.queued_at,
        )

    def _remember(self, turn: Turn, result: TurnResult) -> None:
        """The tokens of an execution stay in its executor's cache, under the version that it began with."""
        if result.spans:
            tokens = (len(turn.request.context) + len(result.tokens)) // 4
            prefix = Prefix(result.incarnation, result.spans[0].version, tokens)
            self.prefixes.left(turn.request.trajectory_id, result.worker, prefix)

    def _take_back(self, trajectory_ids: list[str], reason: str, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        for trajectory_id in trajectory_ids:
            decisions += self._reissue(self.turns[trajectory_id], reason, now)
        return decisions

    def _reissue(self, turn: Turn, reason: str, now: float) -> list[Decision]:
        """Let an outstanding turn wait again as its next attempt; it fails when that was the last one."""
        if turn.request.attempt + 1 >= self._max_attempts:
            return [self._fail(turn, f"{self._max_attempts} attempts have failed, the last: {reason}", now)]
        self._withdraw(turn)
        turn.queued_at = now
        turn.request = msgspec.structs.replace(turn.request, attempt=turn.request.attempt + 1)
        self.waiting.push(turn)
        self.counters.reissued += 1
        return []

    def _sweep(self, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        for turn in list(self.turns.values()):
            if turn.worker:
                if turn.lease_until <= now:
                    self.counters.expired += 1
                    decisions += self._reissue(turn, f"its lease on {turn.worker} ran out", now)
            elif turn.request.deadline <= now:
                decisions.append(self._fail(turn, "its deadline has passed", now))
        for worker in self.liveness.forget(now):
            self.placement.remove(worker)
        return decisions

    def _fail(self, turn: Turn, reason: str, now: float) -> TurnResult:
        request = turn.request
        self._finish(turn)
        self.counters.failed += 1
        return TurnResult(
            trajectory_id=request.trajectory_id,
            group_id=request.group_id,
            home=request.home,
            turn=request.turn,
            attempt=request.attempt,
            outcome=TurnOutcome.FAILED,
            reason=f"turn {request.turn} was given up: {reason}"[:4096],
            context_tokens=len(request.context) // 4,
            times=TurnTimes(requested_at=request.requested_at, finished_at=now),
        )

    def _finish(self, turn: Turn) -> None:
        self._withdraw(turn)
        del self.turns[turn.request.trajectory_id]
        self.prefixes.finished(turn.request.trajectory_id, turn.request.turn)

    def _withdraw(self, turn: Turn) -> None:
        """Take the turn from the executor that holds it, or from among those that wait."""
        if not turn.worker:
            self.waiting.remove(turn)
            return
        executor = self.liveness.executors.get(turn.worker)
        if executor is not None:
            executor.holds.pop(turn.request.trajectory_id, None)
        self.placement.release(turn.worker, turn.room_tokens, turn.new_tokens)
        turn.worker = ""
