"""Packs of a sandbox's files: what a chain gives back, and what is refused."""

import zlib
from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.workers.environments.sandbox.namespace_files import BLOCK_BYTES
from rose.workers.environments.sandbox.tree import (
    Chain,
    Entry,
    Pack,
    PackError,
    Tree,
    block_digest,
    checked_tree,
    content_digest,
    differences,
    encode_pack,
    new_blocks,
    tree_of_files,
    unpacked,
)

NAMES = st.sampled_from(["a", "b", "dir/a", "dir/b", "dir/deep/a", "é"])
CONTENTS = st.one_of(st.binary(max_size=40), st.integers(0, 255).map(lambda byte: bytes([byte]) * (BLOCK_BYTES + 7)))
FILES = st.dictionaries(NAMES, CONTENTS, max_size=5)
ROOTS = [Entry(name, "d", 0o755, 0, 0, "", b"") for name in ("work", "tmp", "shm")]


def file(path: str, content: bytes = b"") -> Entry:
    digests = [block_digest(content[at : at + BLOCK_BYTES]) for at in range(0, len(content), BLOCK_BYTES)]
    return Entry(path, "f", 0o644, 0, len(content), "", b"".join(digests))


def pack_of(chain: Chain, tree: Tree, blocks: Mapping[bytes, bytes]) -> bytes:
    changed, removed = differences(chain.tree, tree)
    return encode_pack(
        chain.end, changed, removed, {digest: blocks[digest] for digest in new_blocks(changed, chain.blocks)}
    )


@given(versions=st.lists(FILES, min_size=1, max_size=6))
def test_chain_gives_the_tree_and_contents_of_its_last_version(versions: list[dict[str, bytes]]) -> None:
    chain, packs = Chain(), []
    for files in versions:
        tree, blocks = tree_of_files(files)
        packs.append(pack_of(chain, tree, blocks))
        chain.append(packs[-1])
    restored, contents = unpacked(packs)
    expected, blocks = tree_of_files(versions[-1])
    assert restored.tree == expected and contents == blocks
    assert content_digest(restored.tree) == content_digest(expected)


@given(files=FILES, name=NAMES, content=CONTENTS)
def test_content_digest_differs_exactly_with_the_contents(files: dict[str, bytes], name: str, content: bytes) -> None:
    before, _ = tree_of_files(files)
    after, _ = tree_of_files({**files, name: content})
    assert (content_digest(before) == content_digest(after)) == (files.get(name) == content)


def test_known_blocks_are_not_packed_again() -> None:
    content = bytes(range(256)) * 1024
    tree, blocks = tree_of_files({"a": content})
    chain = Chain()
    chain.append(pack_of(chain, tree, blocks))
    changed = content[: 2 * BLOCK_BYTES] + b"!" + content[2 * BLOCK_BYTES + 1 :]
    tree, blocks = tree_of_files({"a": changed, "copy": changed})
    pack = msgspec.msgpack.decode(pack_of(chain, tree, blocks), type=Pack)
    assert list(pack.blocks) == [block_digest(changed[2 * BLOCK_BYTES : 3 * BLOCK_BYTES])]


@pytest.mark.parametrize(
    "entry",
    [
        file("/etc/passwd"),
        file("etc/passwd"),
        file("work/../../etc/passwd"),
        file("work//a"),
        file("work/./a"),
        file("work/a\0b"),
        file("work/" + "a" * 2000),
        file("work/€"),
        file("work/missing/a"),
        Entry("work/a", "x", 0, 0, 0, "", b""),
        Entry("work", "l", 0, 0, 0, "/etc", b""),
        Entry("work/a", "h", 0, 0, 0, "work/none", b""),
        Entry("work/a", "h", 0, 0, 0, "../etc/passwd", b""),
        Entry("work/a", "l", 0, 0, 0, "a\0b", b""),
        Entry("work/a", "f", 0o644, 0, 5, "", b""),
        Entry("work/a", "f", 0o644, 0, 0, "", b"x" * 16),
    ],
    ids=lambda entry: entry.path[:20],
)
def test_entry_outside_the_sandbox_is_refused(entry: Entry) -> None:
    with pytest.raises(PackError):
        checked_tree([*ROOTS, entry])


def test_path_through_a_symbolic_link_is_refused() -> None:
    link = Entry("work/away", "l", 0, 0, 0, "/etc", b"")
    with pytest.raises(PackError, match="not a folder"):
        checked_tree([*ROOTS, link, file("work/away/passwd")])


@given(content=st.binary(max_size=200))
def test_any_bytes_are_a_pack_or_refused(content: bytes) -> None:
    with pytest.raises(PackError):
        Chain().append(content)


@given(data=st.data())
@settings(max_examples=200)
def test_damaged_pack_is_refused_or_gives_the_same_files(data: st.DataObject) -> None:
    tree, blocks = tree_of_files({"a": b"one" * 50, "dir/b": b"two"})
    content = bytearray(pack_of(Chain(), tree, blocks))
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    try:
        chain, contents = unpacked([bytes(content)])
    except PackError:
        return
    assert all(block_digest(block) == digest for digest, block in contents.items())
    assert checked_tree(chain.tree.values()) == chain.tree


def test_block_that_decompresses_to_more_than_a_block_is_refused() -> None:
    bomb = zlib.compress(bytes(1 << 26))
    digest = block_digest(bytes(1 << 26))
    entry = Entry("work/a", "f", 0o644, 0, BLOCK_BYTES, "", digest)
    content = msgspec.msgpack.encode(Pack(1, b"", [*ROOTS, entry], [], {digest: bomb}))
    with pytest.raises(PackError, match="digest"):
        unpacked([content])


def test_pack_of_another_chain_is_refused() -> None:
    tree, blocks = tree_of_files({"a": b"one"})
    chain = Chain()
    first = pack_of(chain, tree, blocks)
    chain.append(first)
    second = encode_pack(chain.end, [file("work/b")], [], {})
    with pytest.raises(PackError, match="another chain"):
        unpacked([second])
    assert "work/b" in unpacked([first, second])[0].tree


def test_pack_without_a_block_is_refused() -> None:
    content = msgspec.msgpack.encode(Pack(1, b"", [*ROOTS, file("work/a", b"one")], [], {}))
    with pytest.raises(PackError, match="without all of its blocks"):
        Chain().append(content)
