"""What an executor says of itself, several times a second, as records. Pure: the time is handed in.

Keeps true: heartbeats of one start are numbered without a gap, and list every turn whose answer is not on the log.
"""

from collections.abc import Collection

from rose.schemas.heartbeats import ExecutorState, Hardware, SlackHeartbeat, Tenant
from rose.workers.executor.inbox import Inbox, packed_hashes
from rose.workers.executor.ipc.messages import EngineStatus
from rose.workers.executor.results import MAX_REASON_CHARACTERS, ExecutorIncarnation

TTL_SECONDS = 2.0
"""How long a heartbeat is good for: after that, silence means no slack."""

MAX_VERSIONS_BEHIND = 1
"""An executor that is so many versions behind the log is well: the newest is still on its way."""


def health_summary(version: int, newest: int, refused: str, *, pause_reason: str) -> tuple[str, bool]:
    """In a sentence, and whether it takes turns of the present policy. `newest`: on the log; -1 for none."""
    if pause_reason:
        return f"takes no turns: {pause_reason}", False
    if refused:
        return f"serves version {version}, and refuses version {newest}: {refused}", False
    if version < 0:
        return "waits for a first policy version", False
    if newest - version > MAX_VERSIONS_BEHIND:
        return f"serves version {version}, the newest on the log is {newest}", False
    return f"serves version {version}", True


class Heartbeats:
    """Of one start of an executor."""

    def __init__(self, incarnation: ExecutorIncarnation, slot: int, *, by_grant: bool = False) -> None:
        self.swap_seconds = 0.0
        """That turns waited for the latest swap."""
        self.refused: tuple[int, str] = (-1, "")
        """The newest version that it does not take, and why."""
        self._incarnation = incarnation
        self._slot = slot
        self._by_grant = by_grant
        self._sequence = 0
        self._cuts = 0

    def on_status(self, status: EngineStatus) -> None:
        """The engine has ticked: what has been since its tick before is counted once."""
        if status.lending is not None:
            self._cuts += status.lending.cuts

    def next_heartbeat(
        self,
        status: EngineStatus,
        inbox: Inbox,
        *,
        state: ExecutorState,
        version: int,
        pause_reason: str,
        now: float,
        turns: Collection[int] | None = None,
    ) -> SlackHeartbeat:
        """`turns`: by hash, those that it lists; left out, those of its inbox. `pause_reason`: why it takes none."""
        beat = SlackHeartbeat(
            worker=self._incarnation.worker,
            incarnation=self._incarnation.incarnation,
            slot=self._slot,
            sequence=self._sequence,
            worker_class=self._incarnation.worker_class,
            state=state,
            policy_version=version,
            hardware=Hardware(
                device=status.device,
                prefill_tokens_per_second=status.prefill_tokens_per_second,
                decode_tokens_per_second=status.decode_tokens_per_second,
            ),
            kv_bytes_total=status.kv_bytes_total,
            kv_bytes_free=status.kv_bytes_free,
            kv_bytes_per_token=status.kv_bytes_per_token,
            rollout=Tenant(running=status.running, waiting=status.waiting),
            serving=Tenant(running=status.serving.running, waiting=status.serving.waiting)
            if status.serving
            else Tenant(),
            prefill_headroom_seconds=status.serving.prefill_headroom if status.serving else None,
            decode_headroom_seconds=status.serving.decode_headroom if status.serving else None,
            max_turns=inbox.max_turns,
            token_budget=inbox.token_budget,
            ttl_seconds=TTL_SECONDS,
            holds=packed_hashes(inbox.listed_hashes if turns is None else turns),
            refused_version=self.refused[0],
            refused_reason=self.refused[1][:MAX_REASON_CHARACTERS],
            paused_reason=pause_reason[:MAX_REASON_CHARACTERS],
            sent_at=now,
            swap_seconds=self.swap_seconds,
            cuts=self._cuts,
            frozen=status.lending is not None and status.lending.frozen,
            seeded=status.seeded,
            by_grant=self._by_grant,
        )
        self._sequence += 1
        return beat
