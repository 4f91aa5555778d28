"""Process set-up that all roles share: logs, metrics, stop signals, and the lock on the folder of a run.

Keeps true
- Two processes never run one folder: the lock is held as long as the process lives, and the kernel releases it when the
  process ends.
- A folder in which a run cannot write is refused with one sentence before any process starts.
"""

import errno
import fcntl
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import FrameType

import structlog
from structlog.typing import EventDict

from rose.pipeline.terminal import escape_control_chars
from rose.schemas.errors import UsageError
from rose.topics.processes import signal_safe_setter


def configure_logging() -> None:
    """Log one line for each event on standard error: coloured on a terminal, `key=value` otherwise."""
    import sys

    pretty = sys.stderr.isatty()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _escape_event,
            structlog.dev.ConsoleRenderer() if pretty else structlog.processors.LogfmtRenderer(bool_as_flag=False),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def dump_stacks_on_crash() -> None:
    """Write the stacks of all threads to standard error on a crash, or on SIGABRT to a process that hangs."""
    import faulthandler

    if not faulthandler.is_enabled():  # a test that calls a command has enabled it for its own output
        faulthandler.enable(file=2)


def _escape_event(logger: object, name: str, event: EventDict) -> EventDict:
    """Escape control characters: logs are read on terminals and contain text from other programs."""
    return {key: escape_control_chars(value) if isinstance(value, str) else value for key, value in event.items()}


def stop_on_signals() -> Event:
    """Return an event that SIGTERM, SIGHUP or the first Ctrl-C sets; a second Ctrl-C ends the process at once.

    SIGHUP, sent when a terminal closes, stays ignored if it was ignored before (`nohup`).
    """
    stop = Event()
    set_stop = signal_safe_setter(stop)

    def ask(number: int, frame: FrameType | None) -> None:
        set_stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGINT, ask)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, ask)
    return stop


def serve_metrics(host: str, port: int) -> None:
    """Serve this process's metrics and health; port 0 means off. Raises UsageError if the port cannot be used."""
    if port:
        from rose.pipeline.health_server import serve_health

        serve_health(host, port)


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
    ensure_folder(folder)
    with _refusing_unwritable(folder):
        file = (folder / lock).open("ab")
    with file:
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
    with _refusing_unwritable(folder):
        folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def _refusing_unwritable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"the run's folder {folder} cannot be written ({error.strerror}: {error.filename}): "
            "name another, by run.folder and run.name"
        ) from None
