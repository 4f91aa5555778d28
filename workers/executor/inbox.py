"""The inbox: which dispatched turns this executor takes on. Several may share one: its slot is a mailbox.

Keeps true
- What is for another worker is passed over, and changes nothing here but the newest claim: that is of the whole inbox.
- A dispatch for another incarnation is dropped: it was meant for a process that is gone.
- So is one of an older claim than the newest seen: its router has been replaced.
- A turn is taken on once; the same (trajectory, turn, attempt) again is dropped.
- What is taken on never exceeds the turns and tokens that the heartbeat offers; the rest is refused, with the reason.
- Everything taken on is held until it is given back by exactly one `release`.
- What is held is listed by `hashes`, and so is what is answered until that is stored; the latter takes no room.

Pure, and without time: no clock of a router is compared with this machine's.

Example (worker w1, max_turns=1)
    offer(g:2 turn 0, to w2)          -> PASS
    offer(g:0 turn 0, incarnation 7)  -> TAKE
    offer(g:0 turn 0, incarnation 7)  -> DROP duplicate
    offer(g:1 turn 0, incarnation 6)  -> DROP incarnation
    offer(g:1 turn 0, incarnation 7)  -> REFUSE for lack of room
    claimed(40), offer(g:1, claim 12) -> DROP claim
    release(g:0 turn 0)               -> the dispatch, to answer it
    answered(g:0 turn 0)              -> listed still, and there is room for another
    stored(g:0 turn 0)                -> listed no more
"""

import struct
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from rose.schemas.heartbeats import MAX_HELD_TURNS
from rose.schemas.turns import Refusal, TurnDispatch, TurnKey, held_hash


class InboxAction(Enum):
    """What is done with a dispatch."""

    ACCEPT = "take"
    IGNORE = "pass"
    """Another worker's, who reads this inbox too."""
    DROP = "drop"
    """Not ours to answer."""
    REFUSE = "refuse"
    """The router gets the turn back."""


@dataclass(frozen=True, slots=True)
class InboxDecision:
    """The verdict on one dispatch; what is dropped or refused has its reason."""

    action: InboxAction
    reason: str = ""
    refusal: Refusal | None = None


ACCEPTED, IGNORED = InboxDecision(InboxAction.ACCEPT), InboxDecision(InboxAction.IGNORE)


def kv_tokens_needed(dispatch: TurnDispatch) -> int:
    """KV tokens that the turn may come to hold: its context and all that it may sample."""
    return dispatch.request.context_tokens + dispatch.request.sampling.max_tokens


def packed_hashes(hashes: Collection[int]) -> bytes:
    """Turns by `held_hash`, as a heartbeat lists them."""
    return struct.pack(f"<{len(hashes)}Q", *hashes)


class Inbox:
    """The turns that this incarnation of a worker holds, against what it offers."""

    def __init__(self, worker: str, incarnation: int, *, max_turns: int, token_budget: int) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.max_turns = max_turns
        self.token_budget = token_budget
        self.fencing_token = 0
        """The newest claim of a router on this inbox."""
        self._held: dict[TurnKey, tuple[TurnDispatch, int]] = {}
        """With its `held_hash`."""
        self._unstored: dict[TurnKey, int] = {}
        """Answered, and not known to be on the log; with its `held_hash`."""
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def tokens(self) -> int:
        """KV tokens that the held turns may come to need."""
        return self._tokens

    @property
    def listed_turns(self) -> int:
        """Turns that are held, or whose answers are not stored."""
        return len(self._held) + len(self._unstored)

    @property
    def listed_hashes(self) -> list[int]:
        """`held_hash` of every turn that is listed; as many as a heartbeat takes, those that are held first."""
        return [*(execution for _, execution in self._held.values()), *self._unstored.values()][:MAX_HELD_TURNS]

    def on_claim(self, fencing_token: int) -> None:
        """A router has claimed this inbox."""
        self.fencing_token = max(self.fencing_token, fencing_token)

    def on_dispatch(self, dispatch: TurnDispatch, policy_version: int, *, offset: int) -> InboxDecision:
        """Decide on a dispatch that lies at this offset; TAKE holds it until `release`.

        No claim lies behind what is dispatched under it: one that says so, whoever wrote it, claims no more than that.
        """
        older = dispatch.claim < self.fencing_token
        self.on_claim(min(dispatch.claim, offset))
        if dispatch.worker != self.worker:
            return IGNORED
        if older:
            return InboxDecision(InboxAction.DROP, "claim")
        if dispatch.incarnation != self.incarnation:
            return InboxDecision(InboxAction.DROP, "incarnation")
        if dispatch.key in self._held or dispatch.key in self._unstored:
            return InboxDecision(InboxAction.DROP, "duplicate")
        if policy_version < 0:
            return InboxDecision(InboxAction.REFUSE, "no policy version has been proven yet", Refusal.VERSION)
        if len(self._held) >= self.max_turns or self._tokens + kv_tokens_needed(dispatch) > self.token_budget:
            return InboxDecision(InboxAction.REFUSE, "full", Refusal.ROOM)
        self._held[dispatch.key] = dispatch, held_hash(dispatch.key)
        self._tokens += kv_tokens_needed(dispatch)
        return ACCEPTED

    def release(self, key: TurnKey) -> TurnDispatch:
        """Give a held turn back, to be answered. Raises KeyError for one that is not held."""
        dispatch, _ = self._held.pop(key)
        self._tokens -= kv_tokens_needed(dispatch)
        return dispatch

    def on_answer_sent(self, key: TurnKey) -> None:
        """The answer to a turn that is not held is on its way to the log."""
        self._unstored[key] = held_hash(key)

    def on_answer_stored(self, key: TurnKey) -> None:
        """It is there."""
        self._unstored.pop(key, None)
