"""The router as a program."""

from threading import Event

from pipeline.routing.config import RouterConfig
from pipeline.routing.loop import RouterLoop
from pipeline.routing.metrics import exported
from topics.settings import BusSettings


def run_router(settings: BusSettings, config: RouterConfig, stop: Event) -> None:
    """Route turns until `stop` is set, then flush and commit. One router at a time.

    Raises RoseError: an unreachable broker, a missing topic.
    """
    loop = RouterLoop(settings, config)
    with exported(loop.router):
        loop.run(stop)
