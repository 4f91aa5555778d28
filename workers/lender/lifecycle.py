r"""The lifecycle of a guest: when it is built, when it lends, and what follows a fault.

Keeps true
- A guest lends only while it should lend (a grant allows it and no stop forbids it), and is suspended otherwise.
- One build runs at a time, and there are never two guests. A build that is no longer needed is finished, and the guest
  is then suspended.
- A fault drops the guest in any state, and the next build waits for the back-off (`backoff`); nothing shortens it.
- No state is permanent: a guest that should lend, and whose builds succeed, lends within the longest wait.

    SUSPENDED --should lend--> RESUMING --built--> LENDING --should not lend--> SUSPENDING --freed--> SUSPENDED
       ^                          \-------------------|----------------------------/
       |                                            fault
       \----------------- waited ----------------- DROPPED ---- waited, should lend --> RESUMING

Pure; times are seconds on any clock. The caller carries out what `next_action` returns and reports how it ended.
"""

import time
from collections.abc import Callable
from enum import Enum

from rose.topics.backoff import Backoff
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

NOT_RESUMED = "it was not told to lend"


class SuspendedEngine:
    """Stub that answers the channel in place of an `EngineLoop` while there is no engine. Every turn is returned."""

    def __init__(
        self,
        commands: RingBuffer,
        reports: MessageSender,
        serving_stats: Callable[[], ServingStats],
        *,
        status_seconds: float,
    ) -> None:
        self.granted_bytes = 0
        """KV bytes that the guest may hold by the newest Resume or Suspend; 0: the guest may not lend."""
        self.reason = NOT_RESUMED
        """Why there is no engine."""
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
        """Execute commands, and report the status if it is due. Commands about weights and aborts are ignored."""
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
        """Do the same as `tick`, which is always short."""
        self.tick()

    def tick_mid_step(self, *, blocked: bool) -> bool:
        """Do the same as `tick`. Return True: there is no turn whose abort could wait for the end of a step."""
        self.tick()
        return True

    def detach(self) -> None:
        """Do nothing: a suspended engine holds no turns."""


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
    """State of a guest in its lifecycle."""

    SUSPENDED = "parked"
    """Weights in host memory at most, no KV."""
    RESUMING = "waking"
    """The guest is built."""
    LENDING = "lending"
    SUSPENDING = "parking"
    """The guest returns its turns, then frees its memory."""
    DROPPED = "dropped"
    """The guest was removed after a fault, and waits for its back-off."""


class Action(Enum):
    """The next action of the caller."""

    NONE = "nothing"
    BUILD = "build"
    """Start to build the guest; `on_built` or `on_fault` follows."""
    SUSPEND = "park"
    """Start to return the guest's turns, then free its memory; `on_freed` or `on_fault` follows."""


class GuestLifecycle:
    """State machine of one guest."""

    def __init__(self) -> None:
        self.state = GuestState.SUSPENDED
        self._backoff = Backoff()

    def next_action(self, should_lend: bool, now: float) -> Action:
        """Advance the state and return what the caller must do now.

        `should_lend`: whether a grant allows the guest to lend and no stop forbids it.
        """
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
        """Whether the lifecycle has work to do, besides the guest's turns."""
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
        """Record that the build has succeeded."""
        assert self.state is GuestState.RESUMING
        self.state = GuestState.LENDING

    def on_freed(self) -> None:
        """Record that the guest's turns are returned and its memory is free."""
        assert self.state is GuestState.SUSPENDING
        self.state = GuestState.SUSPENDED

    def on_fault(self, now: float) -> float:
        """Record that the guest or its build failed. Return the seconds until the guest may be built again."""
        self.state = GuestState.DROPPED
        return self._backoff.failed(now)
