"""What an executor's two processes, that of the bus and that of the engine, say to each other over two lines.

Keeps true: nothing here is a record. Both ends are of one release and one start, so what arrives is believed.
"""

from collections import deque

import msgspec

from schemas.prompts import Sampling
from schemas.turns import VersionSpan
from workers.executor.line import Line, LineFull
from workers.executor.slabs import Laid

ABORTED = "abort"
"""Why a turn that was given up has ended."""


class Word(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One message."""


class Take(Word, frozen=True):
    """To the engine: run this turn."""

    name: str
    context: bytes
    """Token ids, as a request packs them."""
    sampling: Sampling
    version: int


class GiveUp(Word, frozen=True):
    """To the engine: take this turn out, if it is still there; `Done` has what was sampled of it."""

    name: str


class Prepare(Word, frozen=True):
    """To the engine: this version lies on a slab; make it ready, in bounded pieces, while the old one serves."""

    version: int
    slab: int
    """Which of the two."""
    layout: tuple[Laid, ...]


class Serve(Word, frozen=True):
    """To the engine: serve what was prepared, from the next step on."""

    version: int


class Done(Word, frozen=True):
    """Of the engine: a turn has left it. Fields as in `Finished`."""

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
    """The turn's share of the steps that it was in."""
    reason: str = ""
    """Why the engine's side gave it up, where nobody had ordered that."""


class Refused(Word, frozen=True):
    """Of the engine: a turn that it cannot run."""

    name: str
    reason: str


class Prepared(Word, frozen=True):
    """Of the engine: the version can be served."""

    version: int


class Serving(Word, frozen=True):
    """Of the engine: it serves the version from now on."""

    version: int
    seconds: float
    """That turns waited for the swap."""


class NotTaken(Word, frozen=True):
    """Of the engine: the version is refused, the old one serves on."""

    version: int
    reason: str


class Slack(msgspec.Struct, frozen=True, array_like=True):
    """Of a guest's host: how serving stands, and what the guest took of it since the tick before. Seconds."""

    running: int
    waiting: int
    prefill_headroom: float | None
    """Least S_prf when serving was last looked at; None while no request waited for its first token."""
    decode_headroom: float | None
    """Least S_dec; None while none decoded."""
    longest_seconds: float
    """The longest piece of the guest's work: what the yield bound is about."""
    guest_error: float
    """How wrong predicted steps are: nine in ten end within this share of what was predicted."""
    prefill_error: float
    decode_error: float
    held_back: dict[str, int]
    """How often the guest had work and might not compute, by why (`Hold`)."""


class Lent(msgspec.Struct, array_like=True):
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


class Tick(Word, frozen=True):
    """Of the engine, now and then: it lives, and this is how it stands. Fields as in `Load` and `StepCost`."""

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
    slack: Slack | None = None
    """None without a serving tenant."""
    lent: Lent | None = None
    """Of a lender; what `kv_bytes_total` says is then what turns may hold."""


class Failed(Word, frozen=True):
    """Of the engine: it runs no further step."""

    reason: str
    usage: bool
    """Whether it never began, for a model or a setting that it cannot take."""


class Gone(Word, frozen=True):
    """Of a server's process: the guest is gone, with every turn in it and what it had been given."""

    reason: str
    seconds: float
    """Until another is begun."""


Order = Take | GiveUp | Prepare | Serve
Report = Done | Refused | Prepared | Serving | NotTaken | Tick | Failed | Gone

ORDERS = msgspec.msgpack.Decoder(Order)
REPORTS = msgspec.msgpack.Decoder(Report)

_encode = msgspec.msgpack.Encoder().encode


class Outbox:
    """The sending end: what finds no room on the line is kept, in order, until there is some."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._unsent: deque[bytes] = deque()

    def __len__(self) -> int:
        """Words that are kept."""
        return len(self._unsent)

    def say(self, word: Word) -> None:
        """Never waits."""
        self._unsent.append(_encode(word))
        self.flush()

    def flush(self) -> None:
        """Send of what was kept as much as has room."""
        while self._unsent:
            try:
                self._line.write(self._unsent[0])
            except LineFull:
                return
            self._unsent.popleft()
