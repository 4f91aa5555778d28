"""The messages between an executor and its engine, over two ring buffers: commands to the engine, and its reports.

Keeps true: no message is a record. Both ends are of one release and one start, so messages are not validated.
"""

from collections import Counter, deque
from dataclasses import dataclass
from enum import Enum

import msgspec

from rose.schemas.prompts import Sampling
from rose.schemas.sampled_tokens import NOTHING_SAMPLED
from rose.schemas.turns import TurnTimes
from rose.workers.executor.ipc.shared_memory import RingBuffer, RingBufferFull
from rose.workers.executor.vllm.types import FinishedTurn


class TensorLayout(msgspec.Struct, frozen=True, array_like=True):
    """Name, type, shape and place of a tensor in a weight buffer."""

    name: str
    dtype: str
    """Torch's name of the type, such as "float32"."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the buffer."""


class WorkKind(Enum):
    """How a piece of work may be bounded."""

    STEP = "step"
    """An engine step, of as many tokens as there is time for."""
    ATOMIC = "piece"
    """Work that is done completely or not at all."""
    INTERRUPTIBLE = "any"
    """Work that can stop at any time."""


@dataclass(frozen=True, slots=True)
class NextWork:
    """The next piece of work of an engine or guest."""

    kind: WorkKind
    seconds: float
    """Predicted duration."""


NO_LIMIT = 1 << 62
"""Bytes: more than any machine has."""

ABORTED = "abort"
"""Finish reason of an aborted turn."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages."""


class SubmitTurn(Message, frozen=True):
    """Command to the engine: run this turn."""

    name: str
    context: bytes
    """Token ids, packed as in a request."""
    sampling: Sampling
    version: int


class AbortTurn(Message, frozen=True):
    """Command to the engine: abort this turn if it is still there. `TurnFinished` returns the sampled tokens."""

    name: str


class StageWeights(Message, frozen=True):
    """Command to the engine: stage the version in a weight buffer, in bounded pieces, while the old version serves."""

    version: int
    buffer: int
    """Index of the weight buffer, 0 or 1."""
    layout: tuple[TensorLayout, ...]


class ActivateWeights(Message, frozen=True):
    """Command to the engine: serve the staged version from the next step on."""

    version: int


class Resume(Message, frozen=True):
    """Command to a guest: lend.

    The guest is built if it does not exist; `EngineStatus.suspended_reason` is then empty.
    """

    most_bytes: int = NO_LIMIT
    """KV bytes that the guest may hold."""


class Suspend(Message, frozen=True):
    """Command to a guest: stop lending. The guest returns its turns first (`TurnFinished`), then its memory."""


class TurnFinished(Message, frozen=True):
    """From the engine: a turn has left the engine."""

    turn: FinishedTurn
    device_seconds: float
    """The turn's share of the steps during its time in the engine, summed over the devices."""
    reason: str = ""
    """Why the engine's side aborted the turn; empty if the executor has aborted it or it has finished."""


class TurnRejected(Message, frozen=True):
    """From the engine: the engine cannot run this turn."""

    name: str
    reason: str


class WeightsStaged(Message, frozen=True):
    """From the engine: the version is staged and can be activated."""

    version: int


class WeightsActivated(Message, frozen=True):
    """From the engine: the version serves from now on."""

    version: int
    seconds: float
    """Seconds for which turns waited for the swap."""


class WeightsRejected(Message, frozen=True):
    """From the engine: the version is refused, and the old version continues to serve."""

    version: int
    reason: str


class ServingStats(msgspec.Struct, frozen=True, array_like=True):
    """From a guest's host: serving's load and slack, and the guest's work since the status before. Times in seconds."""

    running: int
    waiting: int
    prefill_headroom: float | None
    """Least S_prf at the newest decision; None without a decision, or if no request waited for its first token."""
    decode_headroom: float | None
    """Least S_dec at the newest decision; None without a decision, or if no request decoded."""
    longest_seconds: float
    """Longest piece of guest work without a check for new requests, 0 without guest work. The yield bound limits it."""
    computed_seconds: float
    """Most CPU time of the loop's thread in one piece. During the rest of a piece the thread waited for a core or for
    other threads."""
    guest_error: float
    """Relative prediction error of steps: nine steps in ten are wrong by at most this share of their prediction."""
    prefill_error: float
    decode_error: float
    held_back: dict[str, int]
    """How often the guest had work and could not compute, by reason (`HoldReason`)."""


class LendingStats(msgspec.Struct, array_like=True):
    """How a lender shares its KV memory, and counts since the status before."""

    budget_bytes: int = 0
    """KV bytes that turns may hold."""
    frozen: bool = False
    cuts: int = 0
    """Times that serving took KV memory back."""
    cut_seconds: float = 0.0
    preempted: int = 0
    """Turns that were aborted for lack of KV memory."""
    looks: int = 0
    look_seconds: float = 0.0
    """Time that the decisions on shares took, including cuts."""


class EngineStatus(Message, frozen=True):
    """From the engine, periodically: load, memory and rates. The fields are those of `EngineLoad` and `StepCost`."""

    version: int
    device: str
    running: int
    waiting: int
    kv_bytes_total: int
    kv_bytes_free: int
    kv_bytes_per_token: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    steps: int
    """Steps since the status before."""
    step_seconds: float
    """Time that these steps took."""
    blocked_seconds: float = 0.0
    """Time since the engine was last allowed to compute: a guest waits for its host."""
    suspended_reason: str = ""
    """Why there is no engine at this moment; empty if there is an engine."""
    serving: ServingStats | None = None
    """None without a serving tenant."""
    most_turns: int | None = None
    """The most turns at this moment, for an engine whose limit changes; None leaves the limit to the configuration."""
    lending: LendingStats | None = None
    """Set by a lender, whose `kv_bytes_total` is the budget of turns."""
    seeded: bool = True
    """Whether the engine runs turns with a seed."""
    devices: int = 1
    """Number of devices that the engine occupies."""


class EngineFailed(Message, frozen=True):
    """From the engine: the engine runs no further step."""

    reason: str
    usage: bool
    """Whether the engine could not start, because of an unsupported model or setting."""


class EngineLost(Message, frozen=True):
    """From the host of a guest: the guest is gone with all of its turns and weights."""

    reason: str
    seconds: float
    """Seconds until another guest is built."""


class ObservationReport(Message, frozen=True):
    """From an observed server: totals since the start of the observation, and the load now."""

    seconds: float
    """Time since the start of the observation."""
    idle_seconds: float
    """Part of `seconds` without a request."""
    stretches: tuple[int, ...]
    """Number of ended idle stretches, by bucket as in `rose.workers.lender.observe`."""
    stretch_seconds: float
    """Sum of the ended idle stretches."""
    running: int
    waiting: int
    kv_bytes_total: int
    kv_bytes_held: int
    """KV bytes of serving's requests."""
    kv_bytes_most: int
    """Maximum of `kv_bytes_held` since the report before."""


Command = SubmitTurn | AbortTurn | StageWeights | ActivateWeights | Resume | Suspend
Report = (
    TurnFinished
    | TurnRejected
    | WeightsStaged
    | WeightsActivated
    | WeightsRejected
    | EngineStatus
    | EngineFailed
    | EngineLost
    | ObservationReport
)

COMMAND_DECODER = msgspec.msgpack.Decoder(Command)
REPORT_DECODER = msgspec.msgpack.Decoder(Report)

_encode = msgspec.msgpack.Encoder().encode


def aborted_before_start(name: str, at: float, reason: str = "") -> TurnFinished:
    """Return the report of a turn that was aborted before any computation. `at`: unix seconds."""
    turn = FinishedTurn(
        name=name,
        sampled=NOTHING_SAMPLED,
        finish_reason=ABORTED,
        context_tokens=0,
        cached_tokens=0,
        times=TurnTimes(finished_at=at),
    )
    return TurnFinished(turn, device_seconds=0.0, reason=reason)


class MessageSender:
    """Sends messages into a ring buffer, and keeps messages in order while the ring buffer has no room.

    Statuses that wait are merged into one, which is sent after all other messages: a slow reader does not make the
    queue of statuses grow.
    """

    def __init__(self, ring: RingBuffer) -> None:
        self._ring = ring
        self._unsent: deque[bytes] = deque()
        self._status: EngineStatus | None = None

    def __len__(self) -> int:
        """Number of messages that wait for room."""
        return len(self._unsent) + (self._status is not None)

    def send(self, message: Message) -> None:
        """Send the message, or keep it for a later `flush`. Never waits."""
        if isinstance(message, EngineStatus):
            self._status = message if self._status is None else _merge_statuses(self._status, message)
        else:
            self._unsent.append(_encode(message))
        self.flush()

    def flush(self) -> None:
        """Send as many of the waiting messages as have room."""
        while self._unsent:
            if not self._try_write(self._unsent[0]):
                return
            self._unsent.popleft()
        if self._status is not None and self._try_write(_encode(self._status)):
            self._status = None

    def _try_write(self, message: bytes) -> bool:
        try:
            self._ring.write(message)
        except RingBufferFull:
            return False
        return True


def _merge_statuses(before: EngineStatus, newer: EngineStatus) -> EngineStatus:
    """Return the newer of two statuses, with the counts of both."""
    return msgspec.structs.replace(
        newer,
        steps=before.steps + newer.steps,
        step_seconds=before.step_seconds + newer.step_seconds,
        serving=_merge_serving_stats(before.serving, newer.serving),
        lending=_merge_lending_stats(before.lending, newer.lending),
    )


def _merge_serving_stats(before: ServingStats | None, newer: ServingStats | None) -> ServingStats | None:
    """Merge two parts. A newer status of a suspended engine has no part; the counts of the older one are kept."""
    if before is None:
        return newer
    now = newer or msgspec.structs.replace(
        before,
        running=0,
        waiting=0,
        prefill_headroom=None,
        decode_headroom=None,
        longest_seconds=0.0,
        computed_seconds=0.0,
        held_back={},
    )
    return msgspec.structs.replace(
        now,
        longest_seconds=max(before.longest_seconds, now.longest_seconds),
        computed_seconds=max(before.computed_seconds, now.computed_seconds),
        held_back=dict(Counter(before.held_back) + Counter(now.held_back)),
    )


def _merge_lending_stats(before: LendingStats | None, newer: LendingStats | None) -> LendingStats | None:
    """Merge two parts. A newer status of a suspended engine has no part; the cuts of the older one are kept."""
    if before is None:
        return newer
    now = newer or LendingStats()
    counts = ("cuts", "cut_seconds", "preempted", "looks", "look_seconds")
    return msgspec.structs.replace(now, **{name: getattr(before, name) + getattr(now, name) for name in counts})
