"""The router's loop: wait for the seat, reign, and again.

Keeps true
- A router that has lost the seat, or was away too long to be sure of it, writes nothing more of what it had decided and
  forgets what it knew.
- Trouble with the broker that time may mend does not end it: it begins anew as soon as it can.
"""

import time
from contextlib import closing
from threading import Event

import structlog
from confluent_kafka import KafkaError

from pipeline.routing.config import RouterConfig
from pipeline.routing.reign import Reign
from pipeline.routing.seat import Seat, SeatLost
from topics.errors import BusError, TopicMissing
from topics.health import HEALTH
from topics.settings import BusSettings

WAIT_SECONDS = 0.2
"""How long one look for the seat lasts; also how soon a waiting router notices that it is to stop."""

RETRY_SECONDS = 1.0
"""Pause after trouble with the broker."""

MISSING_SECONDS = 30.0
"""How long a topic may be out of sight that was there."""


class RouterLoop:
    """One router, which reigns or waits."""

    def __init__(self, settings: BusSettings, config: RouterConfig, *, name: str = "router-0") -> None:
        """`name`: no two routers of a run have the same. Raises TopicMissing or BusError."""
        self._settings = settings
        self._config = config
        self._name = name
        self._log = structlog.get_logger("router").bind(router=name)
        self._seat = Seat(settings, name)
        self.reign: Reign | None = None
        """The present one; None while this router waits."""
        self._well_at: float | None = None
        """When it last turned over."""

    def run(self, stop: Event) -> None:
        """Until `stop` is set. Raises TopicMissing, or BusError for what time does not mend."""
        try:
            while not stop.is_set():
                try:
                    if self._seat.wait(WAIT_SECONDS):
                        self._serve(stop)
                    else:
                        HEALTH.says("waits for the seat, to serve when no other router does")
                except SeatLost as loss:
                    self._log.warning("seat lost", reason=str(loss))
                except (BusError, TopicMissing) as error:
                    self._bear(error)
                    self._log.warning("beginning anew after trouble with the broker", error=str(error))
                    HEALTH.says(f"begins anew after trouble with the broker: {error}", ready=False)
                    stop.wait(RETRY_SECONDS)
                    self._seat.leave()
        finally:
            self._seat.close()

    def _bear(self, error: BusError | TopicMissing) -> None:
        """Raise what time does not mend. A topic that was there may be out of sight while its leaders move."""
        if isinstance(error, TopicMissing):
            if self._well_at is None or time.monotonic() - self._well_at > MISSING_SECONDS:
                raise error
        elif error.lasting or error.code == KafkaError.FENCED_INSTANCE_ID:  # another router has this one's name
            raise error

    def _serve(self, stop: Event) -> None:
        began = time.monotonic()
        HEALTH.says("takes the seat, and reads back the turns that are under way", ready=False)
        with closing(Reign(self._settings, self._config, self._seat, self._name)) as reign:
            reign.begin()
            self.reign = reign
            self._log.info("serving", seconds=round(time.monotonic() - began, 3))
            try:
                while not stop.is_set():
                    reign.turn_over()
                    self._well_at = time.monotonic()
                    HEALTH.says("serves")
                reign.finish()
            finally:
                self.reign = None
