"""Files of a sandbox as values: what changed, packs of changes, and the tree that a chain of packs gives. Pure.

Keeps true
- The tree of a chain is the tree that was packed: every block is checked by its digest, and the tree by its own.
- No path of a tree is absolute, has an empty part, `.` or `..`, or leads through anything but folders of the tree.
- No pack, whatever its bytes, is code, or takes more memory than the limits below.

Example:
    pack 1 (no parent)        work/a, work/b with their blocks
    pack 2 (parent: pack 1)   work/a changed: its new blocks alone; work/b removed
    the chain [1, 2] gives    work/a
"""

import hashlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import blake3
import msgspec

from rose.workers.environments.sandbox.namespace_files import BLOCK_BYTES, DIGEST_BYTES, PATH_BYTES, ROOTS

MAX_ENTRIES = 20_000
"""Most files and folders of a tree."""

MAX_TREE_BYTES = 1 << 30
"""Most bytes of all files of a tree."""

MAX_CHAIN = 12
"""Most packs of a chain; then a pack of the whole tree begins a new chain."""

FIRST_TIME_NS = 946_684_800 * 10**9
"""Time of change of a task's own files: the same wherever the task begins (2000-01-01)."""

KINDS = frozenset("fdlhp")
"""File, folder, symbolic link, hard link, named pipe."""


class PackError(ValueError):
    """Bytes that are no pack of a sandbox's files, or a tree that cannot be one."""


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One file."""

    path: str
    """Bytes of the path, as Latin-1 text; begins with one of ROOTS."""
    kind: str
    mode: Annotated[int, msgspec.Meta(ge=0, le=0o7777)]
    mtime_ns: Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
    size: Annotated[int, msgspec.Meta(ge=0, le=MAX_TREE_BYTES)]
    target: str
    """Target of a link, as Latin-1 text."""
    blocks: bytes
    """Digests of the file's blocks, joined."""

    @property
    def digests(self) -> list[bytes]:
        """Digests of the file's blocks."""
        return [self.blocks[at : at + DIGEST_BYTES] for at in range(0, len(self.blocks), DIGEST_BYTES)]

    @property
    def fields(self) -> list[str | int | bytes]:
        """The fields in their order."""
        return [self.path, self.kind, self.mode, self.mtime_ns, self.size, self.target, self.blocks]


Tree = dict[str, Entry]
"""Entries by path, folders before what is in them."""


class Pack(msgspec.Struct, frozen=True, array_like=True):
    """Changes of a tree: from an empty one if there is no parent."""

    version: int
    parent: bytes
    """Digest of the pack before; empty for the first of a chain."""
    changed: Annotated[list[Entry], msgspec.Meta(max_length=MAX_ENTRIES)]
    removed: Annotated[list[str], msgspec.Meta(max_length=MAX_ENTRIES)]
    blocks: dict[bytes, bytes]
    """New blocks, compressed with zlib, by their digests."""


def checked_tree(entries: Iterable[Entry]) -> Tree:
    """The tree of these entries, in the order of their paths. Raises PackError."""
    tree: Tree = {entry.path: entry for entry in sorted(entries, key=lambda entry: entry.path.split("/"))}
    if len(tree) > MAX_ENTRIES:
        raise PackError(f"{len(tree)} files: {MAX_ENTRIES} are allowed")
    if sum(entry.size for entry in tree.values()) > MAX_TREE_BYTES:
        raise PackError(f"files of more than {MAX_TREE_BYTES} bytes")
    for entry in tree.values():
        if problem := _problem(entry, tree):
            raise PackError(f"path {entry.path[:80]!r}: {problem}")
    return tree


def _problem(entry: Entry, tree: Tree) -> str:
    parts = entry.path.split("/")
    if parts[0] not in ROOTS:
        return "not in a folder of the sandbox"
    if any(part in ("", ".", "..") or "\0" in part for part in parts) or len(entry.path) > PATH_BYTES:
        return "not a path"
    if any(ord(character) > 255 for character in entry.path + entry.target) or "\0" in entry.target:
        return "not bytes"
    if len(parts) == 1:
        return "" if entry.kind == "d" else "not a folder"
    parent = tree.get("/".join(parts[:-1]))
    if parent is None or parent.kind != "d":
        return "its parent is not a folder"
    if entry.kind not in KINDS:
        return f"kind {entry.kind[:8]!r}"
    if entry.kind == "h" and (to := tree.get(entry.target)) is not None and to.kind == "f":
        return ""
    if entry.kind == "h":
        return "a hard link to no file"
    if entry.kind == "l" and len(entry.target) > 4095:
        return "a link of more than 4095 bytes"
    count = -(-entry.size // BLOCK_BYTES) if entry.kind == "f" else 0
    return "" if len(entry.blocks) == count * DIGEST_BYTES else "blocks that do not match its size"


def tree_of_files(files: Mapping[str, bytes]) -> tuple[Tree, dict[bytes, bytes]]:
    """The tree with these files, by path below the folder `work`, and the contents of its blocks. Raises PackError."""
    entries = {"tmp": folder_entry("tmp", 0o1777), "shm": folder_entry("shm", 0o1777), "work": folder_entry("work")}
    blocks: dict[bytes, bytes] = {}
    for path, content in files.items():
        parts = ["work", *path.encode().decode("latin-1").split("/")]
        for depth in range(2, len(parts)):
            name = "/".join(parts[:depth])
            entries.setdefault(name, folder_entry(name))
        pieces = [content[at : at + BLOCK_BYTES] for at in range(0, len(content), BLOCK_BYTES)]
        digests = [block_digest(piece) for piece in pieces]
        blocks |= dict(zip(digests, pieces, strict=True))
        name = "/".join(parts)
        if name in entries:
            raise PackError(f"path {path!r}: both a file and a folder")
        entries[name] = Entry(name, "f", 0o644, FIRST_TIME_NS, len(content), "", b"".join(digests))
    return checked_tree(entries.values()), blocks


def folder_entry(path: str, mode: int = 0o755) -> Entry:
    """The entry of a folder."""
    return Entry(path, "d", mode, 0, 0, "", b"")


def content_digest(tree: Tree) -> bytes:
    """Digest of all but the times of change: two runs of one deterministic command give the same."""
    return digest_of(msgspec.msgpack.encode([[*each.fields[:3], *each.fields[4:]] for each in tree.values()]))


def digest_of(content: bytes) -> bytes:
    """Digest of a pack or another text (BLAKE3)."""
    return blake3.blake3(content).digest(DIGEST_BYTES)


def differences(before: Tree, after: Tree) -> tuple[list[Entry], list[str]]:
    """Entries of `after` that are new or changed, and paths of `before` that `after` has not."""
    changed = [entry for path, entry in after.items() if before.get(path) != entry]
    return changed, [path for path in before if path not in after]


def new_blocks(changed: Sequence[Entry], known: Iterable[bytes]) -> dict[bytes, tuple[str, int]]:
    """Blocks of these entries that are not known, by digest: a path and number to read each from."""
    known = set(known)
    return {
        digest: (entry.path, number)
        for entry in changed
        for number, digest in enumerate(entry.digests)
        if digest not in known
    }


def encode_pack(
    parent: bytes, changed: Sequence[Entry], removed: Sequence[str], blocks: Mapping[bytes, bytes]
) -> bytes:
    """Bytes of a pack. `blocks`: contents of the new blocks. Raises PackError if one is not what its digest says."""
    for digest, block in blocks.items():
        if block_digest(block) != digest:
            raise PackError("a file changed while it was read")
    packed = {digest: zlib.compress(block, 1) for digest, block in blocks.items()}
    return msgspec.msgpack.encode(Pack(1, parent, list(changed), list(removed), packed))


def block_digest(block: bytes) -> bytes:
    """Digest of a block (the first bytes of SHA-256)."""
    return hashlib.sha256(block).digest()[:DIGEST_BYTES]


class Chain:
    """The tree of a chain of packs, with the blocks that its packs hold."""

    def __init__(self) -> None:
        self.tree: Tree = {}
        self.packs: list[bytes] = []
        """Digests of the packs."""
        self.blocks: dict[bytes, int] = {}
        """Known blocks, with the compressed bytes of each."""

    @property
    def end(self) -> bytes:
        """Digest of the last pack; empty without packs."""
        return self.packs[-1] if self.packs else b""

    def copy(self) -> "Chain":
        """A chain that can grow apart from this one."""
        other = Chain()
        other.tree, other.packs, other.blocks = self.tree, self.packs, self.blocks
        return other

    def append(self, content: bytes) -> dict[bytes, bytes]:
        """Add the next pack; returns its blocks, compressed. Raises PackError; the chain is unchanged then."""
        try:
            pack = msgspec.msgpack.decode(content, type=Pack)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise PackError(f"not a pack of a sandbox: {error}") from None
        if pack.version != 1:
            raise PackError(f"a pack of version {pack.version}: this worker reads version 1; update it")
        if pack.parent != self.end:
            raise PackError("a pack of another chain")
        tree = dict(self.tree)
        for path in pack.removed:
            tree.pop(path, None)
        tree.update((entry.path, entry) for entry in pack.changed)
        tree = checked_tree(tree.values())
        known = self.blocks.keys() | pack.blocks.keys()
        if any(digest not in known for entry in tree.values() for digest in entry.digests):
            raise PackError("a pack without all of its blocks")
        self.tree = tree
        self.packs = [*self.packs, digest_of(content)]
        self.blocks = self.blocks | {digest: len(packed) for digest, packed in pack.blocks.items()}
        return pack.blocks


def unpacked(packs: Iterable[bytes]) -> tuple[Chain, dict[bytes, bytes]]:
    """The chain of these packs, and the contents of the blocks of its tree. Raises PackError."""
    chain, packed = Chain(), dict[bytes, bytes]()
    for content in packs:
        packed |= chain.append(content)
    wanted = {digest for entry in chain.tree.values() for digest in entry.digests}
    blocks = {}
    for digest in wanted:
        blocks[digest] = block = _decompressed(packed[digest])
        if block_digest(block) != digest:
            raise PackError("a block that is not what its digest says")
    for entry in chain.tree.values():
        if sum(len(blocks[digest]) for digest in entry.digests) != entry.size:
            raise PackError(f"path {entry.path[:80]!r}: blocks that do not match its size")
    return chain, blocks


def _decompressed(packed: bytes) -> bytes:
    try:
        return zlib.decompressobj().decompress(packed, BLOCK_BYTES)
    except zlib.error as error:
        raise PackError(f"a block that does not decompress: {error}") from None
