"""The control app as a program."""

import asyncio
from collections.abc import Callable
from contextlib import closing
from threading import Event

import structlog

from pipeline.clock import steady_clock
from pipeline.control.config import ControlConfig
from pipeline.control.core import Control
from pipeline.control.grants import GrantLog
from pipeline.control.metrics import exported
from schemas.errors import UsageError
from topics.health import HEALTH
from topics.settings import BusSettings

LOOK_SECONDS = 0.1
"""Between two looks at whether to stop."""

AGAIN_SECONDS = 1.0
"""Before it begins anew after a failure."""


def run_control(settings: BusSettings, config: ControlConfig, job: str, stop: Event, name: str = "control-0") -> None:
    """Grant capacity to this RL job (`namespace:run`) until `stop` is set. Of several of these one decides.

    What it granted runs out by itself then. Raises UsageError for what only a person can mend.
    """
    control, clock = Control(config, job), steady_clock()
    grants = GrantLog(settings, name)
    try:
        with exported(control, clock):
            asyncio.run(_run(settings, control, grants, clock, stop, name))
    finally:
        grants.stop()


async def _run(
    settings: BusSettings, control: Control, grants: GrantLog, clock: Callable[[], float], stop: Event, name: str
) -> None:
    try:
        from pipeline.control.app import ControlApp
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed: pip install 'rose-rollouts[control]'") from None

    log = structlog.get_logger("control").bind(control=name)
    while not stop.is_set():
        with closing(ControlApp(settings, control, grants, clock, name)) as app:
            try:
                await app.faust.start()
            except OSError as error:
                place = f"{control.config.page_host}:{control.config.page_port}"
                raise UsageError(
                    f"the page cannot be served on {place} ({error.strerror}): choose another control.page_port, or 0"
                ) from None
            while not (stop.is_set() or app.failure or app.faust.crashed):
                await asyncio.sleep(LOOK_SECONDS)
            reason = app.failure or app.faust.crash_reason
            await app.faust.stop()
        if not stop.is_set():
            log.warning("begins anew", reason=str(reason))
            HEALTH.says(f"begins anew: {reason}", ready=False)
            await asyncio.sleep(AGAIN_SECONDS)
