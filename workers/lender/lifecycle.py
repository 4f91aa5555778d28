"""The life of a guest: when it is built, when it lends, and what becomes of it after a fault.

Keeps true
- A guest lends only while it is wanted (a grant says so and nothing says stop), and parks once it is not.
- One build at a time, never two guests; a build that is no longer wanted is finished and then parked.
- A fault drops the guest, whatever it was doing, and the next build waits (`backoff`); nothing shortens that.
- Nothing stalls: wanted, and with builds that end well, it lends within the longest wait.

    PARKED --wanted--> WAKING --built--> LENDING --not wanted--> PARKING --freed--> PARKED
       ^                  \\------------------|-----------------------/
       |                                   fault
       \\---------------- waited ---------- DROPPED ---- waited, wanted --> WAKING

Pure; seconds on any clock of the caller's. The caller does what `follow` returns and tells how it ended.
"""

import time
from collections.abc import Callable
from enum import Enum

from rose.workers.executor.ipc.messages import (
    COMMAND_DECODER,
    EngineStatus,
    MessageSender,
    Resume,
    ServingStats,
    SubmitTurn,
    Suspend,
    aborted_before_start,
)
from rose.workers.executor.ipc.shared_memory import RingBuffer
from rose.workers.lender.backoff import Backoff

NOT_RESUMED = "it was not told to lend"


class SuspendedEngine:
    """What answers at the channel where an `EngineLoop` would."""

    def __init__(
        self,
        commands: RingBuffer,
        reports: MessageSender,
        serving_stats: Callable[[], ServingStats],
        *,
        status_seconds: float,
    ) -> None:
        self.granted_bytes = 0
        """KV bytes that it may hold, as far as it was told; 0: it is not to lend."""
        self.reason = NOT_RESUMED
        """There is no engine."""
        self._commands = commands
        self._reports = reports
        self._serving_stats = serving_stats
        self._status_seconds = status_seconds
        self._next_status = 0.0

    @property
    def busy(self) -> bool:
        """Whether a tick has something to do."""
        return bool(self._commands)

    def tick(self) -> None:
        """Take orders in, and beat. What is said of a version is for the engine that is gone."""
        self._reports.flush()
        for message in self._commands.read():
            match command := COMMAND_DECODER.decode(message):
                case SubmitTurn():
                    self._reports.send(aborted_before_start(command.name, time.time()))
                case Resume() | Suspend():
                    self.granted_bytes = command.most_bytes if isinstance(command, Resume) else 0
                case _:
                    pass
        if time.monotonic() >= self._next_status:
            self._next_status = time.monotonic() + self._status_seconds
            self._reports.send(_suspended_status(self.reason, self._serving_stats()))

    def tick_idle(self, *, blocked: bool = False) -> None:
        """The same: nothing of it takes long."""
        self.tick()

    def tick_mid_step(self, *, blocked: bool) -> bool:
        """Nor has it a turn that could wait for the end of a step."""
        self.tick()
        return True

    def detach(self) -> None:
        """Nobody's turns are here."""


def _suspended_status(reason: str, serving_stats: ServingStats) -> EngineStatus:
    return EngineStatus(
        version=-1,
        device="none",
        running=0,
        waiting=0,
        kv_bytes_total=0,
        kv_bytes_free=0,
        kv_bytes_per_token=1,
        prefill_tokens_per_second=1.0,
        decode_tokens_per_second=1.0,
        steps=0,
        step_seconds=0.0,
        suspended_reason=reason,
        serving=serving_stats,
    )


class GuestState(Enum):
    """Where a guest is in its life."""

    SUSPENDED = "parked"
    """Weights in host memory at most, no KV."""
    RESUMING = "waking"
    """Being built."""
    LENDING = "lending"
    SUSPENDING = "parking"
    """Its turns go back, then its memory."""
    DROPPED = "dropped"
    """Let go of after a fault; it waits."""


class Action(Enum):
    """What the caller does now."""

    NONE = "nothing"
    BUILD = "build"
    """Begin to build; `on_built` or `on_fault` follows."""
    SUSPEND = "park"
    """Begin to hand its turns back, then free its memory; `on_freed` or `on_fault` follows."""


class GuestLifecycle:
    """One guest's."""

    def __init__(self) -> None:
        self.state = GuestState.SUSPENDED
        self._backoff = Backoff()

    def next_action(self, should_lend: bool, now: float) -> Action:
        """What the state of things asks for."""
        if self.state is GuestState.DROPPED and now >= self._backoff.until:
            self.state = GuestState.SUSPENDED
        if self.state is GuestState.SUSPENDED and should_lend:
            self.state = GuestState.RESUMING
            return Action.BUILD
        if self.state is GuestState.LENDING and not should_lend:
            self.state = GuestState.SUSPENDING
            return Action.SUSPEND
        return Action.NONE

    def has_action(self, should_lend: bool, now: float) -> bool:
        """Whether there is something to do for its life alone."""
        match self.state:
            case GuestState.RESUMING | GuestState.SUSPENDING:
                return True
            case GuestState.LENDING:
                return not should_lend
            case GuestState.SUSPENDED:
                return should_lend
            case GuestState.DROPPED:
                return should_lend and now >= self._backoff.until

    def on_built(self) -> None:
        """The build has ended well."""
        assert self.state is GuestState.RESUMING
        self.state = GuestState.LENDING

    def on_freed(self) -> None:
        """What PARK asked for is done."""
        assert self.state is GuestState.SUSPENDING
        self.state = GuestState.SUSPENDED

    def on_fault(self, now: float) -> float:
        """The guest, or its build, failed: let go of it. Returns the seconds until it may be built again."""
        self.state = GuestState.DROPPED
        return self._backoff.failed(now)
