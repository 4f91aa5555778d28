"""The inbox: decides which dispatched turns this executor accepts. Several executors may share one inbox.

Keeps true
- A dispatch to another worker is ignored. It changes only the newest fencing token, which belongs to the whole inbox.
- A dispatch to another incarnation is dropped: the process that it was sent to is gone.
- A dispatch with an older fencing token than the newest seen is dropped: its router has been replaced.
- A turn is accepted once; a second dispatch of the same (trajectory, turn, attempt) is dropped.
- Accepted turns never exceed the turns and tokens that the heartbeat offers; further turns are refused with a reason.
- Every accepted turn is held until exactly one `release`, also if it is withdrawn.
- `listed_hashes` lists the held turns, and the answered turns until their answers are stored. Answered turns take no
  room.

Pure, and without time: no clock of a router is compared with this machine's clock.

Example (worker w1, max_turns=1)
    on_dispatch(g:2 turn 0, to w2)               -> IGNORE
    on_dispatch(g:0 turn 0, incarnation 7)       -> ACCEPT
    on_dispatch(g:0 turn 0, incarnation 7)       -> DROP duplicate
    on_dispatch(g:1 turn 0, incarnation 6)       -> DROP incarnation
    on_dispatch(g:1 turn 0, incarnation 7)       -> REFUSE for lack of room
    on_claim(40), on_dispatch(g:1, claim 12)     -> DROP claim
    release(g:0 turn 0)                          -> the dispatch, to answer it
    on_answer_sent(g:0 turn 0)                   -> still listed, and there is room for another turn
    on_answer_stored(g:0 turn 0)                 -> no longer listed
"""

import struct
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from rose.schemas.heartbeats import MAX_HELD_TURNS
from rose.schemas.turns import Refusal, TurnDispatch, TurnKey, held_hash


class InboxAction(Enum):
    """The action that the executor takes on a dispatch."""

    ACCEPT = "take"
    IGNORE = "pass"
    """The dispatch is to another worker that reads the same inbox."""
    DROP = "drop"
    """The dispatch is stale or a duplicate, and gets no answer."""
    REFUSE = "refuse"
    """The turn is returned to the router."""
    STOP = "stop"
    """The held turn is withdrawn: it is stopped and answered."""


@dataclass(frozen=True, slots=True)
class InboxDecision:
    """The decision on one dispatch. DROP and REFUSE have a reason."""

    action: InboxAction
    reason: str = ""
    refusal: Refusal | None = None


ACCEPTED, IGNORED = InboxDecision(InboxAction.ACCEPT), InboxDecision(InboxAction.IGNORE)
STOPPED = InboxDecision(InboxAction.STOP, "its trajectory has ended")


def kv_tokens_needed(dispatch: TurnDispatch) -> int:
    """Return the most KV tokens that the turn may hold: its context and all tokens that it may sample."""
    return dispatch.request.context_tokens + dispatch.request.sampling.max_tokens


def packed_hashes(hashes: Collection[int]) -> bytes:
    """Pack `held_hash` values as a heartbeat lists them: little-endian unsigned 64-bit integers."""
    return struct.pack(f"<{len(hashes)}Q", *hashes)


class Inbox:
    """The turns that one incarnation of a worker holds, within the turns and tokens that it offers."""

    def __init__(self, worker: str, incarnation: int, *, max_turns: int, token_budget: int) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.max_turns = max_turns
        """Most turns that may be held."""
        self.token_budget = token_budget
        """Most KV tokens that the held turns may need."""
        self.tokens = 0
        """KV tokens that the held turns may need."""
        self.fencing_token = 0
        """The newest fencing token of a router in this inbox."""
        self._held: dict[TurnKey, tuple[TurnDispatch, int]] = {}
        """Held turns, each with its `held_hash`."""
        self._unstored: dict[TurnKey, int] = {}
        """Answered turns whose answers are not known to be on the log, each with its `held_hash`."""

    def __len__(self) -> int:
        return len(self._held)

    def offer(self, *, max_turns: int, token_budget: int) -> None:
        """Accept turns up to these limits from now on. Turns that are held stay."""
        self.max_turns, self.token_budget = max_turns, token_budget

    @property
    def listed_turns(self) -> int:
        """Number of turns that are held, or whose answers are not stored."""
        return len(self._held) + len(self._unstored)

    @property
    def listed_hashes(self) -> list[int]:
        """`held_hash` of every listed turn, held turns first, and at most as many as a heartbeat takes."""
        return [*(execution for _, execution in self._held.values()), *self._unstored.values()][:MAX_HELD_TURNS]

    def on_claim(self, fencing_token: int) -> None:
        """Record the fencing token of a router that has taken this inbox."""
        self.fencing_token = max(self.fencing_token, fencing_token)

    def on_dispatch(self, dispatch: TurnDispatch, policy_version: int, *, offset: int) -> InboxDecision:
        """Decide on the dispatch at `offset`. An accepted turn is held until `release`.

        `policy_version`: the version that serves, negative if none does. A fencing token is the offset of an earlier
        record of the inbox, so a token above the dispatch's own offset counts as that offset.
        """
        older = dispatch.claim < self.fencing_token
        self.on_claim(min(dispatch.claim, offset))
        if dispatch.worker != self.worker:
            return IGNORED
        if older:
            return InboxDecision(InboxAction.DROP, "claim")
        if dispatch.incarnation != self.incarnation:
            return InboxDecision(InboxAction.DROP, "incarnation")
        if dispatch.withdrawn:
            return STOPPED if dispatch.key in self._held else InboxDecision(InboxAction.DROP, "withdrawn")
        if dispatch.key in self._held or dispatch.key in self._unstored:
            return InboxDecision(InboxAction.DROP, "duplicate")
        if policy_version < 0:
            return InboxDecision(InboxAction.REFUSE, "no policy version has been proven yet", Refusal.VERSION)
        if len(self._held) >= self.max_turns or self.tokens + kv_tokens_needed(dispatch) > self.token_budget:
            return InboxDecision(InboxAction.REFUSE, "full", Refusal.ROOM)
        self._held[dispatch.key] = dispatch, held_hash(dispatch.key)
        self.tokens += kv_tokens_needed(dispatch)
        return ACCEPTED

    def release(self, key: TurnKey) -> TurnDispatch:
        """Stop holding a turn and return its dispatch. Raises KeyError if the turn is not held."""
        dispatch, _ = self._held.pop(key)
        self.tokens -= kv_tokens_needed(dispatch)
        return dispatch

    def on_answer_sent(self, key: TurnKey) -> None:
        """List a released turn until its answer is stored."""
        self._unstored[key] = held_hash(key)

    def on_answer_stored(self, key: TurnKey) -> None:
        """Stop listing a turn: its answer is on the log."""
        self._unstored.pop(key, None)
