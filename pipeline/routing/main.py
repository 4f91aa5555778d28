"""The router as a program."""

from threading import Event

from pipeline.routing.config import RouterConfig
from pipeline.routing.loop import RouterLoop
from pipeline.routing.metrics import exported
from topics.settings import BusSettings


def run_router(settings: BusSettings, config: RouterConfig, stop: Event, name: str = "router-0") -> None:
    """Route turns until `stop` is set, then flush and commit. Several routers, by name, share the cells.

    Raises RoseError: an unreachable broker, a missing topic.
    """
    loop = RouterLoop(settings, config, name=name)
    with exported(loop):
        loop.run(stop)
