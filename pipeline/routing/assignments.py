"""Custody: which executor has which turn, by the router's books and by the executors' own word.

Keeps true
- A turn is in the books of one executor, or it waits.
- What was taken from an executor without a word of it stays there as a ghost: it fills room, and the turn comes back to
  it if it still waits once the executor is heard to hold it. If it was dispatched elsewhere it runs twice, and the
  first COMPLETED result wins.
- An execution that a living executor does not list for LEASE_SECONDS is lost. Only time in which somebody was heard
  counts, by the router's clock alone.
- A ghost goes once it was listed and is no more, or was not for LEASE_SECONDS in which its executor was heard itself:
  that one may beat before it has read what was sent to it, also when it comes back.

Example
    t's attempt 0 is dispatched to w1; w1 falls silent   -> a ghost at w1, t waits as attempt 1
    w1 is heard again and lists attempt 0, t waits on    -> t is w1's again, as attempt 0, and nothing was lost
    w1 lists it after attempt 1 went to w2               -> both run it; w1's room is as much less
    w1 lists it no more, or not within the lease         -> the ghost is gone
"""

from collections.abc import Iterable

from rose.pipeline.routing.liveness import MAX_CLOCK_STEP_SECONDS, Execution, Executor, ListedExecutions, Liveness
from rose.pipeline.routing.placement import Placement
from rose.pipeline.routing.turn import Turn
from rose.pipeline.routing.turn_queue import TurnQueue
from rose.schemas.heartbeats import ExecutorState
from rose.schemas.turns import TurnDispatch, TurnKey, TurnResult, held_hash

LISTING_SECONDS = 5.0
"""How long an executor may beat without listing a turn that was sent to it. It lists what it takes within one step, and
until the answer is on the log."""


def execution_key(key: TurnKey) -> bytes:
    """What stands for an execution in a heartbeat's `holds`."""
    return held_hash(key).to_bytes(8, "little")


class Assignments:
    """The books, in the turns' `worker` and the executors' `holds` and `ghosts`; and the room that they take."""

    def __init__(self, turns: dict[str, Turn], liveness: Liveness, placement: Placement, queue: TurnQueue) -> None:
        self._turns = turns
        self._liveness = liveness
        self._placement = placement
        self._queue = queue

    def assign(self, turn: Turn, worker: str, now: float) -> None:
        """Enter a turn that does not wait any more and whose room is taken already."""
        turn.worker = worker
        turn.on_dispatched()
        turn.execution_key = execution_key(turn.key)
        if turn.next_attempt <= turn.attempt:
            turn.next_attempt = turn.attempt + 1
        executor = self._liveness.executors[worker]
        turn.seen_at, turn.seen_clock, turn.unlisted_since = now, self._liveness.clock, executor.observed_seconds
        executor.holds[turn.execution_key] = turn

    def on_result(self, result: TurnResult) -> None:
        """An execution that may have been a ghost has ended."""
        executor = self._liveness.executors.get(result.worker or "")
        if executor is not None and executor.ghosts and executor.incarnation == result.incarnation:
            self._drop_ghost(executor, execution_key(result.key))

    def last_progress_at(self, turn: Turn) -> float:
        """Since when a turn waits, or when its executor last said that it has it."""
        if not turn.worker:
            return turn.queued_at
        executor = self._liveness.executors[turn.worker]
        return executor.heartbeat_at if turn.execution_key in executor.listed else turn.seen_at

    def complete(self, turn: Turn) -> None:
        """The executor that has the turn has answered it, or it is not there any more."""
        executor = self._unassign(turn)
        if executor is not None:
            self._placement.release(executor.worker, turn.room_tokens, turn.new_tokens)

    def revoke(self, turn: Turn, *, charged: bool) -> None:
        """The turn is taken from an executor that has not answered it."""
        execution = turn.execution_key
        executor = self._unassign(turn)
        if executor is not None:
            room = turn.room_tokens, turn.new_tokens
            executor.ghosts[execution] = Execution(*turn.key, *room, charged, turn.unlisted_since)

    def turns_of(self, executor: Executor) -> list[Turn]:
        """The turns in its books."""
        return list(executor.holds.values())

    def prefill_backlog_seconds(self, executor: Executor) -> float:
        """Seconds of prefill that its newest heartbeat says lie before it at least: of the turns that wait in its
        engine, which begins them in the order in which they came, and of those sent since.
        """
        heartbeat, seconds = executor.heartbeat, 0.0
        waiting = 0 if heartbeat is None else heartbeat.rollout.waiting
        for execution, turn in reversed(executor.holds.items()):
            if execution in executor.listed:
                if not waiting:
                    break
                waiting -= 1
            seconds += turn.prefill_seconds
        return seconds

    def drop_ghosts(self, executor: Executor) -> None:
        """Forget what a start that is no more may still have run."""
        for execution in list(executor.ghosts):
            self._drop_ghost(executor, execution)

    def forgive(self, executor: Executor) -> None:
        """It was only silent: what its silence was charged with is given back."""
        for execution, ghost in executor.ghosts.items():
            if ghost.charged:
                executor.ghosts[execution] = ghost._replace(charged=False)
                turn = self._turns.get(ghost.trajectory_id)
                if turn is not None and turn.turn == ghost.turn and turn.failures:
                    turn.failures -= 1

    def reconcile(self, executor: Executor, now: float) -> list[Turn]:
        """Compare the books with what its newest heartbeat lists; return the turns that it has lost.

        Of one that stops these are all that it has not answered: what it lists is answered, and about to be read.
        """
        heartbeat, holds, previous = executor.heartbeat, executor.holds, executor.listed
        assert heartbeat is not None
        clock, previous_sight = self._liveness.clock, (executor.heartbeat_at, executor.heartbeat_clock)
        executor.observed_seconds += min(clock - executor.heartbeat_clock, MAX_CLOCK_STEP_SECONDS)
        executor.heartbeat_at, executor.heartbeat_clock = now, clock
        if heartbeat.holds != previous.packed:  # most list what the one before did
            executor.listed = ListedExecutions(heartbeat.holds)
        if heartbeat.holds == b"".join(holds) and not executor.ghosts:
            return []
        listed = executor.listed
        missing = [turn for each, turn in holds.items() if each not in listed]
        for turn in missing:
            if turn.execution_key in previous:
                turn.seen_at, turn.seen_clock = previous_sight
                turn.unlisted_since = -LISTING_SECONDS
        for each, ghost in list(executor.ghosts.items()):
            if each in listed:
                self._reassign_ghost(executor, each, ghost, now)
            elif each in previous or executor.observed_seconds - ghost.unlisted_since >= LISTING_SECONDS:
                self._drop_ghost(executor, each)
        if heartbeat.state is ExecutorState.STOPPING:
            return missing
        return [turn for turn in missing if clock - turn.seen_clock >= LISTING_SECONDS]

    def restore(self, dispatches: Iterable[TurnDispatch], now: float) -> list[Turn]:
        """Enter what the log says was dispatched; return the turns whose executor has started anew since, which are its
        own until the log's results are known: it may have answered them before.

        Each turn goes where its newest dispatch sent it. Older ones are ghosts, as are those to other turns, and
        fill room until heartbeats tell whether they run. No attempt is numbered twice, and no failure is forgotten.
        """
        dispatches_of: dict[str, dict[bytes, TurnDispatch]] = {}
        ghosts_of: dict[tuple[str, int, int], dict[bytes, Execution]] = {}
        """By start: of turns that are not the present ones of their trajectories. Their dispatches are many, and large.
        """
        newest_of: dict[str, TurnDispatch] = {}
        """By worker, the newest to its newest start."""
        for dispatch in dispatches:
            if _is_newer(dispatch, newest_of.get(dispatch.worker)):
                newest_of[dispatch.worker] = dispatch
            turn = self._turns.get(dispatch.request.trajectory_id)
            if turn is not None and turn.turn == dispatch.request.turn:
                dispatches_of.setdefault(dispatch.request.trajectory_id, {})[execution_key(dispatch.key)] = dispatch
            else:
                room_tokens = dispatch.request.context_tokens + dispatch.request.sampling.max_tokens
                ghosts_of.setdefault(_incarnation_of(dispatch), {})[execution_key(dispatch.key)] = _ghost_of(
                    dispatch, room_tokens
                )
        for worker, dispatch in newest_of.items():
            executor = self._liveness.restore_executor(worker, dispatch.slot, dispatch.incarnation)
            executor.ghosts.update(ghosts_of.get(_incarnation_of(dispatch), {}))
        orphans: list[Turn] = []
        for trajectory_id, found in dispatches_of.items():
            turn = self._turns[trajectory_id]
            newest = max(found.values(), key=lambda dispatch: dispatch.attempt)
            for execution, dispatch in found.items():
                if dispatch is not newest and _incarnation_of(dispatch) == _incarnation_of(newest_of[dispatch.worker]):
                    executor = self._liveness.executors[dispatch.worker]
                    executor.ghosts[execution] = _ghost_of(dispatch, turn.room_tokens)
            turn.failures = newest.failures  # of its request the log has the original: what is dispatched is a copy
            turn.attempt = newest.attempt
            turn.prefill_seconds = newest.cost.prefill_seconds
            if newest.begun is not None:
                turn.keep_partial(newest.begun)
            self._queue.remove(turn)
            self.assign(turn, newest.worker, now)
            if _incarnation_of(newest) != _incarnation_of(newest_of[newest.worker]):
                orphans.append(turn)
                turn.unlisted_since = -LISTING_SECONDS  # where it ran nothing runs any more
        return orphans

    def reservations(self, executor: Executor) -> list[tuple[int, float]]:
        """Tokens of room, and expected new ones, of each execution that it may be running."""
        assigned = [(turn.room_tokens, turn.new_tokens) for turn in self.turns_of(executor)]
        return assigned + [(ghost.room_tokens, ghost.new_tokens) for ghost in executor.ghosts.values()]

    def _reassign_ghost(self, executor: Executor, execution: bytes, ghost: Execution, now: float) -> None:
        turn = self._turns.get(ghost.trajectory_id)
        if turn is None or turn.worker or turn.turn != ghost.turn:
            return
        del executor.ghosts[execution]
        self._queue.remove(turn)
        turn.attempt = ghost.attempt
        turn.room_tokens, turn.new_tokens = ghost.room_tokens, ghost.new_tokens
        self.assign(turn, executor.worker, now)

    def _unassign(self, turn: Turn) -> Executor | None:
        executor = self._liveness.executors.get(turn.worker)
        turn.worker = ""
        if executor is not None:
            executor.holds.pop(turn.execution_key, None)
        return executor

    def _drop_ghost(self, executor: Executor, execution: bytes) -> None:
        ghost = executor.ghosts.pop(execution, None)
        if ghost is not None:
            self._placement.release(executor.worker, ghost.room_tokens, ghost.new_tokens)


def _incarnation_of(dispatch: TurnDispatch) -> tuple[str, int, int]:
    """Which start of which worker it is meant for."""
    return dispatch.worker, dispatch.slot, dispatch.incarnation


def _ghost_of(dispatch: TurnDispatch, room_tokens: int) -> Execution:
    """It was sent before the log was read back, and may still run."""
    return Execution(*dispatch.key, room_tokens, 0.0, charged=False, unlisted_since=0.0)


def _is_newer(dispatch: TurnDispatch, known: TurnDispatch | None) -> bool:
    """Of two to one worker. Within an inbox incarnations grow; between two, routers' clocks are all that there is."""
    if known is None:
        return True
    if dispatch.slot == known.slot:
        return (dispatch.incarnation, dispatch.dispatched_at) > (known.incarnation, known.dispatched_at)
    return dispatch.dispatched_at > known.dispatched_at
