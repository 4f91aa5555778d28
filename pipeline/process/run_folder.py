"""The folder of a run: there, writable, and of one process that runs it.

Keeps true
- Two processes never run one folder: its lock is held for as long as a process lives, and goes with it however it ends.
- A folder in which a run cannot write is refused in a sentence before anything is started.
"""

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rose.schemas.errors import UsageError

RUN_LOCK, TRAINER_LOCK_FILE = "run.lock", "trainer.lock"
"""Files in it: `rose up` and `rose demo` hold the first, a trainer the second, which is one of their processes too."""

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""A file system that knows no locks says one of these."""


@contextmanager
def run_folder_lock(folder: Path, lock: str) -> Iterator[None]:
    """Have the folder, which is made if need be, for as long as the block runs. Where a file system knows no locks,
    nobody is kept out.

    Raises UsageError when another process has it, or when nothing can be written there.
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
    """Make it if need be. Raises UsageError."""
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
