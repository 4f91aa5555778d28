"""What an executor's two processes, that of the bus and that of the engine, say to each other over two lines.

Keeps true: nothing here is a record. Both ends are of one release and one start, so what arrives is believed.
"""

from collections import Counter, deque
from dataclasses import dataclass
from enum import Enum

import msgspec

from rose.schemas.prompts import Sampling
from rose.schemas.turns import VersionSpan
from rose.workers.executor.ipc.shared_memory import RingBuffer, RingBufferFull


class TensorLayout(msgspec.Struct, frozen=True, array_like=True):
    """Where a tensor lies."""

    name: str
    dtype: str
    """As torch names it."""
    shape: tuple[int, ...]
    offset: int
    """In bytes from the beginning of the buffer."""


class WorkKind(Enum):
    """How a piece of work may be bounded."""

    STEP = "step"
    """One of the engine's, of as many tokens as there is time for."""
    ATOMIC = "piece"
    """Something that is done whole or not at all."""
    INTERRUPTIBLE = "any"
    """Something that goes on for as long as it may."""


@dataclass(frozen=True, slots=True)
class NextWork:
    """One piece of work."""

    kind: WorkKind
    seconds: float
    """That it would take, as predicted."""


NO_LIMIT = 1 << 62
"""Bytes: more than there are."""

ABORTED = "abort"
"""Why a turn that was given up has ended."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One message."""


class SubmitTurn(Message, frozen=True):
    """To the engine: run this turn."""

    name: str
    context: bytes
    """Token ids, as a request packs them."""
    sampling: Sampling
    version: int


class AbortTurn(Message, frozen=True):
    """To the engine: take this turn out, if it is still there; `TurnFinished` has what was sampled of it."""

    name: str


class StageWeights(Message, frozen=True):
    """To the engine: this version lies on a buffer; make it ready, in bounded pieces, while the old one serves."""

    version: int
    buffer: int
    """Which of the two."""
    layout: tuple[TensorLayout, ...]


class ActivateWeights(Message, frozen=True):
    """To the engine: serve what was prepared, from the next step on."""

    version: int


class Resume(Message, frozen=True):
    """To a guest: lend. It is built if it is not there; `EngineStatus.suspended_reason` is empty once it is."""

    most_bytes: int = NO_LIMIT
    """Of KV memory, that it may hold."""


class Suspend(Message, frozen=True):
    """To a guest: lend no more. Its turns go back first (`TurnFinished`), then its memory."""


class TurnFinished(Message, frozen=True):
    """Of the engine: a turn has left it. Fields as in `FinishedTurn`."""

    name: str
    tokens: bytes
    logprobs: bytes
    finish_reason: str
    spans: tuple[VersionSpan, ...]
    context_tokens: int
    cached_tokens: int
    scheduled_at: float
    first_token_at: float
    finished_at: float
    device_seconds: float
    """The turn's share of the steps while it was there, on each device that they ran on."""
    reason: str = ""
    """Why the engine's side gave it up, where nobody had ordered that."""


class TurnRejected(Message, frozen=True):
    """Of the engine: a turn that it cannot run."""

    name: str
    reason: str


class WeightsStaged(Message, frozen=True):
    """Of the engine: the version can be served."""

    version: int


class WeightsActivated(Message, frozen=True):
    """Of the engine: it serves the version from now on."""

    version: int
    seconds: float
    """That turns waited for the swap."""


class WeightsRejected(Message, frozen=True):
    """Of the engine: the version is refused, the old one serves on."""

    version: int
    reason: str


class ServingStats(msgspec.Struct, frozen=True, array_like=True):
    """Of a guest's host: how serving stands, and what the guest took of it since the tick before. Seconds."""

    running: int
    waiting: int
    prefill_headroom: float | None
    """Least S_prf when serving was last looked at; None where it was not, or no request waited for its first token."""
    decode_headroom: float | None
    """Least S_dec; None also where none decoded."""
    longest_seconds: float
    """The longest piece of the guest's work without a look whether a request has come, 0 where there was none: what the
    yield bound is about."""
    computed_seconds: float
    """The most that the loop's thread computed in one piece. What one took above that, the thread waited for a core, or
    for others that compute."""
    guest_error: float
    """How wrong predicted steps are: nine in ten end within this share of what was predicted."""
    prefill_error: float
    decode_error: float
    held_back: dict[str, int]
    """How often the guest had work and might not compute, by why (`HoldReason`)."""


class LendingStats(msgspec.Struct, array_like=True):
    """How a lender shares its KV memory, and what has been since the tick before."""

    budget_bytes: int = 0
    """What turns may hold."""
    frozen: bool = False
    cuts: int = 0
    """Times that serving took room back."""
    cut_seconds: float = 0.0
    preempted: int = 0
    """Turns given up for want of room."""
    looks: int = 0
    look_seconds: float = 0.0
    """That sharing took, cuts among it."""


class EngineStatus(Message, frozen=True):
    """Of the engine, now and then: it lives, and this is how it stands. Fields as in `EngineLoad` and `StepCost`."""

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
    """Since the tick before."""
    step_seconds: float
    """That those took."""
    blocked_seconds: float = 0.0
    """Since it might last have computed: a guest waits for its host."""
    suspended_reason: str = ""
    """Why there is no engine at this moment; empty where there is one."""
    serving: ServingStats | None = None
    """None without a serving tenant."""
    most_turns: int | None = None
    """That it may be given now, where that changes; None leaves it to the configuration."""
    lending: LendingStats | None = None
    """Of a lender; what `kv_bytes_total` says is then what turns may hold."""
    seeded: bool = True
    """Whether it runs turns with a seed."""


class EngineFailed(Message, frozen=True):
    """Of the engine: it runs no further step."""

    reason: str
    usage: bool
    """Whether it never began, for a model or a setting that it cannot take."""


class EngineLost(Message, frozen=True):
    """Of a server's process: the guest is gone, with every turn in it and what it had been given."""

    reason: str
    seconds: float
    """Until another is begun."""


class ObservationReport(Message, frozen=True):
    """Of a server that is only observed: all since its beginning, and how it stands now."""

    seconds: float
    """That were looked at."""
    idle_seconds: float
    """Of those, without a request."""
    stretches: tuple[int, ...]
    """Idle stretches that have ended, counted as in `rose.workers.lender.idle_time`."""
    stretch_seconds: float
    """All of those together."""
    running: int
    waiting: int
    kv_bytes_total: int
    kv_bytes_held: int
    """By requests."""
    kv_bytes_most: int
    """The same at its highest, since the word before."""


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
    """Of a turn that left, at this unix time and for this reason, before anything was computed of it."""
    return TurnFinished(
        name=name,
        tokens=b"",
        logprobs=b"",
        finish_reason=ABORTED,
        spans=(),
        context_tokens=0,
        cached_tokens=0,
        scheduled_at=0.0,
        first_token_at=0.0,
        finished_at=at,
        device_seconds=0.0,
        reason=reason,
    )


class MessageSender:
    """The sending end: what finds no room on the line is kept, in order, until there is some. Of ticks one is kept, the
    newest, behind all else, with what those before it counted: so who reads nothing for long makes nothing grow.
    """

    def __init__(self, ring: RingBuffer) -> None:
        self._ring = ring
        self._unsent: deque[bytes] = deque()
        self._status: EngineStatus | None = None

    def __len__(self) -> int:
        """Words that are kept."""
        return len(self._unsent) + (self._status is not None)

    def send(self, message: Message) -> None:
        """Never waits."""
        if isinstance(message, EngineStatus):
            self._status = message if self._status is None else _merge_statuses(self._status, message)
        else:
            self._unsent.append(_encode(message))
        self.flush()

    def flush(self) -> None:
        """Send of what was kept as much as has room."""
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
    """The newer of two ticks, with what has been since the tick before either."""
    return msgspec.structs.replace(
        newer,
        steps=before.steps + newer.steps,
        step_seconds=before.step_seconds + newer.step_seconds,
        serving=_merge_serving_stats(before.serving, newer.serving),
        lending=_merge_lending_stats(before.lending, newer.lending),
    )


def _merge_serving_stats(before: ServingStats | None, newer: ServingStats | None) -> ServingStats | None:
    """Also where the newer tick is of no engine, which sees nothing of serving: it was held back before."""
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
    """Also where the newer tick is of no engine, which lends nothing: the cuts have been."""
    if before is None:
        return newer
    now = newer or LendingStats()
    return LendingStats(
        now.budget_bytes,
        now.frozen,
        cuts=before.cuts + now.cuts,
        cut_seconds=before.cut_seconds + now.cut_seconds,
        preempted=before.preempted + now.preempted,
        looks=before.looks + now.looks,
        look_seconds=before.look_seconds + now.look_seconds,
    )
