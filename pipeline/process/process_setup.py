"""What every role has as a process: logs, metrics, and a way to be asked to stop."""

import signal
from threading import Event
from types import FrameType

import structlog
from structlog.typing import EventDict

from rose.pipeline.process.terminal import escape_control_chars
from rose.topics.processes import signal_safe_setter


def configure_logging() -> None:
    """One line a decision on standard error: for eyes on a terminal, `key=value` in a file."""
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
    """A crash, or SIGABRT to a process that hangs, puts the stacks of all its threads on standard error."""
    import faulthandler

    if not faulthandler.is_enabled():  # where a test calls a command it is, and tells what the tests do
        faulthandler.enable(file=2)


def _escape_event(logger: object, name: str, event: EventDict) -> EventDict:
    """Logs are read on terminals, and have words of others in them."""
    return {key: escape_control_chars(value) if isinstance(value, str) else value for key, value in event.items()}


def stop_on_signals() -> Event:
    """An event that SIGTERM, SIGHUP or the first Ctrl-C sets; a second Ctrl-C ends the process at once.

    SIGHUP, the end of a terminal, stays without effect where it was (`nohup`).
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
    """Serve this process's metrics and how it is; port 0 is off. Raises UsageError when the port cannot be had."""
    if port:
        from rose.pipeline.process.health_server import serve_health

        serve_health(host, port)
