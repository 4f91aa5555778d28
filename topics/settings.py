"""Broker settings: the address, the namespace, and the librdkafka configuration of each kind of client.

Keeps true
- The user's librdkafka settings are passed on verbatim and override ROSE's own.
- A setting that would lose records, read uncommitted records, stop progress or end in a traceback is refused with a
  sentence before a client is made. A setting that librdkafka refuses is reported in a sentence, too.
"""

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog
from confluent_kafka import KafkaError, KafkaException

from rose.schemas.errors import ThreadRefused, UsageError
from rose.topics.catalog import (
    DEFAULT_RETENTION,
    LARGEST_MESSAGE_BYTES,
    MAX_DEAD_LETTER_BYTES,
    MAX_MESSAGE_BYTES,
    Retention,
    Topic,
)

PREFIX = "rose."
"""Prefix of every topic, consumer group and transactional id, after the namespace, so one prefix serves an ACL."""

CLIENT_PREFIX = "rose-"
"""Prefix of the client ids of ROSE's clients."""

WARNING_SECONDS = 30.0
"""Least time between two warnings about the same kind of broker error."""

STARTUP_SECONDS = 10.0
"""A client younger than this may not know all brokers yet."""

TRANSACTION_MILLISECONDS = 10_000
"""The broker aborts a transaction that is open for longer. Until then the open transaction of a dead producer delays
readers of its partitions."""

REBOOTSTRAP_MILLISECONDS = 60_000
"""Time without an answer to a metadata query after which a client connects to the bootstrap servers again: as long as
the timeout of a request. A broker that shuts down may answer that its cluster has no brokers; librdkafka then forgets
the broker, and connects to none before this time. Its default is 5 minutes. A shorter time would make clients leave a
broker that is only slow."""

FETCH_MILLISECONDS = 100
"""Longest fetch of an idle reader. A new record ends the fetch under way, but a partition that is assigned or resumed
during a fetch waits for the end of the fetch."""

BOUNDED_FETCH_MILLISECONDS = 10
"""Longest fetch of a reader that stops at the end of its partitions. The reader learns of an end by an empty fetch, and
its next query waits for the end of the fetch under way."""

FULL_QUEUE_MILLISECONDS = 10
"""How soon a reader with a full fetch queue fetches again. librdkafka's default is a second, in which the queue may run
empty."""

CLIENT_CERTIFICATES = ("ssl.certificate.location", "ssl.certificate.pem", "ssl.keystore.location")
"""librdkafka settings that name a client's own certificate."""


@dataclass(frozen=True, slots=True)
class BusSettings:
    """Address of a broker, namespace, and librdkafka settings: the input of every client."""

    bootstrap: str
    """`host:port[,host:port]`."""
    namespace: str = ""
    """Prefix of every topic, group and transactional id, so that several runs can share a cluster."""
    properties: Mapping[str, str] = field(default_factory=dict)
    """The user's librdkafka settings, verbatim."""
    embedded: bool = False
    """Whether the broker is the embedded one. It answers an empty fetch at once, so readers pause between fetches. It
    never evicts a member of a group, so members have static names, and a restarted member takes its former place."""
    retention: Retention = DEFAULT_RETENTION
    """How long records are kept."""

    @property
    def authenticated(self) -> bool:
        """Whether clients authenticate, so that the broker can check their rights."""
        protocol = self.properties.get("security.protocol", "").lower()
        certified = any(name in self.properties for name in CLIENT_CERTIFICATES)
        return protocol.startswith("sasl_") or (protocol == "ssl" and certified)

    def topic(self, topic: Topic) -> str:
        """The topic's name on this broker."""
        return f"{self.namespace}{topic.name}"

    def is_worker(self, client_id: str) -> bool:
        """Whether a member of the environment workers' group with this client id is a ROSE worker."""
        return client_id.startswith(self.properties.get("client.id", CLIENT_PREFIX))

    def with_defaults(self, properties: Mapping[str, str]) -> "BusSettings":
        """These settings with default properties, which the user's own properties override."""
        return replace(self, properties={**properties, **self.properties})

    def for_bounded_reads(self) -> "BusSettings":
        """Settings for readers that stop at the end of their partitions."""
        return self if self.embedded else self.with_defaults({"fetch.wait.max.ms": str(BOUNDED_FETCH_MILLISECONDS)})

    def name(self, name: str) -> str:
        """The name of a consumer group or transactional id on this broker."""
        return f"{self.namespace}{PREFIX}{name}"

    def client(self, client_id: str) -> dict[str, object]:
        """Configuration that all clients have in common."""
        return self._with_overrides(
            {
                "bootstrap.servers": self.bootstrap,
                "client.id": client_id,
                "error_cb": partial(_report_error, len(set(self.bootstrap.split(","))), time.monotonic()),
                "log_level": 2,
                "topic.metadata.refresh.interval.ms": 30_000,
                "metadata.recovery.rebootstrap.trigger.ms": REBOOTSTRAP_MILLISECONDS,
                "socket.nagle.disable": True,
            }
        )

    def producer(self, client_id: str) -> dict[str, object]:
        """Configuration of an idempotent producer that sends at once and batches the records that wait."""
        return self._with_overrides(
            {
                **self.client(client_id),
                "enable.idempotence": True,
                "linger.ms": 0,
                "compression.type": "lz4",
                "message.max.bytes": LARGEST_MESSAGE_BYTES,  # a topic of records itself refuses a larger record
                "batch.size": MAX_MESSAGE_BYTES,  # without compression, a topic has to accept the whole batch
                "queue.buffering.max.kbytes": 256 * 1024,
                "message.timeout.ms": 0,  # a slow link is no error; `Writer.flush` decides when to give up
                "allow.auto.create.topics": False,  # a producer's default is True
            }
        )

    def transactional(self, client_id: str, transactional_id: str) -> dict[str, object]:
        """Configuration of a transactional producer.

        Transactions that follow each other directly meet CONCURRENT_TRANSACTIONS, so retries are fast.
        """
        return self._with_overrides(
            {
                **self.producer(client_id),
                "transactional.id": self.name(transactional_id),
                "transaction.timeout.ms": TRANSACTION_MILLISECONDS,
                "retry.backoff.ms": 1,
                "retry.backoff.max.ms": 5,
                "message.timeout.ms": self.properties.get("transaction.timeout.ms", TRANSACTION_MILLISECONDS),
            }
        )

    def consumer(self, client_id: str, group: str) -> dict[str, object]:
        """Configuration of a consumer that reads only committed records and commits no offsets by itself."""
        return self._with_overrides(
            {
                **self.client(client_id),
                "group.id": self.name(group),
                "enable.auto.commit": False,
                "on_commit": _report_commit,
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
                "fetch.wait.max.ms": 0 if self.embedded else FETCH_MILLISECONDS,
                "fetch.queue.backoff.ms": FULL_QUEUE_MILLISECONDS,
                "fetch.message.max.bytes": 4 * 1024 * 1024,
                "receive.message.max.bytes": 512 * 1024 * 1024,
                "partition.assignment.strategy": "range",
            }
        )

    def _with_overrides(self, config: Mapping[str, object]) -> dict[str, object]:
        """Add the user's settings at the end: if a setting has two names, librdkafka uses the last one."""
        own = {name: value for name, value in config.items() if name not in self.properties}
        return {**own, **self.properties}


_warned_at: dict[int, float] = {}
"""Monotonic time of the last warning, by error code."""


_FIRST_DOWN = "1/1 brokers are down"


def _report_error(servers: int, created_at: float, error: KafkaError) -> None:
    """Log a client's error as a warning. librdkafka reconnects and retries by itself.

    One unreachable broker of several is not logged, because the others answer. If it is the first of the `servers`
    (number of bootstrap addresses) that a new client tries, librdkafka reports that all brokers are down. Later
    librdkafka counts the brokers of the cluster, without brokers that are away for long and without second names of a
    broker.
    """
    if error.code() in (KafkaError._TRANSPORT, KafkaError._RESOLVE, KafkaError._TIMED_OUT) and not error.fatal():
        return
    now = time.monotonic()
    if error.str() == _FIRST_DOWN and servers > 1 and now - created_at < STARTUP_SECONDS:
        return
    if now - _warned_at.get(error.code(), -math.inf) >= WARNING_SECONDS:
        _warned_at[error.code()] = now
        structlog.get_logger("bus").warning("broker_error", reason=error.str())


def _report_commit(error: KafkaError | None, _partitions: object) -> None:
    if error is not None:
        structlog.get_logger("bus").warning("offsets_not_committed", reason=error.str())


def parse_properties(pairs: list[str], command_config: Path | None) -> dict[str, str]:
    """Return librdkafka settings from `--command-config FILE`, overridden by `-X key=value`.

    Lines of the file are `key=value`; lines that begin with `#` are comments.

    `pairs`: the arguments of -X. Raises UsageError for a file that cannot be read or a line that is not `key=value`.
    """
    properties: dict[str, str] = {}
    if command_config is not None:
        try:
            text = command_config.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read --command-config {command_config}: {error}") from error
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip() and not line.lstrip().startswith("#"):
                properties.update([_pair(line.strip(), f"{command_config} line {number}")])
    properties.update(_pair(pair, "-X") for pair in pairs)
    return properties


def _pair(text: str, where: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        # The message does not show the text, because it may be a password without its key.
        raise UsageError(f"{where}: that is no key=value (for example security.protocol=SASL_SSL)")
    return key.strip(), value.strip()


Client = TypeVar("Client")

UNDERSCORED = re.compile(r'No such configuration property: "([^".]*_[^".]*)"')
"""A setting in librdkafka's refusal whose name has underscores and no dots, as the name of a variable."""


def new_client(kind: Callable[..., Client], config: Mapping[str, object], **more: Any) -> Client:
    """A client of this class with this configuration.

    Raises UsageError for settings that librdkafka refuses, or ThreadRefused where it can start no thread.
    """
    try:
        return kind(dict(config), **more)
    except KafkaException as error:
        if error.args[0].code() == KafkaError._CRIT_SYS_RESOURCE:
            raise ThreadRefused from None
        reason = error.args[0].str()
        if unknown := UNDERSCORED.search(reason):
            dotted = unknown[1].replace("_", ".")
            reason += f': names with dots go into ROSE_BROKER__PROPERTIES=\'{{"{dotted}": "..."}}\''
        files = "".join(f" ({name}={config[name]})" for name in config if name.endswith(".location") and name in reason)
        raise UsageError(f"the Kafka client refuses its settings: {reason}{files}") from None
    except (TypeError, ValueError) as error:
        raise UsageError(f"the Kafka client refuses its settings: {error}") from None


MAX_IN_FLIGHT = 5
"""Most requests in flight that librdkafka allows for an idempotent producer."""


MAX_TRANSACTION_MILLISECONDS = 60_000
"""Longest transaction timeout: as long as a reader waits for the end of a transaction."""

MIN_TRANSACTION_MILLISECONDS = 1_000
"""Shortest transaction timeout that librdkafka takes."""

MIN_DELIVERY_MILLISECONDS = 1_000
"""Least delivery timeout: a running broker may take this long to store a record."""

MAX_DELIVERY_MILLISECONDS = 2**31 - 1
"""Longest delivery timeout that librdkafka takes."""

MIN_SESSION_MILLISECONDS = 6_000
"""Least session timeout: the least that Apache Kafka allows by default."""

MAX_SESSION_MILLISECONDS = 3_600_000
"""Longest session timeout that librdkafka takes."""

DEFAULT_SESSION_MILLISECONDS = 10_000
"""Session timeout of environment workers: the homes of a silent worker are assigned to others after this. Kafka's
default of 45 s would stall its trajectories."""

ADDRESS = ("bootstrap.servers", "metadata.broker.list")
"""librdkafka's names for the address of a broker."""


@dataclass(frozen=True, slots=True)
class RequiredSetting:
    """The values that a setting may have."""

    names: tuple[str, ...]
    """All of librdkafka's names for the setting."""
    fits: Callable[[str], bool]
    """Whether a value, in lower case, is allowed."""
    requirement: str
    """The requirement with its reason, for the message."""


def _one_of(*values: str) -> Callable[[str], bool]:
    return lambda value: value in values


def _number(minimum: int, maximum: int) -> Callable[[str], bool]:
    return lambda value: value.isdecimal() and len(value) < 20 and minimum <= int(value) <= maximum


_TRUE, _FALSE, _NEVER = _one_of("true", "t", "1"), _one_of("false", "f", "0"), _one_of()

REQUIRED_SETTINGS = (
    RequiredSetting(("enable.idempotence",), _TRUE, "must be true: records would be lost or doubled"),
    RequiredSetting(("acks", "request.required.acks"), _one_of("all", "-1"), "must be all: records would be lost"),
    RequiredSetting(
        ("max.in.flight", "max.in.flight.requests.per.connection"),
        _number(1, MAX_IN_FLIGHT),
        f"must be from 1 to {MAX_IN_FLIGHT}: producers are idempotent",
    ),
    RequiredSetting(
        ("message.max.bytes",),
        _number(MAX_DEAD_LETTER_BYTES, 10**9),
        f"must be from {MAX_DEAD_LETTER_BYTES} to {10**9}: ROSE's records would be refused",
    ),
    RequiredSetting(
        ("enable.auto.commit",), _FALSE, "must be false: offsets are committed with the results of the records"
    ),
    RequiredSetting(
        ("isolation.level",), _one_of("read_committed"), "must be read_committed: work would be counted twice"
    ),
    RequiredSetting(
        ("auto.offset.reset",),
        _one_of("earliest", "smallest", "beginning"),
        "must be earliest: records would be skipped",
    ),
    RequiredSetting(
        ("partition.assignment.strategy",), _one_of("range"), "must be range: a home's topics belong to one worker"
    ),
    RequiredSetting(("group.protocol",), _one_of("classic"), "must be classic"),
    RequiredSetting(("allow.auto.create.topics",), _FALSE, "must be false: only `rose topics create` makes topics"),
    RequiredSetting(
        ("message.timeout.ms", "delivery.timeout.ms"),
        lambda value: value == "0" or _number(MIN_DELIVERY_MILLISECONDS, MAX_DELIVERY_MILLISECONDS)(value),
        f"must be 0 or from {MIN_DELIVERY_MILLISECONDS} to {MAX_DELIVERY_MILLISECONDS}: with less, records would be "
        "given up before they are stored",
    ),
    RequiredSetting(("delivery.report.only.error",), _FALSE, "must be false: stored records would not be reported"),
    RequiredSetting(
        ("transaction.timeout.ms",),
        _number(MIN_TRANSACTION_MILLISECONDS, MAX_TRANSACTION_MILLISECONDS),
        f"must be from {MIN_TRANSACTION_MILLISECONDS} to {MAX_TRANSACTION_MILLISECONDS}: an open transaction of a dead "
        "worker delays all readers",
    ),
    RequiredSetting(
        ("session.timeout.ms",),
        _number(MIN_SESSION_MILLISECONDS, MAX_SESSION_MILLISECONDS),
        f"must be from {MIN_SESSION_MILLISECONDS} to {MAX_SESSION_MILLISECONDS}: brokers refuse a member with a "
        "shorter session",
    ),
    RequiredSetting(("group.id", "group.instance.id"), _NEVER, "is set by ROSE: --namespace distinguishes groups"),
    RequiredSetting(("transactional.id",), _NEVER, "is set by ROSE: --namespace distinguishes writers"),
    RequiredSetting(
        ("on_commit", "on_delivery", "logger", "default.topic.config", "interceptors", "opaque"),
        _NEVER,
        "cannot be given as text",
    ),
)
"""The requirements, one for each setting."""

CALLBACK_SUFFIX = "_cb"
"""Suffix of librdkafka's callback settings."""


def check_required_settings(properties: Mapping[str, str], address: str) -> None:
    """Raise UsageError for the first setting that is not allowed, or that names a broker other than `address`."""
    for name, value in properties.items():
        if name in ADDRESS and value != address:
            raise UsageError(f"broker.properties: {name} names a broker: do that by --bootstrap-server alone")
        if name.endswith(CALLBACK_SUFFIX):
            raise UsageError(f"broker.properties: {name} cannot be given as text")
        for relied in REQUIRED_SETTINGS:
            if name in relied.names and not relied.fits(value.lower()):
                raise UsageError(f"broker.properties: {name} {relied.requirement}")
    session = int(properties.get("session.timeout.ms", DEFAULT_SESSION_MILLISECONDS))
    if not _number(1, session - 1)(properties.get("heartbeat.interval.ms", "1")):
        raise UsageError(
            f"broker.properties: heartbeat.interval.ms must be from 1 to {session - 1}, less than the session timeout: "
            "the group would evict its members"
        )
