"""The state of a sandbox as one snapshot on the log: a chain of packs, and the actions that came after them. Pure.

Keeps true
- Whoever has this state, and the store that it names packs in, can make the sandbox again, or learns why nobody can.
- A state has a bound that fits a record, whatever a policy does: beyond it the state says that it cannot be restored.
- No bytes of a state are code.
"""

from typing import Annotated, Any

import msgspec

from rose.workers.environments.protocol import SnapshotError
from rose.workers.environments.sandbox.namespace_files import DIGEST_BYTES
from rose.workers.environments.sandbox.tree import MAX_CHAIN

STATE_BYTES = 700_000
"""Most bytes of packs in a state; a snapshot has 900 KiB at most."""

MAX_ACTIONS = 32
"""Most actions that a restore repeats."""

MAX_ACTION_BYTES = 100_000
"""Most bytes of the actions that a restore repeats."""

REPEAT_SECONDS = 15.0
"""Most seconds that the actions which a restore repeats took when they ran first."""

Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}$")]
"""Random name of a sandbox or of one of its holders; a part of a file's name, so it has no other characters."""


class PackReference(msgspec.Struct, frozen=True, array_like=True):
    """A pack: its bytes, or where the store has them."""

    digest: Digest
    holder: Name
    """The holder that wrote it."""
    content: bytes = b""
    """Empty if the store has it."""


class PendingAction(msgspec.Struct, frozen=True, array_like=True):
    """An action that is in no pack."""

    action: str
    seconds: float
    """How long it ran."""


class SandboxState(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot."""

    version: int = 1
    seed: int
    arguments: dict[str, Any]
    lineage: Name
    """Name of the sandbox since its reset, with all that have restored it."""
    packs: Annotated[list[PackReference], msgspec.Meta(max_length=MAX_CHAIN)] = []
    """Empty: the sandbox as the reset makes it."""
    pending: Annotated[list[PendingAction], msgspec.Meta(max_length=MAX_ACTIONS)] = []
    content: Digest
    """Digest of the files after the pending actions."""
    processes: list[str] = []
    """Command lines of the processes that run on."""
    unrestorable: str = ""
    """Why the state cannot be restored; empty if it can."""


def encode_state(state: SandboxState) -> bytes:
    """Bytes of a state."""
    return msgspec.msgpack.encode(state)


def decode_state(content: bytes) -> SandboxState:
    """The state of these bytes. Raises SnapshotError, also for a state that cannot be restored."""
    try:
        state = msgspec.msgpack.decode(content, type=SandboxState)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SnapshotError(f"not a snapshot of a sandbox: {error}") from None
    if state.version != 1:
        raise SnapshotError(f"a snapshot of version {state.version}: this worker reads version 1; update it")
    if state.unrestorable:
        raise SnapshotError(f"this sandbox cannot be restored: {state.unrestorable}")
    return state


def excess(pending: list[PendingAction], packs: list[PackReference]) -> str:
    """Why a state of these cannot be restored; an empty text if it can."""
    if sum(len(pack.content) for pack in packs) > STATE_BYTES:
        return f"its files take more than {STATE_BYTES} bytes, and environment.sandbox_store is not set"
    if len(pending) > MAX_ACTIONS or sum(len(each.action.encode()) for each in pending) > MAX_ACTION_BYTES:
        return f"more than {MAX_ACTIONS} actions or {MAX_ACTION_BYTES} bytes of them would have to be repeated"
    if sum(each.seconds for each in pending) > REPEAT_SECONDS:
        return f"the actions that would have to be repeated took more than {REPEAT_SECONDS:g} s"
    return ""
