"""Assignments: which executor has which turn, by the router's state and by the executors' heartbeats.

Keeps true
- A turn is assigned to one executor, or it is in the queue.
- A turn that was taken from an executor without a result leaves a ghost there. The ghost fills room. If the executor
  lists the execution while the turn is still queued, the turn is assigned to the executor again. If the turn was
  dispatched elsewhere, it runs twice, and the first COMPLETED result wins.
- An execution that a LIVE or STALE executor does not list for LISTING_SECONDS is lost. These seconds are measured on
  the liveness clock.
- A ghost is dropped once it was listed and is not listed any more, or once its executor's heartbeats have not listed it
  for LISTING_SECONDS of `Executor.observed_seconds`. An executor may send heartbeats before it has read a dispatch,
  also after a silence.

Example:
    t's attempt 0 is dispatched to w1; w1 falls silent   -> a ghost at w1, t is queued as attempt 1
    w1 returns and lists attempt 0, t is still queued    -> t is assigned to w1 as attempt 0; nothing is lost
    w1 lists attempt 0 after attempt 1 went to w2        -> both run t; the ghost takes room at w1
    w1 does not list attempt 0 any more                  -> the ghost is dropped
    w1 has not listed attempt 0 for LISTING_SECONDS      -> the ghost is dropped
"""

from collections.abc import Iterable

from rose.pipeline.routing.liveness import MAX_CLOCK_STEP_SECONDS, Execution, Executor, ListedExecutions, Liveness
from rose.pipeline.routing.placement import Placement
from rose.pipeline.routing.turn import Turn
from rose.pipeline.routing.turn_queue import TurnQueue
from rose.schemas.heartbeats import ExecutorState
from rose.schemas.turns import TurnDispatch, TurnKey, TurnResult, held_hash

LISTING_SECONDS = 5.0
"""How long an executor may send heartbeats without listing a turn that was dispatched to it. An executor lists a turn
within one step after it took the turn, and until the result is on the log."""


def execution_key(key: TurnKey) -> bytes:
    """The 8 bytes that stand for an execution in a heartbeat's `holds`."""
    return held_hash(key).to_bytes(8, "little")


class Assignments:
    """Maintains the turns' `worker`, the executors' `holds` and `ghosts`, and the room that executions take."""

    def __init__(self, turns: dict[str, Turn], liveness: Liveness, placement: Placement, queue: TurnQueue) -> None:
        self._turns = turns
        self._liveness = liveness
        self._placement = placement
        self._queue = queue

    def assign(self, turn: Turn, worker: str, now: float) -> None:
        """Assign a turn that is not in the queue and whose room the placement has charged already."""
        turn.worker = worker
        turn.on_dispatched()
        turn.execution_key = execution_key(turn.key)
        if turn.next_attempt <= turn.attempt:
            turn.next_attempt = turn.attempt + 1
        executor = self._liveness.executors[worker]
        turn.seen_at, turn.seen_clock, turn.unlisted_since = now, self._liveness.clock, executor.observed_seconds
        executor.holds[turn.execution_key] = turn

    def on_result(self, result: TurnResult) -> None:
        """Drop the ghost whose execution this result ends, if there is one."""
        executor = self._liveness.executors.get(result.worker or "")
        if executor is not None and executor.ghosts and executor.incarnation == result.incarnation:
            self._drop_ghost(executor, execution_key(result.key))

    def last_progress_at(self, turn: Turn) -> float:
        """Since when a turn is queued, or when its executor last listed it, on the router's clock."""
        if not turn.worker:
            return turn.queued_at
        executor = self._liveness.executors[turn.worker]
        return executor.heartbeat_at if turn.execution_key in executor.listed else turn.seen_at

    def complete(self, turn: Turn) -> None:
        """Unassign a turn whose executor has answered or has ended: its room is free."""
        executor = self._unassign(turn)
        if executor is not None:
            self._placement.release(executor.worker, turn.room_tokens, turn.new_tokens)

    def revoke(self, turn: Turn, *, charged: bool) -> None:
        """Take a turn from an executor that has not answered: a ghost stays.

        `charged`: whether the turn's failure is taken back if the executor returns.
        """
        execution = turn.execution_key
        executor = self._unassign(turn)
        if executor is not None:
            room = turn.room_tokens, turn.new_tokens
            executor.ghosts[execution] = Execution(*turn.key, *room, charged, turn.unlisted_since)

    def turns_of(self, executor: Executor) -> list[Turn]:
        """The turns that are assigned to the executor, oldest dispatch first."""
        return list(executor.holds.values())

    def prefill_backlog_seconds(self, executor: Executor) -> float:
        """Lower bound of the seconds of prefill that an executor has not begun, by its newest heartbeat.

        Counts the turns that wait in the engine, which begins turns in the order of their dispatches, and the turns
        that the heartbeat does not list yet.
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
        """Drop all ghosts of an incarnation that has ended, and release their room."""
        for execution in list(executor.ghosts):
            self._drop_ghost(executor, execution)

    def forgive(self, executor: Executor) -> None:
        """Take back the failures that were charged for a silence which has ended."""
        for execution, ghost in executor.ghosts.items():
            if ghost.charged:
                executor.ghosts[execution] = ghost._replace(charged=False)
                turn = self._turns.get(ghost.trajectory_id)
                if turn is not None and turn.turn == ghost.turn and turn.failures:
                    turn.failures -= 1

    def reconcile(self, executor: Executor, now: float) -> list[Turn]:
        """Compare the assignments with the executions that the newest heartbeat lists; return the lost turns.

        If the executor is stopping, all assigned turns that it does not list are returned: the turns that it lists are
        answered, and their results are about to be read.
        """
        heartbeat, holds, previous = executor.heartbeat, executor.holds, executor.listed
        assert heartbeat is not None
        clock, previous_sight = self._liveness.clock, (executor.heartbeat_at, executor.heartbeat_clock)
        executor.observed_seconds += min(clock - executor.heartbeat_clock, MAX_CLOCK_STEP_SECONDS)
        executor.heartbeat_at, executor.heartbeat_clock = now, clock
        if heartbeat.holds != previous.packed:  # most heartbeats list the same executions as the heartbeat before
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
        """Restore assignments and ghosts from the dispatches on the log; return the turns whose executor has restarted.

        Each turn is assigned to the executor of its newest dispatch. Older dispatches, and dispatches of turns that are
        not unfinished, become ghosts and fill room until heartbeats show whether they run. Attempt numbers and
        failures go on from the newest dispatch. The returned turns stay assigned until the results on the log are
        known, because the earlier incarnation may have answered them.
        """
        dispatches_of: dict[str, dict[bytes, TurnDispatch]] = {}
        ghosts_of: dict[tuple[str, int, int], dict[bytes, Execution]] = {}
        """Ghosts of turns that are not unfinished, by incarnation. Their dispatches are many and large, so they are not
        kept."""
        newest_of: dict[str, TurnDispatch] = {}
        """The newest dispatch to each worker's newest incarnation, by worker."""
        for dispatch in dispatches:
            if dispatch.withdrawn:
                continue
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
            turn.failures = newest.failures  # the request comes from its own topic: a dispatch holds only a copy
            turn.attempt = newest.attempt
            turn.prefill_seconds = newest.cost.prefill_seconds
            if newest.partial is not None:
                turn.keep_partial(newest.partial)
            self._queue.remove(turn)
            self.assign(turn, newest.worker, now)
            if _incarnation_of(newest) != _incarnation_of(newest_of[newest.worker]):
                orphans.append(turn)
                turn.unlisted_since = -LISTING_SECONDS  # the incarnation that ran the turn has ended
        return orphans

    def reservations(self, executor: Executor) -> list[tuple[int, float]]:
        """Tokens of room and expected new tokens, for each assigned turn and each ghost."""
        assigned = [(turn.room_tokens, turn.new_tokens) for turn in self.turns_of(executor)]
        return assigned + [(ghost.room_tokens, ghost.new_tokens) for ghost in executor.ghosts.values()]

    def _reassign_ghost(self, executor: Executor, execution: bytes, ghost: Execution, now: float) -> None:
        turn = self._turns.get(ghost.trajectory_id)
        if turn is None or turn.worker or turn.turn != ghost.turn or turn.on_hold:
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
    """Worker, slot and incarnation that a dispatch is meant for."""
    return dispatch.worker, dispatch.slot, dispatch.incarnation


def _ghost_of(dispatch: TurnDispatch, room_tokens: int) -> Execution:
    """The ghost of a dispatch that was read back from the log."""
    return Execution(*dispatch.key, room_tokens, 0.0, charged=False, unlisted_since=0.0)


def _is_newer(dispatch: TurnDispatch, known: TurnDispatch | None) -> bool:
    """Whether `dispatch` is newer than `known`, a dispatch to the same worker.

    Incarnations grow within an inbox. Dispatches in different inboxes are compared by the routers' clocks.
    """
    if known is None:
        return True
    if dispatch.slot == known.slot:
        return (dispatch.incarnation, dispatch.dispatched_at) > (known.incarnation, known.dispatched_at)
    return dispatch.dispatched_at > known.dispatched_at
