"""How to reach the broker. Keeps true: what the user gives librdkafka passes through verbatim and wins.

What ROSE relies on is refused before (`rose.topics.required_settings`).
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import structlog
from confluent_kafka import KafkaError

from rose.schemas.errors import UsageError
from rose.topics.catalog import MAX_DEAD_LETTER_BYTES, MAX_MESSAGE_BYTES, Topic

PREFIX = "rose."
"""What every topic, consumer group and transactional id begins with, after the namespace: one prefix for an ACL."""

WARNING_SECONDS = 30.0
"""Between two warnings of the same trouble with the broker."""

STARTUP_SECONDS = 10.0
"""A client younger than this may not know of all brokers yet."""

TRANSACTION_MILLISECONDS = 10_000
"""The broker aborts a transaction that is open for so long. Until then that of a dead producer holds up its readers."""

FETCH_MILLISECONDS = 100
"""An idle reader asks the broker again after so long. A new record wakes the fetch under way; a partition that is
assigned or resumed meanwhile waits for its end."""

BOUNDED_FETCH_MILLISECONDS = 10
"""The same for a reader that stops at an end: of that it is told by a fetch that finds nothing, and what it asks the
broker next waits for the end of a fetch under way."""

FULL_QUEUE_MILLISECONDS = 10
"""A reader that has fetched ahead as much as it may looks again after so long; librdkafka would after a second, with
nothing left to read."""

CLIENT_CERTIFICATES = ("ssl.certificate.location", "ssl.certificate.pem", "ssl.keystore.location")
"""Where librdkafka is told of a client's own certificate."""


@dataclass(frozen=True, slots=True)
class BusSettings:
    """How to reach a broker, and under which names: what every client of it is made of."""

    bootstrap: str
    """`host:port[,host:port]`."""
    namespace: str = ""
    """Put before every topic, group and transactional id, to share a cluster."""
    properties: Mapping[str, str] = field(default_factory=dict)
    """librdkafka settings, verbatim."""
    embedded: bool = False
    """The broker answers an empty fetch at once, so readers rest; and never evicts a member of a group, so members are
    known by name and a new one takes its own former place."""

    @property
    def authenticated(self) -> bool:
        """Whether clients prove who they are: what each may do is a matter of rights then."""
        protocol = self.properties.get("security.protocol", "").lower()
        certified = any(name in self.properties for name in CLIENT_CERTIFICATES)
        return protocol.startswith("sasl_") or (protocol == "ssl" and certified)

    def topic(self, topic: Topic) -> str:
        """The topic's name on this broker."""
        return f"{self.namespace}{topic.name}"

    def with_defaults(self, properties: Mapping[str, str]) -> "BusSettings":
        """The same with these properties, where the user gave none of the name."""
        return replace(self, properties={**properties, **self.properties})

    def for_bounded_reads(self) -> "BusSettings":
        """For readers that stop at an end."""
        return self if self.embedded else self.with_defaults({"fetch.wait.max.ms": str(BOUNDED_FETCH_MILLISECONDS)})

    def name(self, name: str) -> str:
        """A consumer group or transactional id on this broker."""
        return f"{self.namespace}{PREFIX}{name}"

    def client(self, client_id: str) -> dict[str, object]:
        """What every client has in common."""
        return self._with_overrides(
            {
                "bootstrap.servers": self.bootstrap,
                "client.id": client_id,
                "error_cb": partial(_report_error, len(set(self.bootstrap.split(","))), time.monotonic()),
                "log_level": 2,
                "topic.metadata.refresh.interval.ms": 30_000,
                "socket.nagle.disable": True,
            }
        )

    def producer(self, client_id: str) -> dict[str, object]:
        """An idempotent producer that sends at once and packs what waits."""
        return self._with_overrides(
            {
                **self.client(client_id),
                "enable.idempotence": True,
                "linger.ms": 0,
                "compression.type": "lz4",
                "message.max.bytes": MAX_DEAD_LETTER_BYTES,  # what else is too large its topic refuses
                "batch.size": MAX_MESSAGE_BYTES,  # of records that do not compress, a batch is what its topic must take
                "queue.buffering.max.kbytes": 256 * 1024,
                "message.timeout.ms": 0,  # a slow link is no failure: whoever flushes decides
            }
        )

    def transactional(self, client_id: str, transactional_id: str) -> dict[str, object]:
        """A transactional producer. Back-to-back transactions meet CONCURRENT_TRANSACTIONS: retry at once."""
        return self._with_overrides(
            {
                **self.producer(client_id),
                "transactional.id": self.name(transactional_id),
                "transaction.timeout.ms": TRANSACTION_MILLISECONDS,
                "retry.backoff.ms": 1,
                "retry.backoff.max.ms": 5,
                "message.timeout.ms": TRANSACTION_MILLISECONDS,
            }
        )

    def consumer(self, client_id: str, group: str) -> dict[str, object]:
        """A consumer that sees committed records only and commits nothing by itself."""
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
        """With what the user gave in the end: of a setting with two names librdkafka heeds the one that comes last."""
        own = {name: value for name, value in config.items() if name not in self.properties}
        return {**own, **self.properties}


_warned_at: dict[int, float] = {}
"""By kind of trouble, when it was last told."""


_FIRST_DOWN = "1/1 brokers are down"


def _report_error(servers: int, created_at: float, error: KafkaError) -> None:
    """For whoever wonders why nothing moves. librdkafka reconnects and retries by itself.

    One broker of several that is away is no trouble: the others answer. When it is the first of the `servers` that a
    client begins to know, librdkafka says that all are. Later it counts those that the cluster has: a node that has
    long been away is not among them, nor is a second name of the same one.
    """
    if error.code() in (KafkaError._TRANSPORT, KafkaError._RESOLVE, KafkaError._TIMED_OUT) and not error.fatal():
        return
    now = time.monotonic()
    if error.str() == _FIRST_DOWN and servers > 1 and now - created_at < STARTUP_SECONDS:
        return
    if now - _warned_at.get(error.code(), -math.inf) >= WARNING_SECONDS:
        _warned_at[error.code()] = now
        structlog.get_logger("bus").warning("broker trouble", error=error.str())


def _report_commit(error: KafkaError | None, _partitions: object) -> None:
    if error is not None:
        structlog.get_logger("bus").warning("offsets not committed", error=error.str())


def parse_properties(pairs: list[str], command_config: Path | None) -> dict[str, str]:
    """librdkafka settings from `--command-config FILE` (key=value lines, `#` comments) and `-X key=value`, which wins.

    Raises UsageError for a file that cannot be read or a line that is no `key=value`.
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
        # It is not shown: it may be a password without its name.
        raise UsageError(f"{where}: that is no key=value (for example security.protocol=SASL_SSL)")
    return key.strip(), value.strip()
