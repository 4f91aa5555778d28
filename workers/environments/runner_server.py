"""Server side of a process of environments: a runner that gets jobs over a connection to the worker.

Keeps true
- The process ends when the worker closes the connection, and never waits for the worker.
- Environments run on the main thread, where Python can handle signals: graders limit their time with SIGALRM.
- Modules of ROSE are imported before the user's folders are on the import path, so no file there replaces a module.
- The connection does not use standard input or output, which an environment may change.
"""

import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from io import TextIOWrapper
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy  # noqa: F401  tokens are unpacked with it, and a user's folder may have a file of that name
import structlog

from rose.schemas.errors import ThreadRefused, UsageError, describe_error
from rose.topics.processes import set_process_name, start_thread, unread_stream
from rose.workers.environments.jobs import (
    JOBS,
    EnvironmentFailure,
    Job,
    JobResult,
    RunnerLimits,
    StatusCounters,
    decode_as,
    map_counters,
)
from rose.workers.environments.process_integrity import (
    MOST_LEFT,
    MOST_LEFT_EACH,
    ProcessIntegrity,
    end_if_forked,
    restore_child_handling,
)
from rose.workers.environments.registry import UnknownEnvironment, load_environment
from rose.workers.environments.sandbox.host import SandboxSettings, configure_sandboxes
from rose.workers.environments.thread_runner import CLOSE_SECONDS, ThreadRunner
from rose.workers.environments.turn_format import TurnFormat

_exit = os._exit
"""The function `os._exit` at the import: an environment may replace it."""

MAX_MESSAGE_BYTES = 1 << 26
"""Most bytes of a message in either direction."""


class ProcessSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration that a process receives first."""

    environment: str
    model_folder: str
    import_paths: list[str]
    """The import path; with `own_python` only the folders before that of the interpreter."""
    own_python: bool = False
    """Whether the process has another interpreter than the worker."""
    limits: RunnerLimits
    generation: int
    sandboxes: SandboxSettings = SandboxSettings()


def serve(descriptor: int, shared: int) -> NoReturn:
    """Serve the worker until it ends or closes the connection; then this process ends.

    `shared`: descriptor of the memory with the status counters.
    """
    _let_readers_go()
    _log_to_standard_error()
    os.set_inheritable(descriptor, False)
    line, signs = Connection(descriptor), map_counters(shared)
    status = 0
    try:
        kind = msgspec.msgpack.decode(line.recv_bytes(MAX_MESSAGE_BYTES), type=ProcessSetup)
        set_process_name(f"env {kind.environment}")
        if kind.limits.memory_bytes:
            _limit_memory(kind.limits.memory_bytes)
        configure_sandboxes(kind.sandboxes)
        status = RunnerServer(line, kind, signs).run()
    except (EOFError, OSError):
        pass  # the worker is gone
    except (UsageError, ThreadRefused) as error:
        line.send_bytes(msgspec.msgpack.encode(("unfit", str(error))))
    except BaseException:  # noqa: BLE001 - an error of ROSE or of an import; the worker reads the status
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    _exit(status)  # also if an environment has left threads behind


def _limit_memory(most_bytes: int) -> None:
    """Limit the private memory of this process, and of each process that it starts."""
    highest = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = most_bytes if highest == resource.RLIM_INFINITY else min(most_bytes, highest)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, highest))


class RunnerServer:
    """A runner and the connection to the worker. Raises UsageError if there is no such environment."""

    def __init__(self, line: Connection, kind: ProcessSetup, signs: StatusCounters) -> None:
        self._line = line
        self._leaving = False
        turn_format = TurnFormat(Path(kind.model_folder))
        sys.path[:] = [*kind.import_paths, *(sys.path if kind.own_python else ())]
        home = os.getpid()
        try:
            create = load_environment(kind.environment)
            end_if_forked(home)
        except KeyboardInterrupt:  # raised by the module: Ctrl-C goes to the command
            raise UsageError(f"environment {kind.environment!r}: its import raises KeyboardInterrupt") from None
        except UnknownEnvironment as error:
            end_if_forked(home, error.__cause__ or error)
            raise
        restore_child_handling()
        self._runner = ThreadRunner(
            turn_format,
            lambda _: create(),
            self._answer,
            kind.limits,
            generation=kind.generation,
            signs=signs,
            integrity=ProcessIntegrity(self._give_up, most=MOST_LEFT + MOST_LEFT_EACH * kind.limits.max_live),
        )

    def run(self) -> int:
        """Run what the worker asks until it asks to stop; returns the exit status."""
        start_thread(self._listen, name="worker-asks")
        self._send(msgspec.msgpack.encode(("ready",)))
        self._runner.run()
        if self._runner.exit_reason:
            self._send(msgspec.msgpack.encode(("lost", self._runner.exit_reason)))
        return 0 if self._leaving else 1

    def _listen(self) -> None:
        status = 1
        try:
            self._obey()
            time.sleep(CLOSE_SECONDS)  # the runner ends by then, and this process with it, if nothing blocks it
            status = 0
        except (EOFError, OSError):
            status = 0  # the worker is gone
        except BaseException:  # noqa: BLE001 - the worker learns the status
            traceback.print_exc()
        _exit(status)

    def _obey(self) -> None:
        handlers: dict[str, Callable[[Any], None]] = {
            "start": lambda jobs: self._runner.start([decode_as(JOBS, name, fields) for name, fields in jobs]),
            "release": self._runner.release,
            "cancel": self._runner.cancel,
            "begin_generation": self._runner.begin_generation,
        }
        while True:
            what, detail = msgspec.msgpack.decode(self._line.recv_bytes(MAX_MESSAGE_BYTES))
            if what == "leave":
                self._leaving = True
                self._runner.stop()
                return
            handlers[what](detail)

    def _give_up(self, change: str) -> NoReturn:
        """End this process, so that all jobs that are under way start again in a fresh process."""
        try:
            self._send(msgspec.msgpack.encode(("changed", change)))
        finally:
            _exit(0)  # also if there is no memory for the message

    def _answer(self, job: Job, answer: JobResult) -> None:
        try:
            message = msgspec.msgpack.encode(("answer", job.ticket, type(answer).__name__, answer))
        except Exception as error:  # noqa: BLE001 - nothing that an environment hands back should come to this
            message = self._failed(job, describe_error(error))
        if len(message) > MAX_MESSAGE_BYTES:
            message = self._failed(job, f"it hands back {len(message)} bytes, {MAX_MESSAGE_BYTES} are allowed")
        self._send(message)

    def _failed(self, job: Job, reason: str) -> bytes:
        failed = EnvironmentFailure(f"environment {job.environment}: {reason}")
        return msgspec.msgpack.encode(("answer", job.ticket, EnvironmentFailure.__name__, failed))

    def _send(self, message: bytes) -> None:
        try:
            self._line.send_bytes(message)
        except OSError:
            _exit(0)  # the worker is gone


def _let_readers_go() -> None:
    """Let environments continue to print after the reader of the worker's log has ended."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout = unread_stream(1, sys.stdout)
    if isinstance(sys.stderr, TextIOWrapper):
        sys.stderr = unread_stream(2, sys.stderr)


def _log_to_standard_error() -> None:
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.LogfmtRenderer(bool_as_flag=False),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
