"""Leases of sandboxes on one host: a file for each sandbox, which names the processes that hold it and run it.

Keeps true
- A sandbox whose lease file is removed, or not renewed for LEASE_SECONDS, ends by itself within a second.
- The process that holds a sandbox renews its leases while it runs. A lease is removed by its holder, by the parent of
  the sandbox's first process, and by any worker of the host that finds its holder gone.
- A process is named by its id and the time of its start, so that a later process of the same id is not taken for it.
"""

import contextlib
import fcntl
import os
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from rose.topics.processes import start_thread

LEASE_SECONDS = 30.0
"""Time after which a sandbox whose holder does not renew its lease ends. With PASS_SECONDS, it is the longest time that
a sandbox outlives its holder as long as one worker runs on the host."""

PASS_SECONDS = 5.0
"""Time between two passes of the reaper, which also renews the leases of its own process."""

SLOT_SECONDS = 0.005
"""Time between two tries to get one of the host's places for saves."""


def folder_of_leases() -> Path:
    """Folder of the leases of this user and PID namespace; made if it does not exist.

    Containers that share a temporary folder do not see each other's processes.
    """
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    folder = Path(tempfile.gettempdir()) / f"rose-sandboxes-{os.geteuid()}-{namespace}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to another user: remove it, or set TMPDIR")
    return folder


@contextlib.contextmanager
def lease_folder() -> Iterator[int]:
    """A descriptor of the folder of leases."""
    descriptor = os.open(folder_of_leases(), os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def process_name(pid: int) -> str:
    """Id and start time of a process; an empty text if it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else f"{pid} {int(fields[19])}"


class Lease:
    """The lease of one sandbox, held by this process."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self._open = True

    @classmethod
    def take(cls) -> "Lease":
        """Write a lease file, and start this process's reaper."""
        path = folder_of_leases() / f"{uuid.uuid4().hex}.lease"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(descriptor, f"{process_name(os.getpid())}\n".encode())
        lease = cls(path, descriptor)
        REAPER.hold(lease)
        return lease

    def name_process(self, pid: int) -> None:
        """Add the parent of the sandbox's first process."""
        os.write(self.descriptor, f"{process_name(pid)}\n".encode())

    def renew(self) -> None:
        """Set the time of the last renewal to now."""
        with contextlib.suppress(OSError):
            os.utime(self.descriptor)

    def give_back(self) -> None:
        """Remove the lease; may be called twice."""
        if self._open:
            self._open = False
            REAPER.let_go(self)
            self.path.unlink(missing_ok=True)
            os.close(self.descriptor)


class Reaper:
    """Renews the leases of this process, and removes those of processes that are gone."""

    def __init__(self) -> None:
        self._held: set[Lease] = set()
        self._lock = threading.Lock()
        self._pid = 0

    def hold(self, lease: Lease) -> None:
        """Renew this lease from now on."""
        with self._lock:
            if self._pid != os.getpid():  # the first lease, or the first one after a fork
                self._held.clear()
                self._pid = os.getpid()
                start_thread(self._work, name="sandbox-reaper")
            self._held.add(lease)

    def let_go(self, lease: Lease) -> None:
        """Do not renew this lease any more."""
        with self._lock:
            self._held.discard(lease)

    def _work(self) -> None:
        while True:
            with self._lock:
                for lease in self._held:
                    lease.renew()
            with contextlib.suppress(OSError):
                reap(folder_of_leases())
            time.sleep(PASS_SECONDS)


def reap(folder: Path) -> int:
    """Remove the leases whose holder is gone, and kill what still runs under them; returns their number."""
    removed = 0
    for path in folder.glob("*.lease"):
        with contextlib.suppress(OSError, ValueError):
            holder, *runner = path.read_text(encoding="ascii").splitlines() or [""]
            if _runs(holder) or time.time() - path.stat().st_mtime < PASS_SECONDS:
                continue
            path.unlink()
            removed += 1
            if runner and _runs(runner[0]):
                os.kill(int(runner[0].split()[0]), signal.SIGKILL)
    return removed


def _runs(name: str) -> bool:
    return name != "" and process_name(int(name.split()[0])) == name


REAPER = Reaper()


@contextlib.contextmanager
def host_slot(slots: int, wanted: threading.Event) -> Iterator[bool]:
    """One of `slots` places that all processes of this user on the host share; false once it is not `wanted`."""
    folder = folder_of_leases()
    files = [os.open(folder / f"checkpoint.{number}", os.O_RDWR | os.O_CREAT, 0o600) for number in range(slots)]
    try:
        has_slot = False
        while wanted.is_set() and not (has_slot := any(map(_locks, files))):
            time.sleep(SLOT_SECONDS)
        yield has_slot
    finally:
        for file in files:
            os.close(file)  # which releases its lock


def _locks(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
