"""Files of a sandbox, as its first process sees them: all of them with digests, contents of blocks, and a whole tree.

Keeps true: no path leads through a symbolic link of the sandbox. Files are opened with O_NOFOLLOW, and links are made
last.

Paths are bytes, written as Latin-1 text. The standard library alone is imported.
"""

import contextlib
import hashlib
import os
import stat
from typing import Any

BLOCK_BYTES = 65_536
"""Files are hashed and saved in blocks of this size."""

DIGEST_BYTES = 16

PATH_BYTES = 1024
"""Longest path that is saved."""

ROOTS = {"work": "/workspace", "tmp": "/tmp", "shm": "/dev/shm"}
"""Folders that commands can write, by their names in a tree. All are in one tmpfs."""


def scan() -> list[list[Any]]:
    """Every file below the roots: path, kind, mode, time of change (ns), size, target, digests of its blocks.

    Raises ValueError for a file that cannot be saved.
    """
    found: list[list[Any]] = []
    inodes: dict[int, str] = {}
    stack = list(reversed(ROOTS))
    while stack:
        name = stack.pop()
        if len(name) > PATH_BYTES:
            raise ValueError(f"a path has more than {PATH_BYTES} bytes")
        with contextlib.suppress(FileNotFoundError):  # a process that runs on has removed it
            found += _entry(name, stack, inodes)
    return found


def _entry(name: str, stack: list[str], inodes: dict[int, str]) -> list[list[Any]]:
    """The entry of a file, or none; a folder's files are added to `stack`. `inodes`: regular files so far."""
    path = path_of(name)
    about = os.lstat(path)
    mode, kind = stat.S_IMODE(about.st_mode), stat.S_IFMT(about.st_mode)
    entry = [name, "", mode, about.st_mtime_ns, 0, "", ""]
    if kind == stat.S_IFDIR:
        entry[1], entry[3] = "d", 0
        stack += sorted((f"{name}/{each.decode('latin-1')}" for each in os.listdir(path)), reverse=True)
    elif kind == stat.S_IFLNK:
        entry[1], entry[2], entry[3], entry[5] = "l", 0, 0, os.readlink(path).decode("latin-1")
    elif kind == stat.S_IFIFO:
        entry[1], entry[3] = "p", 0
    elif kind != stat.S_IFREG:
        return []  # a socket, which is nothing without its process
    elif about.st_nlink > 1 and about.st_ino in inodes:
        entry[1:6] = "h", 0, 0, 0, inodes[about.st_ino]
    else:
        entry[1], (entry[4], entry[6]) = "f", _block_digests(path)
        inodes[about.st_ino] = name
    return [entry]


def path_of(name: str) -> bytes:
    """The path, as commands see it, of a path in a tree."""
    root, slash, rest = name.partition("/")
    return (ROOTS[root] + slash).encode() + rest.encode("latin-1")


def _opened(path: bytes) -> int:
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)


def _block_digests(path: bytes) -> tuple[int, str]:
    """Size of a file, and digests of its blocks (the first 16 bytes of SHA-256) in hexadecimal digits."""
    file = _opened(path)
    try:
        size, digests = 0, []
        while block := os.pread(file, BLOCK_BYTES, size):
            size += len(block)
            digests.append(hashlib.sha256(block).hexdigest()[: 2 * DIGEST_BYTES])
            if len(block) < BLOCK_BYTES:
                break
        return size, "".join(digests)
    finally:
        os.close(file)


def read_blocks(asked: list[list[Any]]) -> tuple[dict[str, Any], bytes]:
    """Return blocks, each given by path and number."""
    blocks = []
    for name, number in asked:
        file = _opened(path_of(name))
        blocks.append(os.pread(file, BLOCK_BYTES, number * BLOCK_BYTES))
        os.close(file)
    return {"sizes": [len(block) for block in blocks]}, b"".join(blocks)


def load(entries: list[list[Any]], content: bytes) -> None:
    """Replace all files by these, whose contents are given in the order of the regular files. Raises OSError."""
    for folder in ROOTS.values():
        for each in os.listdir(folder.encode()):
            _remove(folder.encode() + b"/" + each)
    at = 0
    links, folders = [], []
    for name, kind, mode, mtime_ns, size, target, _ in entries:
        path = path_of(name)
        if kind == "d":
            folders.append((path, mode))
            if name not in ROOTS:
                os.mkdir(path, 0o700)
        elif kind == "f":
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with open(file, "wb") as writer:
                writer.write(content[at : at + size])
                writer.flush()
                os.fchmod(file, mode)
                os.utime(file, ns=(mtime_ns, mtime_ns))
            at += size
        elif kind == "p":
            os.mkfifo(path, mode)
            os.chmod(path, mode)
        else:
            links.append((path, kind, target))
    for path, kind, to in sorted(links, key=lambda link: link[1]):  # hard links, then symbolic links
        if kind == "h":
            os.link(path_of(to), path, follow_symlinks=False)
        else:
            os.symlink(to.encode("latin-1"), path)
    for path, mode in reversed(folders):
        os.chmod(path, mode)


def _remove(path: bytes) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        for each in os.listdir(path):
            _remove(path + b"/" + each)
        os.rmdir(path)
    else:
        os.unlink(path)
