"""The folder that a lending server, its watchdog and its sidecar share.

Keeps true
- A folder exists as long as one of these processes does. The watchdog removes the folder at its end. If the watchdog
  was killed, the next server that makes a folder removes the abandoned one.
- No folder of another user, and no folder in use, is removed.

The processes of a folder hold a lock on it. The kernel releases the lock when the last process that inherited the lock
has ended.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "rose-lend-"


def make_folder() -> Path:
    """Make a folder for this process, the program that replaces it, and the processes that it forks.

    The folder's lock is held until all of these processes have ended. Abandoned folders are removed first.
    """
    _remove_abandoned()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        with suppress(FileNotFoundError, BlockingIOError):  # another start took the folder for an abandoned one
            lock = _lock(folder)
            if folder.exists():
                os.set_inheritable(lock, True)
                return folder
            os.close(lock)


def _remove_abandoned() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # in use, just removed, or of another user
            if folder.stat(follow_symlinks=False).st_uid == os.getuid():
                lock = _lock(folder)
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _lock(folder: Path) -> int:
    """Lock the folder and return the descriptor that holds the lock. Raises OSError, or BlockingIOError if locked."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock
