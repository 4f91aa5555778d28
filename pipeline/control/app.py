"""The control app: a Faust app that passes cell summaries to the elasticity core every second and serves a page.

Keeps true
- The app is off the hot path: it reads one small record per cell and second, and no turn waits for it.
- Every call of the core is in the journal, with its time (`pipeline/journal.py`).
- The app stores no state: all state returns within seconds from summaries and grants. So it has no table and no topic
  of its own, and it creates no topics. It writes grants with the bus's own writer, which checks every record.
- Of several control apps one decides: the app to which the consumer group assigns the summaries. An app without
  summaries renews no grants.
- Old summaries are skipped: after a start or a pause only the newest summaries of each cell are used.
- Faust's Kafka client (aiokafka) signs in with librdkafka's settings, translated. A security setting without an
  equivalent in Faust is refused by name, so encryption or a check that was asked for is never left out. Settings that
  do not concern security apply to librdkafka's clients only.

The core decides; the app decides nothing. `GrantLog` outlives the apps of a process and feeds them the grants.
"""

import queue
import ssl
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

import faust
import structlog
from faust.app.base import BootStrategy
from faust.auth import Credentials, SASLCredentials, SSLCredentials
from faust.types import EventT, StreamT
from faust.types.auth import SASLMechanism
from faust.web import Request, Response, View
from faust.web.base import BlueprintManager

from rose.pipeline.control.elasticity import ElasticityCore
from rose.pipeline.control.page import State, page_of, state_of
from rose.pipeline.journal import JournalRecorder
from rose.schemas.cells import CellSummary
from rose.schemas.errors import RecordError, RoseError, UsageError
from rose.schemas.grants import CapacityGrant, GrantSource, grant_key, parse_grant_key
from rose.schemas.journal import EntryKind
from rose.schemas.wire import decode
from rose.topics import counts
from rose.topics.catalog import CONTROL_GROUP, GRANTS, SUMMARIES
from rose.topics.health import HEALTH
from rose.topics.records import Envelope, InvalidMessage, RawMessage
from rose.topics.settings import BusSettings
from rose.topics.table_follower import TableFollower
from rose.topics.writer import Writer

TICK_SECONDS = 1.0
"""Time between two decisions."""

SESSION_SECONDS = 10.0
"""Session timeout of the consumer group: another control app then takes the place of a silent one."""

MAX_BACKLOG_SUMMARIES = 2
"""A summary is used only if fewer newer summaries than this, for each cell, are on the log."""

SHOWN_DECISIONS = 50
"""Decisions on the page."""


class GrantUpdate(NamedTuple):
    """The newest grant of a worker from one source; None if it was deleted."""

    worker: str
    grant: CapacityGrant | None
    source: GrantSource
    offset: int


class GrantLog:
    """Follows the grants topic on a thread from construction to `stop`; `take_updates` returns the changes.

    The topic is read from its beginning, without a consumer group.
    """

    def __init__(self, settings: BusSettings, name: str) -> None:
        self._updates: queue.SimpleQueue[GrantUpdate] = queue.SimpleQueue()
        self._follower = TableFollower(settings, GRANTS, f"{name}-grants", self._on_record)

    @property
    def is_loaded(self) -> bool:
        """Whether all grants from before the start have been read."""
        return self._follower.is_caught_up.is_set()

    @property
    def failure(self) -> RoseError | None:
        """The permanent error that keeps the thread from reading; None if there is none."""
        return self._follower.failure

    def take_updates(self) -> list[GrantUpdate]:
        """The updates since the last call, in order."""
        return [self._updates.get() for _ in range(self._updates.qsize())]

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._follower.stop()

    def _on_record(self, item: Envelope, _caught_up: bool) -> None:
        grant = item.record if isinstance(item.record, CapacityGrant) else None
        worker, source = parse_grant_key(item.key)
        if source is not None:
            self._updates.put(GrantUpdate(worker, grant, source, item.offset))


class _Boot(BootStrategy):
    enable_kafka_producer = False  # records are written with the bus's own writer


class _Faust(faust.App):
    BootStrategy = _Boot


class ControlApp:
    """One start of the Faust app. The core outlives it."""

    def __init__(
        self,
        settings: BusSettings,
        core: ElasticityCore,
        grants: GrantLog,
        clock: Callable[[], float],
        journal: JournalRecorder,
        name: str,
    ) -> None:
        """Raises TopicMissing, or UsageError for security settings that Faust's client does not have."""
        self.failure: Exception | None = None
        self._core = core
        self._grants = grants
        self._clock = clock
        self._journal = journal
        self._log = structlog.get_logger("control").bind(control=name)
        self._writer = Writer(settings, name)
        self._writer.partition_count(SUMMARIES)  # Faust would wait for a missing topic without a message
        self._folder = TemporaryDirectory(prefix="rose-control-")  # Faust needs a folder and stores nothing in it
        self._decisions: deque[CapacityGrant] = deque(maxlen=SHOWN_DECISIONS)
        self._lending: dict[str, bool] = {}
        """Whether the last leased grant tells the worker to lend, by worker."""
        self.faust = self._build_app(settings, name)

    def close(self) -> None:
        """Close the writer and remove the temporary folder."""
        self._writer.close()
        self._folder.cleanup()

    @property
    def error(self) -> Exception | None:
        """The error that stops the app; None while there is none."""
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
        app.web.blueprints = BlueprintManager()  # without Faust's own pages, which should not be public
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
            except Exception as error:  # noqa: BLE001  the service logs the failure and starts another app
                self.failure = error

    def _on_message(self, event: EventT[bytes]) -> None:
        message = event.message
        raw_headers = cast(
            Iterable[tuple[str, bytes | None]], message.headers or ()
        )  # Faust's Kafka client returns headers in no other form
        headers = tuple((name, value or b"") for name, value in raw_headers)
        try:
            summary = decode(CellSummary, message.value or b"", headers)
        except RecordError as error:
            raw = RawMessage(message.key, message.value, headers)
            invalid = InvalidMessage(SUMMARIES, message.partition, message.offset, raw, str(error))
            self._log.warning(
                "dead_lettered",
                topic=SUMMARIES.name,
                partition=message.partition,
                offset=message.offset,
                reason=str(error),
            )
            self._writer.dead_letter(invalid, str(error))
            return
        counts.read(SUMMARIES).inc()
        backlog = self.faust.consumer.highwater(message.tp) - 1 - message.offset
        if backlog < MAX_BACKLOG_SUMMARIES * summary.cells:
            now = self._journal.take(EntryKind.SUMMARY, message.partition, message.offset)
            self._core.on_summary(summary, now)

    async def _on_timer(self, *_: Any) -> None:
        try:
            self._decide()
        except Exception as error:  # noqa: BLE001  the service logs the failure and starts another app
            self.failure = error

    def _decide(self) -> None:
        for update in self._grants.take_updates():
            now = self._journal.take(EntryKind.GRANT, 0, update.offset)
            self._core.on_grant(update.worker, update.grant, now, source=update.source)
        now = self._clock()
        if self._grants.is_loaded:
            now = self._journal.take(EntryKind.TICK)
            for grant in self._core.tick(now):
                self._write(grant)
            for worker, source in self._core.expired_grants(now):
                stored = self._journal.decide(EntryKind.GRANT)
                self._writer.tombstone(GRANTS, key=grant_key(worker, source), partition=0, on_delivery=stored)
                self._lending.pop(worker, None)
        self._writer.poll()
        self._journal.write_due()
        cells_heard = len(self._core.live_summaries(now))
        if cells_heard:
            HEALTH.report(f"decides for {cells_heard} cells: {len(self._core.lending_workers(now))} lend")
        elif self.faust.consumer.assignment():
            HEALTH.report("grants nothing: no router sends summaries of its cell", ready=False)
        else:
            HEALTH.report("waits for its turn: another control app decides")

    def _write(self, grant: CapacityGrant) -> None:
        stored = self._journal.decide(EntryKind.GRANT)
        if grant.cell is not None:
            self._writer.write(GRANTS, grant, key=grant_key(grant.worker, GrantSource.CELL), on_delivery=stored)
            self._decisions.appendleft(grant)
            self._log.info("move_granted", worker=grant.worker, cell=grant.cell, reason=grant.reason)
            return
        self._writer.write(GRANTS, grant, key=grant_key(grant.worker, GrantSource.LEASED), on_delivery=stored)
        if self._lending.get(grant.worker) != grant.lend:
            self._lending[grant.worker] = grant.lend
            self._decisions.appendleft(grant)
            self._log.info("lend_granted" if grant.lend else "park_granted", worker=grant.worker, reason=grant.reason)


PROTOCOLS = ("plaintext", "ssl", "sasl_plaintext", "sasl_ssl")
MECHANISMS = (SASLMechanism.PLAIN, SASLMechanism.SCRAM_SHA_256, SASLMechanism.SCRAM_SHA_512)
ABOUT_SECURITY = ("security.", "sasl.", "ssl.", "enable.ssl.", "enable.sasl.", "https.")
KNOWN = (
    "security.protocol",
    "sasl.mechanism",
    "sasl.mechanisms",
    "sasl.username",
    "sasl.password",
    "ssl.ca.location",
    "ssl.ca.pem",
    "ssl.certificate.location",
    "ssl.key.location",
    "ssl.key.password",
    "ssl.endpoint.identification.algorithm",
    "enable.ssl.certificate.verification",
)


def credentials(properties: Mapping[str, str]) -> Credentials | None:
    """Faust's credentials for these librdkafka settings; None for plaintext without authentication.

    Raises UsageError for a setting or value that Faust's client does not support.
    """
    unknown = [name for name in properties if name.startswith(ABOUT_SECURITY) and name not in KNOWN]
    if unknown:
        raise UsageError(
            f"the control app has no {unknown[0]}: its Kafka client is Faust's, which supports only these of "
            f"librdkafka's security settings: {', '.join(KNOWN)}"
        )
    protocol = properties.get("security.protocol", "plaintext").lower()
    if protocol not in PROTOCOLS:
        raise UsageError(f"security.protocol is one of {', '.join(PROTOCOLS)}, not {protocol!r}")
    context = _context(properties) if protocol.endswith("ssl") else None
    if not protocol.startswith("sasl_"):
        return None if context is None else SSLCredentials(context)
    mechanism = properties.get("sasl.mechanisms", properties.get("sasl.mechanism", "GSSAPI"))
    if mechanism not in [each.value for each in MECHANISMS]:
        known = ", ".join(each.value for each in MECHANISMS)
        raise UsageError(f"sasl.mechanisms is {mechanism!r}: the control app supports {known}")
    name, password = properties.get("sasl.username"), properties.get("sasl.password")
    return SASLCredentials(username=name, password=password, ssl_context=context, mechanism=mechanism)


def _context(properties: Mapping[str, str]) -> ssl.SSLContext:
    authorities = properties.get("ssl.ca.location", "")
    folder = authorities if Path(authorities).is_dir() and authorities else None
    file = authorities if authorities and authorities != "probe" and folder is None else None
    certificate, key = properties.get("ssl.certificate.location"), properties.get("ssl.key.location")
    try:
        context = ssl.create_default_context(cafile=file, capath=folder, cadata=properties.get("ssl.ca.pem"))
        if certificate:
            context.load_cert_chain(certificate, key, properties.get("ssl.key.password", ""))
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        files = ", ".join(f"{name}={value}" for name, value in properties.items() if name.endswith(".location"))
        raise UsageError(f"ssl.ca or ssl.certificate cannot be used ({files}): {error}") from None
    if properties.get("enable.ssl.certificate.verification", "true").lower() == "false":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif properties.get("ssl.endpoint.identification.algorithm", "https").lower() == "none":
        context.check_hostname = False
    return context
