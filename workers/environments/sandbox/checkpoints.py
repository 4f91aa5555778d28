"""Checkpoints of one sandbox: what a turn changed, and which state its snapshot has.

Keeps true
- A state is never ahead of what can be restored: an action that is in no pack is in the state, to be repeated.
- Nothing is saved for a turn that changed nothing. A change of few bytes is in the state at once. A larger one is saved
  while the model samples the next turn: its state has the action until the pack is stored.
- No command waits for a save, but for one read of some blocks; a save whose files are still unread at the next command
  is abandoned, and the next save has its changes. Only when the state would become unrestorable does a command wait.
- Files are saved only while no process of the sandbox runs: a running process cannot be saved. Its state repeats all
  actions since the last pack instead.
"""

import threading
import uuid
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import structlog

from rose.schemas.errors import describe_error
from rose.workers.environments.sandbox.host import SandboxHost, SaveAbandoned
from rose.workers.environments.sandbox.namespace_files import BLOCK_BYTES
from rose.workers.environments.sandbox.process import READ_BLOCKS, SandboxLost, SandboxProcess
from rose.workers.environments.sandbox.state import (
    MAX_ACTIONS,
    REPEAT_SECONDS,
    PackReference,
    PendingAction,
    SandboxState,
    encode_state,
    excess,
)
from rose.workers.environments.sandbox.tree import (
    MAX_CHAIN,
    Chain,
    Tree,
    content_digest,
    differences,
    digest_of,
    encode_pack,
    new_blocks,
)

AT_ONCE_BYTES = 65_536
"""Most bytes of changed blocks that are saved with the step itself: about a millisecond."""

INLINE_BYTES = 16_384
"""Bytes of packs in a state above which they are moved to the store, if there is one."""

WASTE_BYTES = 1 << 20
"""Bytes of blocks that no file has any more, after which a pack of the whole tree begins a new chain, if they are more
than the blocks in use."""


log = structlog.get_logger()


class Change(Enum):
    """Kind of change of a turn."""

    NOTHING = "nothing"
    FILES = "files"
    PROCESSES = "processes"
    """A process runs on, or one that ran on has ended; files may have changed too."""


@dataclass(slots=True)
class Figures:
    """Counts of turns and checkpoints of one sandbox; for people and benchmarks."""

    turns: dict[Change, int] = field(default_factory=lambda: dict.fromkeys(Change, 0))
    state_bytes: int = 0
    """Bytes of the states that differ from the one before: they are written to the log."""
    stored_bytes: int = 0
    """Bytes of the packs that were written to the store."""
    at_once: int = 0
    in_background: int = 0
    abandoned: int = 0
    waits: int = 0
    """Commands that waited for a save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The result of a save."""

    packs: list[PackReference]
    """The packs of the chain; without their contents if there is a store."""
    chain: Chain
    covers: int
    """Number of pending actions whose changes are in it."""
    stored_bytes: int


@dataclass(slots=True)
class Save:
    """A save that runs in another thread: of files, or of packs that move to the store."""

    host: SandboxHost
    sandbox: SandboxProcess
    lineage: str
    holder: str
    packs: list[PackReference]
    """Packs of the chain that the save continues."""
    chain: Chain
    tree: Tree
    content: bytes
    """Content digest of the tree."""
    covers: int
    """Number of pending actions whose changes the tree has."""
    reads: bool
    """Whether the files are saved, and not only packs moved to the store."""
    wanted: threading.Event = field(default_factory=threading.Event)
    gate: threading.Lock = field(default_factory=threading.Lock)
    """Held for each read of the sandbox's files, and to withdraw `wanted`."""
    done: "Future[Saved] | None" = None

    def begin(self) -> None:
        """Have the host's threads run the save."""
        self.wanted.set()
        self.done = self.host.start_save(self._run)

    def withdraw(self) -> None:
        """Read no file from now on. A save that has read all files goes on."""
        with self.gate:
            self.wanted.clear()

    def _run(self) -> Saved:
        with self.host.turn_to_save(self.wanted) as written:
            packs = list(self.packs)
            if self.reads:
                packs.append(self._packed())
            if self.host.store is not None:
                written += [len(pack.content) for pack in packs]
                packs = [self.host.store.put(self.lineage, pack) if pack.content else pack for pack in packs]
                self.host.store.put_note(self.lineage, self.content, packs)
        return Saved(packs=packs, chain=self.chain, covers=self.covers, stored_bytes=sum(written))

    def _packed(self) -> PackReference:
        changed, removed = differences(self.chain.tree, self.tree)
        wanted = new_blocks(changed, self.chain.blocks)
        content: list[bytes] = []
        places = list(wanted.values())
        for begin in range(0, len(places), READ_BLOCKS):
            with self.gate:
                if not self.wanted.is_set():
                    raise SaveAbandoned
                content += self.sandbox.read(places[begin : begin + READ_BLOCKS])
        pack = encode_pack(self.chain.end, changed, removed, dict(zip(wanted, content, strict=True)))
        self.chain.append(pack)
        return PackReference(digest_of(pack), self.holder, pack)


class Checkpoints:
    """The checkpoints of one sandbox. Used by one thread at a time."""

    def __init__(
        self, host: SandboxHost, base: SandboxState, chain: Chain, tree: Tree, figures: Figures, encoded: bytes = b""
    ) -> None:
        """`base`: the state that the sandbox is in; `chain`: that of its packs; `tree`: its files.

        `encoded`: the bytes of a state that was restored.
        """
        self._host = host
        self._base = base
        self._holder = uuid.uuid4().hex
        self._chain = chain
        self._packs = list(base.packs)
        self._pending = list(base.pending)
        self._processes = base.processes
        self._tree: Tree | None = tree
        """Files after the last action that may have changed them; None if they could not be read."""
        self._too_large: Tree | None = None
        """Files whose packs no state can hold."""
        self._content = base.content
        self._unreadable = ""
        self._save: Save | None = None
        self._superseded: list[PackReference] = []
        """Stored packs that are not in the chain any more; the newest state may refer to them."""
        self._unused: list[PackReference] = []
        """Stored packs that the newest state does not refer to."""
        self._encoded = encoded
        self._is_new = not encoded
        self._notes: set[bytes] = set()
        """Content digests with a note of this holder in the store."""
        self.figures = figures

    def on_action(self, action: str, seconds: float, tree: Tree | str, processes: list[str]) -> Change:
        """Take what an action has left behind. `tree`: the files, or why they cannot be saved."""
        change = self._change(tree, processes)
        self.figures.turns[change] += 1
        self._unreadable = tree if isinstance(tree, str) else ""
        if change is not Change.NOTHING:
            self._tree = None if isinstance(tree, str) else tree
            self._processes = processes
            self._pending.append(PendingAction(action, seconds))
            self._content = content_digest(self._tree) if self._tree is not None else self._content
            self._is_new = True
        return change

    def _change(self, tree: Tree | str, processes: list[str]) -> Change:
        if processes or self._processes:
            return Change.PROCESSES
        return Change.NOTHING if tree == self._tree else Change.FILES

    def before_action(self) -> None:
        """Make sure that no file is read from now on; waits for a save only if the state would become unrestorable."""
        if self._host.store is not None and self._encoded:  # the newest state is on the log by now
            self._host.store.delete(self._base.lineage, self._unused)
            self._unused = []
            for content in self._notes - {self._content}:
                self._host.store.delete_note(self._base.lineage, content)
            self._notes &= {self._content}
        self._collect(wait=self._is_near_bounds())
        if self._save is not None:
            self._save.withdraw()

    def _is_near_bounds(self) -> bool:
        seconds = sum(each.seconds for each in self._pending)
        near = len(self._pending) >= MAX_ACTIONS // 2 or seconds > REPEAT_SECONDS / 2
        self.figures.waits += near and self._save is not None
        return near

    def state(self, sandbox: SandboxProcess) -> bytes:
        """The state after the last action, as a snapshot; begins a save if one is due."""
        self._collect(wait=False)
        if self._is_new or not self._encoded:
            self._save_at_once(sandbox)
            self._encode()
        if self._save is None and self._is_due():
            self._begin_save(sandbox)
        return self._encoded

    def close(self) -> None:
        """Abandon a save that is under way."""
        if self._save is not None:
            self._save.withdraw()

    def _encode(self) -> None:
        unrestorable = self._unreadable or excess(self._pending, self._packs)
        given: dict[str, Any] = {"pending": self._pending, "packs": self._packs, "processes": self._processes}
        if unrestorable:
            given = {"unrestorable": unrestorable}
        base, arguments = self._base, self._base.arguments
        if self._packs:  # which have the files that the reset has made
            arguments = {name: value for name, value in arguments.items() if name not in ("files", "setup")}
        encoded = encode_state(
            SandboxState(seed=base.seed, arguments=arguments, lineage=base.lineage, content=self._content, **given)
        )
        if encoded != self._encoded:
            self.figures.state_bytes += len(encoded)
        self._encoded, self._is_new = encoded, False
        self._unused, self._superseded = self._unused + self._superseded, []

    def _is_due(self) -> bool:
        """Whether a save would make the state smaller or faster to restore."""
        if self._tree is None or self._processes or self._tree is self._too_large:
            return False
        inline = sum(len(pack.content) for pack in self._packs)
        return self._is_unsaved() or (self._host.store is not None and inline > INLINE_BYTES)

    def _is_unsaved(self) -> bool:
        """Whether there are files in no pack. Files that `setup` has made are saved too: it may take long."""
        return bool(self._pending) or (not self._packs and bool(self._base.arguments.get("setup")))

    def _whole(self) -> bool:
        """Whether the next pack begins a new chain."""
        used = {digest for entry in (self._tree or {}).values() for digest in entry.digests}
        waste = sum(size for digest, size in self._chain.blocks.items() if digest not in used)
        kept = sum(self._chain.blocks.values()) - waste
        return len(self._chain.packs) >= MAX_CHAIN or waste > max(kept, WASTE_BYTES)

    def _save_at_once(self, sandbox: SandboxProcess) -> None:
        """Save a change of few bytes."""
        if not self._is_unsaved() or self._tree is None or self._processes:
            return
        if self._save is not None or self._whole():
            return
        changed, removed = differences(self._chain.tree, self._tree)
        wanted = new_blocks(changed, self._chain.blocks)
        if sum(min(self._tree[path].size, BLOCK_BYTES) for path, _ in wanted.values()) > AT_ONCE_BYTES:
            return
        try:
            blocks = dict(zip(wanted, sandbox.read(list(wanted.values())), strict=True))
        except SandboxLost:
            return  # the next turn makes the sandbox again
        content = encode_pack(self._chain.end, changed, removed, blocks)
        packs = [*self._packs, PackReference(digest_of(content), self._holder, content)]
        if excess([], packs):
            return
        self._chain.append(content)
        self._packs, self._pending = packs, []
        self.figures.at_once += 1

    def _begin_save(self, sandbox: SandboxProcess) -> None:
        assert self._tree is not None
        is_whole = self._is_unsaved() and self._whole()
        self._save = Save(
            host=self._host,
            sandbox=sandbox,
            lineage=self._base.lineage,
            holder=self._holder,
            packs=[] if is_whole else self._packs,
            chain=Chain() if is_whole else self._chain.copy(),
            tree=self._tree,
            content=self._content,
            covers=len(self._pending),
            reads=self._is_unsaved(),
        )
        self._save.begin()

    def _collect(self, *, wait: bool) -> None:
        """Take the result of a save that has ended. `wait`: until it has."""
        if self._save is None or self._save.done is None or not (wait or self._save.done.done()):
            return
        done, content, reads, self._save = self._save.done, self._save.content, self._save.reads, None
        try:
            saved = done.result()
        except (SaveAbandoned, SandboxLost):
            self.figures.abandoned += 1
            return
        except (OSError, ValueError) as error:  # the store is full, or a file changed while it was read
            self.figures.abandoned += 1
            log.warning("sandbox_not_saved", reason=describe_error(error))
            return
        self.figures.in_background += 1
        self._notes.add(content)
        self.figures.stored_bytes += saved.stored_bytes
        if excess([], saved.packs):
            self._too_large = self._tree
            return
        kept = {pack.digest for pack in saved.packs}
        self._superseded += [pack for pack in self._packs if pack.digest not in kept and not pack.content]
        self._packs, self._chain = saved.packs, saved.chain
        self._pending = self._pending[saved.covers :]
        self._is_new = self._is_new or reads
