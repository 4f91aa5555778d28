"""The heartbeat records of an executor, several a second. Pure: the time is a parameter.

Keeps true: the heartbeats of one incarnation are numbered without a gap, and list every turn whose answer is not on
the log.
"""

from collections.abc import Collection

from rose.schemas.heartbeats import TTL_SECONDS, ExecutorState, Hardware, SlackHeartbeat, Tenant
from rose.workers.executor.inbox import Inbox, packed_hashes
from rose.workers.executor.ipc.messages import EngineStatus
from rose.workers.executor.results import MAX_REASON_CHARACTERS, ExecutorIncarnation

MAX_VERSIONS_BEHIND = 1
"""An executor that is at most so many versions behind the log is ready: the newest version may be in transfer."""


def health_summary(version: int, newest: int, refused: str, *, pause_reason: str | None) -> tuple[str, bool]:
    """Return the executor's health as a sentence, and whether it takes turns with a current version.

    `version`: the serving version, negative for none. `newest`: the newest version on the log, -1 for none. `refused`:
    why the newest version was refused, empty if it was not.
    """
    if pause_reason:
        return f"takes no turns: {pause_reason}", False
    if refused:
        return f"serves version {version}, and refuses version {newest}: {refused}", False
    if version < 0:
        return "waits for a first policy version", False
    if newest - version > MAX_VERSIONS_BEHIND:
        return f"serves version {version}, the newest on the log is {newest}", False
    return f"serves version {version}", True


class HeartbeatWriter:
    """Makes the heartbeats of one incarnation of an executor."""

    def __init__(self, incarnation: ExecutorIncarnation, slot: int, *, by_grant: bool = False) -> None:
        self._incarnation = incarnation
        self._slot = slot
        self._by_grant = by_grant
        self._sequence = 0
        self._cuts = 0

    def on_status(self, status: EngineStatus) -> None:
        """Add up what an engine status counts since the status before. Call it once for each status."""
        if status.lending is not None:
            self._cuts += status.lending.cuts

    def next_heartbeat(
        self,
        status: EngineStatus,
        inbox: Inbox,
        *,
        state: ExecutorState,
        version: int,
        pause_reason: str | None,
        now: float,
        turns: Collection[int] | None = None,
        refused: tuple[int, str] | None = None,
        swap_seconds: float = 0.0,
    ) -> SlackHeartbeat:
        """Return the next heartbeat.

        `turns`: `held_hash` of the turns to list; None lists the turns of `inbox`. `pause_reason`: why no turns are
        taken, None if turns are taken. `now`: unix seconds. `refused`: the newest version that was refused, and why.
        `swap_seconds`: how long turns waited for the latest version swap.
        """
        refused_version, refused_reason = refused or (-1, "")
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
            refused_version=refused_version,
            refused_reason=refused_reason[:MAX_REASON_CHARACTERS],
            paused_reason=(pause_reason or "")[:MAX_REASON_CHARACTERS],
            sent_at=now,
            swap_seconds=swap_seconds,
            cuts=self._cuts,
            frozen=status.lending is not None and status.lending.frozen,
            seeded=status.seeded,
            by_grant=self._by_grant,
        )
        self._sequence += 1
        return beat
