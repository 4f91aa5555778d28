"""The control app as a program: runs one Faust app after another until it is asked to stop."""

import asyncio
import errno
import time
from collections.abc import Callable
from contextlib import closing, suppress
from threading import Event
from typing import TYPE_CHECKING

import structlog
from confluent_kafka import KafkaError

from rose.pipeline.clock import steady_clock
from rose.pipeline.control.config import ControlConfig
from rose.pipeline.control.elasticity import ElasticityCore
from rose.pipeline.control.metrics import export_metrics
from rose.pipeline.journal import JournalRecorder, JournalWriter, numeric_settings
from rose.schemas.errors import UsageError
from rose.schemas.journal import CoreJournal
from rose.topics.acl import CONTROL, check_group_rights
from rose.topics.catalog import CONTROL_GROUP
from rose.topics.errors import BusError, is_permanent
from rose.topics.health import HEALTH
from rose.topics.settings import BusSettings

if TYPE_CHECKING:  # imports Faust, which may not be installed
    from rose.pipeline.control.app import ControlApp, GrantLog

POLL_SECONDS = 0.1
"""Time between two checks whether to stop."""

START_SECONDS = 60.0
"""How long Faust may take to start."""

STOP_SECONDS = 10.0
"""How long Faust may take to stop."""

RESTART_SECONDS = 1.0
"""Pause before a new app is started after a failure."""


def run_control(settings: BusSettings, config: ControlConfig, job: str, stop: Event, name: str = "control-0") -> None:
    """Grant capacity to an RL job until `stop` is set. Of several control apps one decides.

    `job`: `namespace:run`. The leases of its grants end by themselves after the end of the control app. Raises
    RoseError for permanent errors.
    """
    try:
        from rose.pipeline.control.app import GrantLog
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed: pip install 'rose-rollouts[control]'") from None

    control, clock = ElasticityCore(config, job), steady_clock()
    first = CoreJournal(core=name, began_at=0, sequence=0, settings=numeric_settings(config), job=job)
    sink = JournalWriter(settings, f"{name}-journal")
    journal = JournalRecorder(clock, sink, first)
    grants = GrantLog(settings, name)
    try:
        with export_metrics(control, clock), closing(sink):
            asyncio.run(_run(settings, control, grants, clock, journal, stop, name))
    finally:
        grants.stop()


async def _run(
    settings: BusSettings,
    core: ElasticityCore,
    grants: "GrantLog",
    clock: Callable[[], float],
    journal: JournalRecorder,
    stop: Event,
    name: str,
) -> None:
    from rose.pipeline.control.app import ControlApp

    log = structlog.get_logger("control").bind(control=name)
    while not stop.is_set():
        check_group_rights(settings, CONTROL, CONTROL_GROUP)
        with closing(ControlApp(settings, core, grants, clock, journal, name)) as app:
            failure = await _run_app(app, stop)
            with suppress(TimeoutError):  # Faust may wait forever for a broker that does not answer
                await asyncio.wait_for(app.faust.stop(), STOP_SECONDS)
        if isinstance(failure, OSError) and failure.errno == errno.EADDRINUSE:
            address = f"{core.config.page_host}:{core.config.page_port}"
            raise UsageError(f"the page cannot be served on {address}: choose another control.page_port, or 0")
        if failure is not None and (is_permanent(failure) or isinstance(failure, UsageError)):
            raise failure
        if not stop.is_set():
            if app.failure is not None or journal.awaits_decisions:
                journal.end("the control app restarts, and the places of its newest grants are not known")
            log.warning("restarting", reason=str(failure))
            HEALTH.report_restart(str(failure))
            await asyncio.sleep(RESTART_SECONDS)


async def _run_app(app: "ControlApp", stop: Event) -> Exception | None:
    """Run one app until `stop` is set or the app fails; return the failure."""
    started_at, starting = time.monotonic(), asyncio.create_task(app.faust.start())
    while not stop.is_set() and app.error is None:
        if not starting.done():
            HEALTH.report("joins the group that reads the summaries", ready=False)
            if time.monotonic() - started_at > START_SECONDS:
                return BusError("joining the group of control apps", KafkaError(KafkaError._TIMED_OUT))
        elif (failed := starting.exception()) is not None:
            return failed if isinstance(failed, Exception) else None
        await asyncio.sleep(POLL_SECONDS)
    starting.cancel()
    return app.error
