"""The folder of a run: it exists, is writable, and is locked by the process that runs it.

Keeps true
- Two processes never run one folder: the lock is held as long as the process lives, and the kernel releases it when the
  process ends.
- A folder in which a run cannot write is refused with one sentence before any process starts.
"""

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rose.schemas.errors import UsageError

RUN_LOCK, TRAINER_LOCK_FILE = "run.lock", "trainer.lock"
"""Lock files in the folder. `rose up` and `rose demo` hold the first, a trainer, which they start, the second."""

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Error numbers of a file system without locks."""


@contextmanager
def run_folder_lock(folder: Path, lock: str) -> Iterator[None]:
    """Hold a lock file in the folder during the block. The folder is created if it does not exist.

    A file system without locks keeps no other process out. Raises UsageError if another process holds the lock, or if
    the folder cannot be written.
    """
    with _opened(folder, lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = "trainer" if lock == TRAINER_LOCK_FILE else "`rose up`"
            raise UsageError(
                f"another {who} is at work in {folder}: wait for its end or stop it, or choose another run.name"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield


def ensure_folder(folder: Path) -> None:
    """Create the folder if it does not exist. Raises UsageError if it cannot be created."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refused(folder, error) from None


def _opened(folder: Path, lock: str) -> IO[bytes]:
    ensure_folder(folder)
    try:
        return (folder / lock).open("ab")
    except OSError as error:
        raise _refused(folder, error) from None


def _refused(folder: Path, error: OSError) -> UsageError:
    return UsageError(
        f"the run's folder {folder} cannot be written ({error.strerror}: {error.filename}): "
        "name another, by run.folder and run.name"
    )
