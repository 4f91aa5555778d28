"""What an executor says of itself, several times a second, as records. Pure: the time is handed in.

Keeps true: heartbeats of one start are numbered without a gap, and list every turn whose answer is not on the log.
"""

from collections.abc import Collection

from schemas.slack import ExecutorState, Hardware, SlackHeartbeat, Tenant
from workers.executor.answers import MOST_CHARACTERS, Start
from workers.executor.inbox import Inbox, packed_hashes
from workers.executor.words import Tick

TTL_SECONDS = 2.0
"""How long a heartbeat is good for: after that, silence means no slack."""

BEHIND_VERSIONS = 1
"""An executor that is so many versions behind the log is well: the newest is still on its way."""


def in_short(version: int, newest: int, refused: str, *, paused: str) -> tuple[str, bool]:
    """In a sentence, and whether it takes turns of the present policy. `newest`: on the log; -1 for none."""
    if paused:
        return f"takes no turns: {paused}", False
    if refused:
        return f"serves version {version}, and refuses version {newest}: {refused}", False
    if version < 0:
        return "waits for a first policy version", False
    if newest - version > BEHIND_VERSIONS:
        return f"serves version {version}, the newest on the log is {newest}", False
    return f"serves version {version}", True


class Heartbeats:
    """Of one start of an executor."""

    def __init__(self, start: Start, slot: int, *, by_grant: bool = False) -> None:
        self.swap_seconds = 0.0
        """That turns waited for the latest swap."""
        self.refused: tuple[int, str] = (-1, "")
        """The newest version that it does not take, and why."""
        self._start = start
        self._slot = slot
        self._by_grant = by_grant
        self._sequence = 0
        self._cuts = 0

    def heard(self, tick: Tick) -> None:
        """The engine has ticked: what has been since its tick before is counted once."""
        if tick.lent is not None:
            self._cuts += tick.lent.cuts

    def next(
        self,
        tick: Tick,
        inbox: Inbox,
        *,
        state: ExecutorState,
        version: int,
        paused: str,
        now: float,
        turns: Collection[int] | None = None,
    ) -> SlackHeartbeat:
        """`turns`: by hash, those that it lists; left out, those of its inbox. `paused`: why it takes none."""
        beat = SlackHeartbeat(
            worker=self._start.worker,
            incarnation=self._start.incarnation,
            slot=self._slot,
            sequence=self._sequence,
            worker_class=self._start.worker_class,
            state=state,
            policy_version=version,
            hardware=Hardware(
                device=tick.device,
                prefill_tokens_per_second=tick.prefill_tokens_per_second,
                decode_tokens_per_second=tick.decode_tokens_per_second,
            ),
            kv_bytes_total=tick.kv_bytes_total,
            kv_bytes_free=tick.kv_bytes_free,
            kv_bytes_per_token=tick.kv_bytes_per_token,
            rollout=Tenant(running=tick.running, waiting=tick.waiting),
            serving=Tenant(running=tick.slack.running, waiting=tick.slack.waiting) if tick.slack else Tenant(),
            prefill_headroom_seconds=tick.slack.prefill_headroom if tick.slack else None,
            decode_headroom_seconds=tick.slack.decode_headroom if tick.slack else None,
            max_turns=inbox.max_turns,
            token_budget=inbox.token_budget,
            ttl_seconds=TTL_SECONDS,
            holds=packed_hashes(inbox.hashes if turns is None else turns),
            refused_version=self.refused[0],
            refused_reason=self.refused[1][:MOST_CHARACTERS],
            paused_reason=paused[:MOST_CHARACTERS],
            sent_at=now,
            swap_seconds=self.swap_seconds,
            cuts=self._cuts,
            frozen=tick.lent is not None and tick.lent.frozen,
            seeded=tick.seeded,
            by_grant=self._by_grant,
        )
        self._sequence += 1
        return beat
