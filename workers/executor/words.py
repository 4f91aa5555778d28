"""What an engine's process and the one beside it say to each other, over two lines.

Keeps true: nothing here is a record. Both ends are of one release and one start, so what arrives is believed.
"""

import msgspec

from schemas.prompts import Sampling
from schemas.turns import VersionSpan


class Word(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One message."""


class Take(Word, frozen=True):
    """To the engine: run this turn."""

    name: str
    context: bytes
    """Token ids, as a request packs them."""
    sampling: Sampling
    version: int


class Prepare(Word, frozen=True):
    """To the engine: this version lies in the shared memory; make it ready, in bounded pieces, while the old serves."""

    version: int
    shelf: int
    """Which of the two pieces of shared memory."""
    tensors: tuple[tuple[str, str, tuple[int, ...], int], ...]
    """Name, element type as torch names it, shape, and where it begins, in bytes."""


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
    """That the swap took, of the pieces between steps."""


class NotTaken(Word, frozen=True):
    """Of the engine: the version is refused, the old one serves on."""

    version: int
    reason: str


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
    swap_seconds: float


class Gone(Word, frozen=True):
    """Of the engine's process: the engine is gone, with every turn in it and what it had been given."""

    reason: str
    seconds: float
    """Until another is begun."""


Order = Take | Prepare | Serve
Report = Done | Refused | Prepared | Serving | NotTaken | Tick | Gone

ORDERS = msgspec.msgpack.Decoder(Order)
REPORTS = msgspec.msgpack.Decoder(Report)
encode = msgspec.msgpack.Encoder().encode
