"""The brokers that tests run on.

Keeps true
- With ROSE_BOOTSTRAP the tests run on that broker alone and start none; else on the embedded broker and, with
  KAFKA_HOME, on an Apache Kafka node too.
- A test never sees what another left: it takes its own `namespace` before topics, groups and transactional ids.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from rose.topics.local_broker import Broker, start_broker
from rose.topics.settings import BusSettings
from tests.support.kafka_cluster import Cluster, start_cluster
from tests.support.waiting import WAIT_SECONDS

EXTERNAL, EMBEDDED, KAFKA = "external", "embedded", "kafka"
KINDS = [EXTERNAL] if os.environ.get("ROSE_BOOTSTRAP") else [EMBEDDED, KAFKA]

any_broker = pytest.mark.parametrize("broker_kind", KINDS[:1], indirect=True)
"""Of a test to which all brokers are one: it needs one to run at all."""

IF_KAFKA = [pytest.mark.long] if os.environ.get("KAFKA_HOME") else []
"""Marks of what `make test` leaves to `make test-long` where there is an Apache Kafka."""

kafka_first = pytest.mark.parametrize(
    "broker_kind",
    KINDS
    if EXTERNAL in KINDS
    else [pytest.param(KAFKA, marks=pytest.mark.slow), pytest.param(EMBEDDED, marks=[pytest.mark.slow, *IF_KAFKA])],
    indirect=True,
)
"""Of a test that shows on the embedded broker what it shows on Apache Kafka."""

embedded_first = pytest.mark.parametrize(
    "broker_kind",
    KINDS if EXTERNAL in KINDS else [EMBEDDED, pytest.param(KAFKA, marks=pytest.mark.long)],
    indirect=True,
)
"""Of a test that starts a broker of its own again and again, of which Apache Kafka's starts take most of the time."""

best_broker = pytest.mark.parametrize(
    "broker_kind",
    KINDS if EXTERNAL in KINDS else [KAFKA if os.environ.get("KAFKA_HOME") else EMBEDDED],
    indirect=True,
)
"""Of a test of minutes of which the broker is the least: on Apache Kafka where there is one."""


@dataclass(frozen=True, slots=True)
class ExternalBroker:
    """A broker that somebody else runs."""

    bootstrap: str
    name: str = "external broker"

    def settings(self, namespace: str = "") -> BusSettings:
        return BusSettings(self.bootstrap, namespace)


AnyBroker = Broker | ExternalBroker


def clear(broker: AnyBroker, namespace: str) -> None:
    """Delete the topics of a namespace. The embedded broker may be saving all that a test has left, for seconds."""
    admin = AdminClient(broker.settings().client("tests"), logger=logging.getLogger("tests.support.brokers"))
    names = [name for name in admin.list_topics(timeout=WAIT_SECONDS).topics if name.startswith(namespace)]
    for deleted in admin.delete_topics(names).values() if names else ():
        deleted.result()


def flags(settings: BusSettings) -> tuple[str, ...]:
    """What tells `rose` to reach the broker like this."""
    properties = [word for name, value in settings.properties.items() for word in ("-X", f"{name}={value}")]
    embedded = ("--set", f"broker.embedded={str(settings.embedded).lower()}")
    return ("--bootstrap-server", settings.bootstrap, "--namespace", settings.namespace, *embedded, *properties)


def home_of(kind: str) -> Path | None:
    """What a broker of this kind is started with; skips the test where there is none to start."""
    if EXTERNAL in KINDS:
        pytest.skip("ROSE_BOOTSTRAP names the broker to test on, which tests may neither start, kill nor fill")
    if kind == EMBEDDED:
        return None
    home = os.environ.get("KAFKA_HOME")
    if not home:
        pytest.skip("KAFKA_HOME is not set: name a folder with Apache Kafka's libs/")
    return Path(home)


def start(kind: str, folder: Path) -> Broker:
    """A broker of its own for the test that calls; skips the test where there is none to start."""
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
"""What formatting leaves in the folder of a node that is alone: done once, for it takes a Java of its own."""


def start_nodes(folder: Path) -> Cluster:
    """Three nodes of Apache Kafka; skips the test where there is none to start."""
    home = home_of(KAFKA)
    assert home is not None
    return start_cluster(folder, kafka_home=home)
