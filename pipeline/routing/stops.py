"""Stops: dispatches that tell executors to end the executions of a turn that is withdrawn or on hold. Pure.

Keeps true
- Each execution that may run is told to stop, also one that was taken from a silent executor: the executor may return.
- A stop that is on the log is not repeated by the next router.
- A stop carries the request that stops the turn in place of the turn's own, so no context.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from rose.pipeline.routing.assignments import execution_key
from rose.pipeline.routing.liveness import Executor
from rose.pipeline.routing.turn_queue import ReceivedRequest
from rose.schemas.turns import PlacementCost, TurnDispatch, TurnKey

NO_COST = PlacementCost(wait_seconds=0.0, prefill_seconds=0.0, decode_seconds=0.0)


def stops_of(
    stopping: ReceivedRequest,
    attempts: int,
    executors: Iterable[Executor],
    fencing_tokens: Mapping[int, int],
    now: float,
) -> Iterator[TurnDispatch]:
    """Yield a stop for each execution of a turn, all of which are ghosts.

    `stopping`: the request that withdraws the turn or puts the turn on hold. `attempts`: greater than the number of
    each attempt.
    """
    request = stopping.request
    able = [executor for executor in executors if executor.ghosts]
    for attempt in range(attempts):  # lookups, because all ghosts of a fleet are many
        execution = execution_key(TurnKey(request.trajectory_id, request.turn, attempt))
        for executor in able:
            if execution in executor.ghosts:
                yield stop_of(stopping, executor, attempt, fencing_tokens, now)


def stop_of(
    stopping: ReceivedRequest, executor: Executor, attempt: int, fencing_tokens: Mapping[int, int], now: float
) -> TurnDispatch:
    """Return the dispatch that stops an attempt. `fencing_tokens`: by inbox slot; `now`: the router's clock."""
    return TurnDispatch(
        request_wire=msgspec.Raw(stopping.request_bytes),
        home=stopping.request.home,
        offset=stopping.offset,
        attempt=attempt,
        worker=executor.worker,
        slot=executor.slot,
        incarnation=executor.incarnation,
        claim=fencing_tokens.get(executor.slot, 0),
        dispatched_at=now,
        cost=NO_COST,
        queued_at=now,
        withdrawn=True,
    )


@dataclass(slots=True)
class RestoredStops:
    """The stopping requests and stops on the log that a new router reads back."""

    stopping: dict[tuple[str, int], ReceivedRequest] = field(default_factory=dict)
    """The requests that stop turns, by trajectory and turn."""
    _stopped: set[tuple[str, int, bytes]] = field(default_factory=set)
    """Worker, incarnation and execution of each stop on the log."""

    def on_stopping_request(self, received: ReceivedRequest) -> None:
        """Add a request that stops its turn."""
        self.stopping[received.request.trajectory_id, received.request.turn] = received

    def on_request_again(self, received: ReceivedRequest) -> None:
        """Forget the hold of a turn that is requested again."""
        self.stopping.pop((received.request.trajectory_id, received.request.turn), None)

    def reading(self, dispatches: Iterable[TurnDispatch]) -> Iterator[TurnDispatch]:
        """Yield all dispatches but the stops, which are noted."""
        for dispatch in dispatches:
            if dispatch.withdrawn:
                self._stopped.add((dispatch.worker, dispatch.incarnation, execution_key(dispatch.key)))
            else:
                yield dispatch

    def missing(
        self, executors: Iterable[Executor], fencing_tokens: Mapping[int, int], now: float
    ) -> Iterator[TurnDispatch]:
        """Yield the stops that are not on the log. The ghosts of answered executions must be dropped before."""
        for executor in executors:
            for execution, ghost in executor.ghosts.items():
                stopping = self.stopping.get((ghost.trajectory_id, ghost.turn))
                if stopping and (executor.worker, executor.incarnation, execution) not in self._stopped:
                    yield stop_of(stopping, executor, ghost.attempt, fencing_tokens, now)
