"""The folder that a lending server, its watchdog and the sidecar share: made, and never left behind for long.

Keeps true
- A folder is there as long as one of those processes is, and whoever makes the next one removes what is nobody's: its
  watchdog would have, but it may have been killed.
- Nothing is removed that another user made, or that somebody may still make use of.

Who has a folder holds a lock on it, which the kernel lets go of when the last process that inherited it has ended.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "rose-lend-"


def make_folder() -> Path:
    """One for this process, for what it becomes and for those that it forks, until all of them have ended."""
    _remove_abandoned()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        with suppress(FileNotFoundError, BlockingIOError):  # another start took it for one that was left
            lock = _lock(folder)
            if folder.exists():
                os.set_inheritable(lock, True)
                return folder
            os.close(lock)


def _remove_abandoned() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # somebody has it, has just removed it, or it is another user's
            if folder.stat(follow_symlinks=False).st_uid == os.getuid():
                lock = _lock(folder)
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _lock(folder: Path) -> int:
    """A descriptor that holds the folder's lock. Raises OSError, BlockingIOError if somebody else does."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock
