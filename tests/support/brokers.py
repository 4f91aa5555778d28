"""Brokers that the tests run on.

Keeps true
- With ROSE_BOOTSTRAP the tests use only that broker and start none. Otherwise they run on the embedded broker and, with
  KAFKA_HOME, also on an Apache Kafka node.
- A test never sees data of another test: each test takes its own `namespace` for topics, groups and transactional ids.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from rose.topics.local_broker import Broker, start_broker
from rose.topics.settings import BusSettings
from tests.support.kafka_cluster import Cluster, start_cluster
from tests.support.waiting import WAIT_SECONDS

EXTERNAL, EMBEDDED, KAFKA = "external", "embedded", "kafka"
KINDS = [EXTERNAL] if os.environ.get("ROSE_BOOTSTRAP") else [EMBEDDED, KAFKA]

any_broker = pytest.mark.parametrize("broker_kind", KINDS[:1], indirect=True)
"""Mark of a test that needs some broker, and for which all brokers are equal."""

IF_KAFKA = [pytest.mark.long] if os.environ.get("KAFKA_HOME") else []
"""Marks of tests that `make test` leaves to `make test-long` if an Apache Kafka is installed."""

kafka_first = pytest.mark.parametrize(
    "broker_kind",
    KINDS
    if EXTERNAL in KINDS
    else [pytest.param(KAFKA, marks=pytest.mark.slow), pytest.param(EMBEDDED, marks=[pytest.mark.slow, *IF_KAFKA])],
    indirect=True,
)
"""Mark of a test that shows the same on the embedded broker and on Apache Kafka."""

embedded_first = pytest.mark.parametrize(
    "broker_kind",
    KINDS if EXTERNAL in KINDS else [EMBEDDED, pytest.param(KAFKA, marks=pytest.mark.long)],
    indirect=True,
)
"""Mark of a test that starts its own broker repeatedly, which takes most of its time on Apache Kafka."""

best_broker = pytest.mark.parametrize(
    "broker_kind",
    KINDS if EXTERNAL in KINDS else [KAFKA if os.environ.get("KAFKA_HOME") else EMBEDDED],
    indirect=True,
)
"""Mark of a test of minutes with little broker work. The test runs on Apache Kafka if one is installed."""


@dataclass(frozen=True, slots=True)
class ExternalBroker:
    """A broker that the tests do not start or stop."""

    bootstrap: str
    name: str = "external broker"

    def settings(self, namespace: str = "") -> BusSettings:
        return BusSettings(self.bootstrap, namespace)


AnyBroker = Broker | ExternalBroker


def clear(broker: AnyBroker, namespace: str) -> None:
    """Delete the topics of a namespace. The embedded broker may save the data of a test for some seconds first."""
    admin = AdminClient(broker.settings().client("tests"), logger=logging.getLogger("tests.support.brokers"))
    names = [name for name in admin.list_topics(timeout=WAIT_SECONDS).topics if name.startswith(namespace)]
    for deleted in admin.delete_topics(names).values() if names else ():
        try:
            deleted.result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:  # a topic that a test has just deleted
                raise


def flags(settings: BusSettings) -> tuple[str, ...]:
    """Return the `rose` options that name this broker."""
    properties = [word for name, value in settings.properties.items() for word in ("-X", f"{name}={value}")]
    embedded = ("--set", f"broker.embedded={str(settings.embedded).lower()}")
    return ("--bootstrap-server", settings.bootstrap, "--namespace", settings.namespace, *embedded, *properties)


def home_of(kind: str) -> Path | None:
    """Return the installation of a broker of this kind. Skip the test if there is none."""
    if EXTERNAL in KINDS:
        pytest.skip("ROSE_BOOTSTRAP names the broker to test on, which tests may neither start, kill nor fill")
    if kind == EMBEDDED:
        return None
    home = os.environ.get("KAFKA_HOME")
    if not home:
        pytest.skip("KAFKA_HOME is not set: name a folder with Apache Kafka's libs/")
    return Path(home)


def start(kind: str, folder: Path) -> Broker:
    """Start a broker for the calling test. Skip the test if there is none to start."""
    home = home_of(kind)
    formatted = folder / "apache-kafka" / "log"
    if kind == KAFKA and _FORMATTED and not formatted.exists():
        formatted.mkdir(parents=True)
        for name, content in _FORMATTED.items():
            (formatted / name).write_bytes(content)
    broker = start_broker(folder, kafka_home=home)
    if kind == KAFKA and not _FORMATTED:
        _FORMATTED.update({name: (formatted / name).read_bytes() for name in FORMATTED})
    return broker


FORMATTED = ("meta.properties", "bootstrap.checkpoint")
_FORMATTED: dict[str, bytes] = {}
"""Files that formatting writes into the folder of a single node. Formatting runs once, because it starts its own JVM.
"""


def start_nodes(folder: Path) -> Cluster:
    """Start three nodes of Apache Kafka. Skip the test if there is no installation."""
    home = home_of(KAFKA)
    assert home is not None
    return start_cluster(folder, kafka_home=home)
