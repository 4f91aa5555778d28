"""Attempts: what becomes of a turn whose attempt has ended without its result.

Keeps true
- It waits again under a new attempt, once; where its context is torn, for its anchor.
- It is FAILED after `max_attempts` attempts that ended by somebody's fault, or after its patience without progress:
  nobody took it up, or nobody was heard to run it. What runs has all the time in the world.
- A turn that has ended, one way or the other, is in no books: the executor that may run it yet has a ghost.

Example, of at most two attempts
    its executor falls silent            -> waits as attempt 1, one failure
    that of attempt 1 refuses, no room   -> waits as attempt 2, nobody's fault
    that of attempt 2 has lost it        -> FAILED
"""

from pipeline.routing.counters import Counters
from pipeline.routing.custody import Custody
from pipeline.routing.placement import Placement
from pipeline.routing.prefixes import Prefixes
from pipeline.routing.turn import Turn
from pipeline.routing.waiting import Waiting
from schemas.turns import TurnOutcome, TurnResult, TurnTimes

MOST_ATTEMPTS = 2**16
"""As many as a dispatch can number; a turn that was moved so often is given up."""


class Attempts:
    """The ways of a turn from an executor: to those that wait, or out of the router's books."""

    def __init__(
        self,
        turns: dict[str, Turn],
        waiting: Waiting,
        custody: Custody,
        placement: Placement,
        prefixes: Prefixes,
        counters: Counters,
        *,
        max_attempts: int,
    ) -> None:
        self._turns = turns
        self._waiting = waiting
        self._custody = custody
        self._placement = placement
        self._prefixes = prefixes
        self._counters = counters
        self._max_attempts = max_attempts

    def reissue(self, turn: Turn, reason: str, now: float, *, fault: bool) -> list[TurnResult]:
        """Let a turn that nobody has any more wait under a new attempt; it fails when that is one too many."""
        turn.failures += fault
        turn.queued_at = now
        turn.attempt = min(turn.next_attempt, MOST_ATTEMPTS - 1)
        self._waiting.push(turn)
        if turn.failures >= self._max_attempts:
            return [self._fail(turn, f"{turn.failures} attempts have failed, the last: {reason}", now)]
        if turn.next_attempt >= MOST_ATTEMPTS:
            return [self._fail(turn, f"it was moved {MOST_ATTEMPTS} times, the last: {reason}", now)]
        self._counters.reissued += 1
        return []

    def hold(self, turn: Turn, now: float) -> None:
        """Nobody can read the turn's context back: it waits for its anchor."""
        turn.queued_at = now
        turn.attempt = min(turn.next_attempt, MOST_ATTEMPTS - 1)
        self._waiting.hold(turn)
        self._counters.torn += 1

    def overdue(self, now: float) -> list[TurnResult]:
        """Give up the turns that made no progress within their patience."""
        old = [turn for turn in self._turns.values() if turn.queued_at + turn.patience_seconds <= now]
        late = [turn for turn in old if self._custody.progress_at(turn) + turn.patience_seconds <= now]
        return [self.give_up(turn, now) for turn in late]

    def give_up(self, turn: Turn, now: float) -> TurnResult:
        """Its patience is over: it fails, and the reason says what it waited for."""
        patience = f"{turn.patience_seconds:g} s"
        if turn.worker:
            return self._fail(turn, f"{turn.worker}, which has it, was not heard to run it for {patience}", now)
        if turn.seeded and self._placement.refuses_seeds:
            return self._fail(turn, "no executor takes turns with a seed", now)
        if turn.torn:
            return self._fail(turn, f"its context is torn, and nobody asked again with an anchor in {patience}", now)
        return self._fail(turn, f"no executor has taken it up in {patience}", now)

    def finish(self, turn: Turn, *, answered: bool) -> None:
        """Take a turn out of the books. `answered`: its executor has ended the execution, whose room is free."""
        if not turn.worker:
            self._waiting.remove(turn)
        elif answered:
            self._custody.ended(turn)
        else:
            self._custody.taken(turn, charged=False)
        del self._turns[turn.trajectory_id]
        self._prefixes.finished(turn.trajectory_id, turn.trajectory, turn.turn)

    def _fail(self, turn: Turn, reason: str, now: float) -> TurnResult:
        self.finish(turn, answered=False)
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
