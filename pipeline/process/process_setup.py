"""Process set-up that all roles share: logs, metrics and stop signals."""

import signal
from threading import Event
from types import FrameType

import structlog
from structlog.typing import EventDict

from rose.pipeline.process.terminal import escape_control_chars
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
        from rose.pipeline.process.health_server import serve_health

        serve_health(host, port)
