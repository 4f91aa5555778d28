"""The inbox: which dispatched turns this executor takes on.

Keeps true
- A dispatch for another incarnation is dropped: it was meant for a process that is gone.
- A turn is taken on once; the same (trajectory, turn, attempt) again is dropped.
- What is taken on never exceeds the turns and tokens that the heartbeat offers; the rest is refused, with the reason.
- Everything taken on is given back by exactly one `release`.

Pure: `now` is unix seconds, as the lease is.

Example (max_turns=1)
    offer(g:0 turn 0, incarnation 7)  -> TAKE
    offer(g:0 turn 0, incarnation 7)  -> DROP duplicate
    offer(g:1 turn 0, incarnation 6)  -> DROP incarnation
    offer(g:1 turn 0, incarnation 7)  -> REFUSE full
    release(g:0 turn 0)               -> the dispatch, to answer it
"""

from dataclasses import dataclass
from enum import Enum

from schemas.arrays import count
from schemas.turns import TurnDispatch, TurnKey


class Verdict(Enum):
    TAKE = "take"
    DROP = "drop"
    """Not ours to answer."""
    REFUSE = "refuse"
    """The router gets the turn back."""


@dataclass(frozen=True, slots=True)
class Answer:
    verdict: Verdict
    reason: str = ""


TAKE = Answer(Verdict.TAKE)


def tokens_of(dispatch: TurnDispatch) -> int:
    """KV tokens that the turn may come to hold: its context and all that it may sample."""
    return count(dispatch.request.context) + dispatch.request.sampling.max_tokens


class Inbox:
    """The turns that this incarnation holds, against what it offers."""

    def __init__(self, incarnation: int, *, max_turns: int, token_budget: int) -> None:
        self.incarnation = incarnation
        self.max_turns = max_turns
        self.token_budget = token_budget
        self._held: dict[TurnKey, TurnDispatch] = {}
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def tokens(self) -> int:
        """KV tokens that the held turns may come to need."""
        return self._tokens

    def offer(self, dispatch: TurnDispatch, policy_version: int, now: float) -> Answer:
        """Decide on a dispatch; TAKE holds it until `release`."""
        request = dispatch.request
        if dispatch.incarnation != self.incarnation:
            return Answer(Verdict.DROP, "incarnation")
        if request.key in self._held:
            return Answer(Verdict.DROP, "duplicate")
        if now > dispatch.lease_until:
            return Answer(Verdict.REFUSE, "the lease has run out")
        if policy_version < max(request.min_policy_version, 0):
            return Answer(Verdict.REFUSE, f"policy version {policy_version} is too old")
        if request.max_policy_version is not None and policy_version > request.max_policy_version:
            return Answer(Verdict.REFUSE, f"policy version {policy_version} is too new")
        if len(self._held) >= self.max_turns or self._tokens + tokens_of(dispatch) > self.token_budget:
            return Answer(Verdict.REFUSE, "full")
        self._held[request.key] = dispatch
        self._tokens += tokens_of(dispatch)
        return TAKE

    def release(self, key: TurnKey) -> TurnDispatch:
        """Give a held turn back, to be answered. Raises KeyError for one that is not held."""
        dispatch = self._held.pop(key)
        self._tokens -= tokens_of(dispatch)
        return dispatch
