"""The control app around its core: a Faust app that reads summaries, looks at the time every second, and shows a page.

Keeps true
- It is off the hot path: it reads one small record per cell and second, and no turn waits for it.
- It keeps nothing: all that it knows comes again in seconds. So it has no table, no topic of its own, and it creates
  none; what it grants goes through the bus's own writer, checked as every record is.
- Of several one decides: the one that the consumer group gives the summaries to. One that hears none renews nothing.
- Old news is none: after a start or a pause the summaries before the newest ones are passed over.

It decides nothing: the core does.
"""

from collections import deque
from collections.abc import Callable, Iterable
from tempfile import TemporaryDirectory
from typing import Any, cast

import faust
import structlog
from faust.app.base import BootStrategy
from faust.types import EventT, StreamT
from faust.web import Request, Response, View
from faust.web.base import BlueprintManager

from rose.pipeline.control.aiokafka_auth import credentials
from rose.pipeline.control.elasticity import ElasticityCore
from rose.pipeline.control.grants import GrantLog
from rose.pipeline.control.page import State, page_of, state_of
from rose.schemas.cells import CellSummary
from rose.schemas.errors import RecordError
from rose.schemas.grants import CapacityGrant, GrantSource, grant_key
from rose.schemas.wire import decode
from rose.topics import counts
from rose.topics.catalog import CONTROL_GROUP, GRANTS, SUMMARIES
from rose.topics.health import HEALTH
from rose.topics.records import InvalidMessage, RawMessage
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer

TICK_SECONDS = 1.0
"""Between two decisions."""

SESSION_SECONDS = 10.0
"""After so long without a word of it another instance takes its place."""

MAX_BACKLOG_SUMMARIES = 2
"""Summaries of each cell that may lie behind one that is not passed over."""

SHOWN_DECISIONS = 50
"""Decisions on the page."""


class _Boot(BootStrategy):
    enable_kafka_producer = False  # what is written goes through the bus's own


class _Faust(faust.App):
    BootStrategy = _Boot


class ControlApp:
    """One life of the app; the core outlives it."""

    def __init__(
        self, settings: BusSettings, core: ElasticityCore, grants: GrantLog, clock: Callable[[], float], name: str
    ) -> None:
        """Raises TopicMissing, or UsageError for settings of security that Faust's client has no word for."""
        self.failure: Exception | None = None
        self._core = core
        self._grants = grants
        self._clock = clock
        self._log = structlog.get_logger("control").bind(control=name)
        self._writer = Writer(settings, name)
        self._writer.partition_count(SUMMARIES)  # Faust waits for a topic that is not there, and tells nobody
        self._folder = TemporaryDirectory(prefix="rose-control-")  # Faust wants one, and keeps nothing there
        self._decisions: deque[CapacityGrant] = deque(maxlen=SHOWN_DECISIONS)
        self._lending: dict[str, bool] = {}
        """By worker, what was written last."""
        self.faust = self._build_app(settings, name)

    def close(self) -> None:
        """Leave the broker as it is."""
        self._writer.close()
        self._folder.cleanup()

    @property
    def error(self) -> Exception | None:
        """Why it cannot go on; None while it does."""
        crashed = self.faust.crash_reason if self.faust.crashed else None
        return self.failure or self._grants.failure or (crashed if isinstance(crashed, Exception) else None)

    def _build_app(self, settings: BusSettings, name: str) -> faust.App:
        config = self._core.config
        app = _Faust(
            settings.name(CONTROL_GROUP),
            broker=[f"kafka://{place.strip()}" for place in settings.bootstrap.split(",")],
            broker_client_id=name,
            broker_credentials=credentials(settings.properties),
            broker_session_timeout=SESSION_SECONDS,
            broker_heartbeat_interval=SESSION_SECONDS / 4,
            consumer_auto_offset_reset="latest",
            consumer_group_instance_id=name if settings.embedded else None,
            key_serializer="raw",
            value_serializer="raw",
            store="memory://",
            datadir=self._folder.name,
            autodiscover=False,
            topic_allow_declare=False,
            topic_disable_leader=True,
            web_enabled=bool(config.page_port),
            web_bind=config.page_host,
            web_port=config.page_port or 6066,
        )
        app.web.blueprints = BlueprintManager()  # Faust's own pages are not for everybody
        topic = app.topic(settings.topic(SUMMARIES), value_type=bytes, key_type=bytes)
        app.agent(topic, name="summaries")(self._read)
        app.timer(TICK_SECONDS)(self._on_timer)

        @app.page("/")
        async def page(view: View, _request: Request) -> Response:
            return view.html(page_of(self._state()))

        @app.page("/state.json")
        async def state(view: View, _request: Request) -> Response:
            return view.json(self._state())

        return app

    def _state(self) -> State:
        return state_of(self._core, self._decisions, self._clock())

    async def _read(self, stream: StreamT[bytes]) -> None:
        async for event in stream.events():
            try:
                self._on_message(event)
            except Exception as error:  # noqa: BLE001  whoever runs this tells it, and begins anew
                self.failure = error

    def _on_message(self, event: EventT[bytes]) -> None:
        message = event.message
        raw_headers = cast(
            Iterable[tuple[str, bytes | None]], message.headers or ()
        )  # Kafka's client has no other kind
        headers = tuple((name, value or b"") for name, value in raw_headers)
        try:
            summary = decode(CellSummary, message.value or b"", headers)
        except RecordError as error:
            raw = RawMessage(message.key, message.value, headers)
            invalid = InvalidMessage(SUMMARIES, message.partition, message.offset, raw, str(error))
            self._log.warning("buried", offset=message.offset, reason=str(error))
            self._writer.dead_letter(invalid, str(error))
            return
        counts.read(SUMMARIES).inc()
        backlog = self.faust.consumer.highwater(message.tp) - 1 - message.offset
        if backlog < MAX_BACKLOG_SUMMARIES * summary.cells:
            self._core.on_summary(summary, self._clock())

    async def _on_timer(self, *_: Any) -> None:
        try:
            self._decide()
        except Exception as error:  # noqa: BLE001  whoever runs this tells it, and begins anew
            self.failure = error

    def _decide(self) -> None:
        now = self._clock()
        for update in self._grants.take_updates():
            self._core.on_grant(update.worker, update.grant, now, source=update.source)
        if self._grants.is_loaded:
            for grant in self._core.tick(now):
                self._write(grant)
            for worker, source in self._core.expired_grants(now):
                self._writer.tombstone(GRANTS, key=grant_key(worker, source), partition=0)
                self._lending.pop(worker, None)
        self._writer.poll()
        cells_heard = len(self._core.live_summaries(now))
        if cells_heard:
            HEALTH.report(f"decides for {cells_heard} cells: {len(self._core.lending_workers(now))} lend")
        elif self.faust.consumer.assignment():
            HEALTH.report("grants nothing: no router tells of its cell", ready=False)
        else:
            HEALTH.report("waits for its turn: another control app decides")

    def _write(self, grant: CapacityGrant) -> None:
        if grant.cell is not None:
            self._writer.write(GRANTS, grant, key=grant_key(grant.worker, GrantSource.CELL))
            self._decisions.appendleft(grant)
            self._log.info("move", worker=grant.worker, to=grant.cell, reason=grant.reason)
            return
        self._writer.write(GRANTS, grant, key=grant_key(grant.worker, GrantSource.LEASED))
        if self._lending.get(grant.worker) != grant.lend:
            self._lending[grant.worker] = grant.lend
            self._decisions.appendleft(grant)
            self._log.info("lend" if grant.lend else "park", worker=grant.worker, reason=grant.reason)
