"""The sidecar of a lending server: an executor whose engine is the server's guest, or an observer of the server.

Keeps true
- Serving continues whatever happens to the sidecar. The sidecar ends with the server after a STOPPING heartbeat, and is
  restarted if it is killed (`watchdog`).
- The sidecar waits for a dropped guest, an unreachable broker or a server that is still starting, and then runs a new
  incarnation of the executor. An error that only an operator can fix (UsageError) ends the sidecar with a log event.
- The folder that server, watchdog and sidecar share exists as long as one of these processes does. The watchdog removes
  the folder at its end. If the watchdog was killed, the next server that makes a folder removes the abandoned one. No
  folder of another user, and no folder in use, is removed.
"""

import fcntl
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import NoReturn

import msgspec
import structlog

from rose.schemas.errors import RoseError, UsageError
from rose.schemas.heartbeats import WorkerClass
from rose.topics.acl import EXECUTOR, connect_as
from rose.topics.health import HEALTH
from rose.topics.processes import die_with_parent, set_process_name, signal_safe_setter
from rose.topics.settings import BusSettings
from rose.workers.executor.config import ExecutorConfig
from rose.workers.executor.grants import Lease
from rose.workers.executor.ipc.engine_client import EngineClient
from rose.workers.lender.config import LendConfig, LenderConfig
from rose.workers.lender.observe import observe
from rose.workers.lender.recording import Recording
from rose.workers.lender.sidecar_link import Connection, connect
from rose.workers.lender.status_page import StatusPage
from rose.workers.lender.vllm import SETTING
from rose.workers.lender.watchdog import Watchdog
from rose.workers.model_config import check_context_length
from rose.workers.weights.config import WeightsConfig
from rose.workers.weights.model_folder import check_folder
from rose.workers.weights.trust import run_id

FOLDER_PREFIX = "rose-lend-"

CONNECT_RETRY_SECONDS = 0.5
"""Seconds between two tries to connect to a server, whose start takes seconds."""

RESTART_SECONDS = 1.0
"""Seconds before the executor restarts after a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LendingPlan:
    """The settings of a lending server: the run that it lends to, the limits, and the stop file."""

    settings: BusSettings | None
    """Settings of the run's bus; None: the server lends nothing and is observed."""
    executor: ExecutorConfig
    lender: LenderConfig
    weights: WeightsConfig
    stop_file: Path
    exporting: Callable[[], AbstractContextManager[None]]
    """Exports metrics and traces while a sidecar runs. May raise UsageError."""
    record: Path | None = None
    """File for the recording of an observed server."""


def lend(plan: LendingPlan, serving: Path, flags: Sequence[str]) -> NoReturn:
    """Replace this process by a vLLM server that lends as planned.

    `serving`: model folder of the server. `flags`: further command line flags of vLLM. Call it before this process has
    a client of a broker: a fork does not copy librdkafka's threads. Metrics and traces are exported by the sidecar.
    Raises FolderError if no guest can be built from the policy.
    """
    shapes: Mapping[str, tuple[int, ...]] = {}
    if plan.settings is not None:
        shapes, _ = check_folder(plan.executor.model_folder)
        check_context_length(plan.executor.model_folder, plan.executor.max_model_len)
    folder = make_folder()
    file, page = folder / "lend.json", StatusPage.create(folder / "pulse")
    file.write_bytes(msgspec.json.encode(_lend_config(plan, folder)))
    _fork(lambda: _run_watchdog(plan, shapes, folder, page))
    command = [sys.executable, "-m", "rose.workers.lender.vllm_server", "--model", str(serving), *flags]
    os.execve(sys.executable, command, {**os.environ, SETTING: str(file)})


def _lend_config(plan: LendingPlan, folder: Path) -> LendConfig:
    config = plan.executor
    return LendConfig(
        model_folder=str(config.model_folder.resolve()),
        socket=str(folder / "socket"),
        dtype=config.dtype,
        max_turns=config.max_turns,
        max_model_len=config.max_model_len,
        kv_cache_bytes=config.kv_cache_bytes,
        step_tokens=config.step_tokens,
        promise=plan.lender.promise,
        memory=plan.lender.memory,
        untried_devices=plan.lender.untried_devices,
        heartbeat_seconds=config.heartbeat_seconds,
        pulse=str(folder / "pulse"),
        observe=plan.settings is None,
    )


def make_folder() -> Path:
    """Make a folder for this process, the program that replaces it, and the processes that it forks.

    The processes hold a lock on the folder, which the kernel releases when the last process that inherited the lock has
    ended. Abandoned folders are removed first.
    """
    _remove_abandoned()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        with suppress(FileNotFoundError, BlockingIOError):  # another start took the folder for an abandoned one
            lock = _lock(folder)
            if folder.exists():
                os.set_inheritable(lock, True)
                return folder
            os.close(lock)


def _remove_abandoned() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
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


def _fork(program: Callable[[], None]) -> int:
    """Fork a child that runs only `program`, and return its process id.

    The child receives SIGTERM when this process is gone.
    """
    end = die_with_parent(os.getpid(), signal.SIGTERM)
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        end()
        program()
        status = 0
    except Exception:  # noqa: BLE001  nothing else reports an error of the child
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _stop_on_signal() -> Event:
    stop = Event()
    set_stop = signal_safe_setter(stop)
    signal.signal(signal.SIGTERM, lambda *_: set_stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles it, and its end stops the children
    return stop


def _run_watchdog(plan: LendingPlan, shapes: Mapping[str, tuple[int, ...]], folder: Path, page: StatusPage) -> None:
    """Run the program of the watchdog, and remove the shared folder at its end."""
    stop = _stop_on_signal()
    set_process_name(f"watchdog-{plan.executor.short_name}")
    try:
        begin = lambda: _fork(lambda: _run_sidecar(plan, shapes, folder / "socket"))  # noqa: E731
        Watchdog(page, plan.stop_file, begin, hang_seconds=plan.lender.hang_seconds).run(stop)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_sidecar(plan: LendingPlan, shapes: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Run the program of the sidecar: one connection after another until a stop or a UsageError."""
    name, stop = plan.executor.worker, _stop_on_signal()
    set_process_name(f"sidecar-{plan.executor.short_name}")
    log = structlog.get_logger("lender").bind(worker=name)
    try:
        with plan.exporting():
            while not stop.is_set():
                try:
                    _run_connection(plan, shapes, path, stop)
                except UsageError:
                    raise
                except RoseError as error:
                    log.warning("restarting", reason=str(error))
                    HEALTH.report_restart(str(error))
                    stop.wait(RESTART_SECONDS)
                except Exception as error:  # nothing else logs the error or restarts the executor
                    log.exception("restarting")
                    HEALTH.report_restart(repr(error))
                    stop.wait(RESTART_SECONDS)
    except UsageError as error:
        log.error("lending_refused", reason=str(error))


def _run_connection(plan: LendingPlan, shapes: Mapping[str, tuple[int, ...]], path: Path, stop: Event) -> None:
    """Connect to the server, and run the executor or the observation until the connection or the run ends."""
    settings = plan.settings
    if settings is not None:
        connect_as(settings, EXECUTOR)
    connection = _connect(path, stop)
    if connection is None:
        return
    with closing(connection):
        client = EngineClient(connection.channel, connection.connection.fileno())
        if settings is None:
            observe(client, stop, None if plan.record is None else Recording(plan.record))
            return
        from rose.workers.executor.loop import run_executor  # not in the watchdog, nor in an observer

        job = run_id(settings.namespace, plan.weights.run)
        lease = Lease(job, grant_required=plan.lender.needs_grant)
        run_executor(
            settings, plan.executor, client, shapes, stop, WorkerClass.SERVING, weights=plan.weights, lease=lease
        )


def _connect(path: Path, stop: Event) -> Connection | None:
    """Wait until the server listens, and return a connection to it; None if `stop` is set before."""
    while not stop.is_set():
        try:
            return connect(path)
        except OSError:
            HEALTH.report("waits for its server", ready=False)
            stop.wait(CONNECT_RETRY_SECONDS)
    return None
