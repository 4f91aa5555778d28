"""Programs of the roles: configuration, logs, metrics, traces, signals and announcements around each loop.

A process writes a record when it starts, and each time that its loop restarts, so starts can be counted.

Keeps true
- The records of starts are written on a thread of their own: the role does not wait for it, and an error is only
  logged. The thread has a connection only while it writes a record.
- Processes of the same name are distinguished by their places: the host, and the lowest number on the host that no
  running process of the name has. The kernel frees the number when its process ends, however it ends.
"""

import gc
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Event, Thread

import numpy  # noqa: F401  tokens are unpacked with numpy; an import later would block the role's loop
import structlog

from rose.pipeline.clock import log_clock_set_back
from rose.pipeline.config.load import Config, load
from rose.pipeline.config.options import Common
from rose.pipeline.process_setup import TRAINER_LOCK_FILE as TRAINER_LOCK
from rose.pipeline.process_setup import ensure_folder, run_folder_lock, serve_metrics, stop_on_signals
from rose.schemas.errors import RoseError, UsageError
from rose.schemas.heartbeats import RoleBegun
from rose.schemas.limits import MAX_TEXT_CHARACTERS
from rose.schemas.setting_bounds import is_http_server
from rose.topics.acl import CONTROL, ENVIRONMENT, EVALUATOR, EXECUTOR, ROUTER, TRAINER, Role, connect_as
from rose.topics.catalog import ROLE_STARTS
from rose.topics.health import HEALTH, Health
from rose.topics.processes import start_thread
from rose.topics.settings import BusSettings
from rose.topics.tracing import export_traces
from rose.topics.writer import Writer
from rose.workers.weights.trust import require_signing_key, run_id


def run_environment(common: Common, number: int) -> None:
    """Run environment worker `number` until a signal asks it to stop."""
    from rose.workers.environments.main import run_environment_worker

    config, name = load(common), f"environment-{number}"
    config.import_paths()  # raises UsageError for folders that do not exist
    port = config.settings.metrics.environment
    with _running_role(config, ENVIRONMENT, port, number, name=name) as (settings, stop):
        run_environment_worker(settings, config.settings.environment, name, stop)


def run_executor_role(common: Common) -> None:
    """Run an executor until a signal asks it to stop."""
    from rose.workers.executor.engine_process import EngineProcess

    config = load(common)
    _require_signatures(config)
    executor_config, port = config.settings.executor, config.settings.metrics.executor
    name = executor_config.worker
    with (
        EngineProcess(executor_config) as engine,
        _running_role(config, EXECUTOR, port, number_of(name), name=name) as (settings, stop),
    ):
        from rose.workers.executor.loop import run_executor  # after the fork: the engine loads meanwhile

        run_executor(settings, executor_config, engine.client, engine.shapes, stop, weights=config.weights)


def run_lender_role(
    common: Common, serving: Path, flags: Sequence[str], *, observe: bool, record: Path | None = None
) -> None:
    """Run a vLLM server that lends, or only observes; `serving` is its model folder, `flags` are vLLM's.

    The server replaces this process. `record`: file for a recording of the observed server. Raises UsageError.
    """
    from rose.workers.lender.recording import prepare_recording
    from rose.workers.lender.sidecar import LendingPlan, lend

    config = load(common)
    if not observe:
        _require_signatures(config)
    if record is not None:
        prepare_recording(record)
    settings, name = config.settings, config.settings.executor.worker
    os.environ.update(settings.serving.environment)
    plan = LendingPlan(
        settings=None if observe else config.bus(),
        executor=settings.executor,
        lender=settings.lender,
        weights=config.weights,
        stop_file=(settings.lender.stop_file or config.run_folder / f"{name}.stop").absolute(),
        exporting=lambda: _exporting_lender(config, name, observe=observe),
        record=None if record is None else record.absolute(),
    )
    lend(plan, serving, flags)


def run_endpoint_role(common: Common) -> None:
    """Run an executor whose engine is the endpoint `endpoint.url`, until a signal asks it to stop."""
    from rose.workers.lender.endpoint.main import lend_endpoint

    config = load(common)
    _require_signatures(config)
    executor, port = config.settings.executor, config.settings.metrics.executor
    name = executor.worker
    with _running_role(config, EXECUTOR, port, number_of(name), name=name) as (settings, stop):
        lend_endpoint(settings, executor, config.settings.endpoint, config.weights, stop)


def run_loadgen_role(common: Common, url: str) -> None:
    """Run the load generator against the server at `url`, until a signal asks it to stop. Needs no broker.

    Raises UsageError if `url` is not the address of an HTTP server.
    """
    from rose.workers.loadgen.main import run_loadgen

    if not is_http_server(url):
        raise UsageError(f"{url} is no address of a server: write it as http://HOST:PORT")
    config = load(common)
    ensure_folder(config.run_folder)
    run_loadgen(config.settings.users, url, stop_on_signals())


def run_router_role(common: Common, number: int) -> None:
    """Run router `number` until a signal asks it to stop."""
    from rose.pipeline.routing.service import run_router

    config, name = load(common), f"router-{number}"
    with _running_role(config, ROUTER, config.settings.metrics.router, number, name=name) as (settings, stop):
        run_router(settings, config.settings.router, stop, name)


def run_control_role(common: Common, number: int) -> None:
    """Run control app `number` until a signal asks it to stop."""
    from rose.pipeline.control.service import run_control

    config, name = load(common), f"control-{number}"
    job = run_id(config.settings.broker.namespace, config.weights.run)
    with _running_role(config, CONTROL, config.settings.metrics.control, number, name=name) as (settings, stop):
        run_control(settings, config.settings.control, job, stop, name)


def run_trainer_role(common: Common) -> None:
    """Run the trainer until all groups are settled or a signal asks it to stop.

    A process that torchrun has started as another rank than 0 only follows rank 0, which has the run's lock, the
    metrics and the signals.
    """
    from rose.workers.trainer.main import rank_from_environment, run_trainer

    config = load(common)
    if rank_from_environment():
        settings = config.bus()
        connect_as(settings, TRAINER)
        run_trainer(settings, config.settings.trainer, Event(), weights=config.weights)
        return
    require_signing_key(config.bus(), config.weights.signing_key, "signing_key")  # before it fences another trainer
    with (
        run_folder_lock(config.run_folder, TRAINER_LOCK),
        _running_role(config, TRAINER, config.settings.metrics.trainer, name="trainer") as (settings, stop),
    ):
        run_trainer(
            settings, config.settings.trainer, stop, weights=config.weights, evaluation=config.settings.evaluation
        )


def run_evaluator_role(common: Common) -> None:
    """Run the evaluator until a signal asks it to stop. Raises BadPrompts or UsageError for what it cannot evaluate."""
    from rose.pipeline.local.evaluation_set import evaluation_set
    from rose.workers.evaluator.loop import run_evaluator

    config = load(common)
    require_signing_key(config.bus(), config.weights.trusted_key, "trusted_key")
    tasks, port = evaluation_set(config), config.settings.metrics.evaluator
    with _running_role(config, EVALUATOR, port, name="evaluator") as (settings, stop):
        run_evaluator(settings, config.settings.evaluation, config.weights, tasks, stop)


def number_of(worker: str) -> int:
    """Return N of executor-N, which gives the executors of one machine different ports; 0 for any other name."""
    number = worker.removeprefix("executor-")
    return int(number) if number != worker and number.isdecimal() and number.isascii() else 0


@contextmanager
def _running_role(
    config: Config, role: Role, metrics_port: int, number: int = 0, *, name: str
) -> Iterator[tuple[BusSettings, Event]]:
    """Set up what every role has around its loop.

    Raises BrokerUnreachable, RightsMissing, or UsageError from `_exporting`.
    """
    settings = config.bus()
    stop = stop_on_signals()
    connect_as(settings, role)
    with _exporting(config, metrics_port, number, name=name), announce_starts(settings, name):
        freeze_imports()
        yield settings, stop


def freeze_imports() -> None:
    """Exclude all present objects from garbage collection.

    The objects of imports live as long as the process. A full collection over them pauses a router for about 25 ms and
    an executor for about 100 ms.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def _exporting(config: Config, metrics_port: int, number: int, *, name: str) -> Iterator[None]:
    """Export metrics and traces during the block. Raises UsageError if an address cannot be used."""
    tracing, metrics = config.settings.tracing, config.settings.metrics
    serve_metrics(metrics.host, metrics.port_of(metrics_port, number))
    with export_traces(tracing.endpoint, tracing.ratio, role=name):
        yield


@contextmanager
def _exporting_lender(config: Config, name: str, *, observe: bool) -> Iterator[None]:
    """Export metrics and traces of a lender's sidecar, and announce its start unless it only observes."""
    announcement = nullcontext() if observe else announce_starts(config.bus(), name)
    with _exporting(config, config.settings.metrics.executor, number_of(name), name=name), announcement:
        yield


def _require_signatures(config: Config) -> None:
    """Require the trusted key before the engine starts: an executor without the key is of no use. Raises UsageError."""
    require_signing_key(config.bus(), config.weights.trusted_key, "trusted_key")


ANNOUNCEMENT_PAUSE_SECONDS = 2.0
"""Least time between two records. Restarts in between are written as one record."""

ANNOUNCEMENT_STOP_SECONDS = 2.0
"""How long the end of a process waits for a record that is being written."""


MAX_NAMESAKES = 64
"""Most processes of one name on one host that get different places."""


@contextmanager
def announce_starts(settings: BusSettings, role: str, health: Health = HEALTH) -> Iterator[None]:
    """Write a record of this process's start, and of each restart of its loop until the end of the context.

    Steps back of the wall clock are logged meanwhile. `role`: name of the process. `health`: reports the restarts.
    """
    stop = Event()
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as instance_socket:
        place = f"{socket.gethostname()}/{_take_instance_number(instance_socket, settings.name(role))}"
        thread = Thread(target=_write_starts, args=(settings, role, place, health, stop), name="telling", daemon=True)
        thread.start()
        start_thread(log_clock_set_back, stop, name="clock")
        try:
            yield
        finally:
            stop.set()
            health.wake_waiters()
            thread.join(ANNOUNCEMENT_STOP_SECONDS)


def _take_instance_number(instance_socket: socket.socket, name: str) -> int:
    """Take the lowest number that no process of this name has on this host, until the socket is closed."""
    for number in range(MAX_NAMESAKES):
        with suppress(OSError):
            instance_socket.bind(f"\0{name}/{number}")  # a name in the abstract namespace, without a file
            return number
    return MAX_NAMESAKES


def _write_starts(settings: BusSettings, role: str, place: str, health: Health, stop: Event) -> None:
    announced = 0
    record: RoleBegun | None = RoleBegun(role=role, place=place)
    while record is not None:
        try:
            with closing(Writer(settings, f"{role}-tells")) as writer:
                writer.write(ROLE_STARTS, record, key=role)
                writer.flush()
        except RoseError as error:
            structlog.get_logger("bus").warning("start_not_announced", reason=str(error))
        record = None
        stop.wait(ANNOUNCEMENT_PAUSE_SECONDS)
        if not stop.is_set():
            times, reason = health.await_restart(announced)
            if times > announced:
                record = RoleBegun(role=role, times=times - announced, reason=reason[:MAX_TEXT_CHARACTERS], place=place)
                announced = times
