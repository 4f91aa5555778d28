r"""The lifecycle of a guest: when it is built, when it lends, and what follows a fault.

Keeps true
- A guest lends only while it should lend (a grant allows it and no stop forbids it), and is suspended otherwise.
- One build runs at a time, and there are never two guests. A build that is no longer needed is finished, and the guest
  is then suspended.
- A fault drops the guest in any state, and the next build waits for the back-off (`backoff`); nothing shortens it.
- No state is permanent: a guest that should lend, and whose builds succeed, lends within the longest wait.

    Suspended --should lend--> Building --built--> Profiling --> Lending --should not lend--> Suspending --> Suspended
       ^                          \\--------------------|------------|---------------------------/
       |                                             fault
       \\----------------- waited ------------------ Dropped ---- waited, should lend --> Building

Pure; times are seconds on any clock. The caller carries out the work of each state and reports how it ended.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

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


class SuspendedEngine:
    """Stub that answers the channel in place of an `EngineLoop` while there is no engine. Every turn is returned."""

    def __init__(
        self,
        commands: RingBuffer,
        reports: MessageSender,
        serving_stats: Callable[[], ServingStats],
        reason: Callable[[], str],
        *,
        status_seconds: float,
        granted_bytes: int = 0,
    ) -> None:
        """`reason`: tells why there is no engine; called for each status, as `serving_stats` is."""
        self.granted_bytes = granted_bytes
        """KV bytes that the guest may hold by the newest Resume or Suspend; 0: the guest may not lend."""
        self._reason = reason
        self._commands = commands
        self._reports = reports
        self._serving_stats = serving_stats
        self._status_seconds = status_seconds
        self._next_status = 0.0

    @property
    def busy(self) -> bool:
        """Whether a tick has something to do."""
        return bool(self._commands)

    def tick(self, most_tokens: int | None = None, most_seconds: float = math.inf) -> None:
        """Execute commands, and report the status if it is due. Commands about weights and aborts are ignored.

        The limits of `EngineLoop.tick` are met by any tick, which is always short.
        """
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
            self._reports.send(_suspended_status(self._reason(), self._serving_stats()))

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


Build = TypeVar("Build")
"""A build that is under way."""

Built = TypeVar("Built")
"""A guest that has been built, with its memory."""


@dataclass(frozen=True, slots=True)
class Suspended:
    """There is no guest: weights in host memory at most, no KV."""


@dataclass(frozen=True, slots=True)
class Building(Generic[Build]):
    """The guest is built, one piece at a time. A build cannot be ended."""

    build: Build


@dataclass(frozen=True, slots=True)
class Profiling(Generic[Built]):
    """The guest makes its first steps, and takes no turns yet."""

    guest: Built


@dataclass(frozen=True, slots=True)
class Lending(Generic[Built]):
    """The guest runs turns."""

    guest: Built


@dataclass(frozen=True, slots=True)
class Suspending(Generic[Built]):
    """The guest returns its turns, then frees its memory."""

    guest: Built
    since: float


@dataclass(frozen=True, slots=True)
class Dropped:
    """The guest was removed after a fault, and waits for its back-off."""


class GuestLifecycle(Generic[Build, Built]):
    """State machine of one guest. Each state holds what exists in that state, and nothing else does."""

    def __init__(self) -> None:
        self.state: Suspended | Building[Build] | Profiling[Built] | Lending[Built] | Suspending[Built] | Dropped = (
            Suspended()
        )
        self._backoff = Backoff()

    @property
    def guest(self) -> Built | None:
        """The guest, in a state that has one."""
        match self.state:
            case Profiling(guest) | Lending(guest) | Suspending(guest):
                return guest
            case _:
                return None

    def advance(self, should_lend: bool, now: float, start_build: Callable[[], Build]) -> None:
        """Start to build or to suspend the guest if it is time to.

        `should_lend`: whether a grant allows the guest to lend and no stop forbids it. `start_build`: called for a new
        build; `on_built` or `on_fault` follows. `on_freed` or `on_fault` follows the state Suspending.
        """
        match self.state:
            case Suspended() | Dropped() if should_lend and now >= self._backoff.until:
                self.state = Building(start_build())
            case Dropped() if now >= self._backoff.until:
                self.state = Suspended()
            case Lending(guest) if not should_lend:
                self.state = Suspending(guest, now)

    def has_action(self, should_lend: bool, now: float) -> bool:
        """Whether the lifecycle has work to do, besides the guest's turns."""
        match self.state:
            case Building() | Profiling() | Suspending():
                return True
            case Lending():
                return not should_lend
            case Suspended() | Dropped():
                return should_lend and now >= self._backoff.until

    def on_built(self, guest: Built) -> None:
        """Record that the build has succeeded."""
        self.state = Profiling(guest)

    def on_profiled(self, guest: Built) -> None:
        """Record that the first steps of the guest are over."""
        self.state = Lending(guest)

    def on_freed(self) -> None:
        """Record that the guest's turns are returned and its memory is free."""
        self.state = Suspended()

    def on_fault(self, now: float) -> float:
        """Record that the guest or its build failed. Return the seconds until the guest may be built again."""
        self.state = Dropped()
        return self._backoff.failed(now)
