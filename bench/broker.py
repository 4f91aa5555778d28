"""A broker for one measurement: the embedded one, or Apache Kafka with KAFKA_HOME, plain or secured."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rose.topics.acl import Role, acls
from rose.topics.local_broker import Broker, start_broker
from rose.topics.settings import BusSettings
from tests.support.secured_node import SecuredNode, start_secured

SERVER_JAVA = ("-Xms1g", "-Xmx1g", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20", "-XX:InitiatingHeapOccupancyPercent=35")
"""As Apache Kafka's own scripts start a node. With a small heap Java holds all up for some 12 ms a second, and whether
that is more than 1 % of the turns would decide about their tail.
"""


def kafka_home() -> Path | None:
    """Where Apache Kafka is, if KAFKA_HOME says so."""
    home = os.environ.get("KAFKA_HOME")
    return Path(home) if home else None


@contextmanager
def scratch_broker() -> Iterator[Broker]:
    """Start it with its data in a folder that goes with it."""
    with (
        tempfile.TemporaryDirectory(prefix="rose-bench-") as folder,
        start_broker(Path(folder), kafka_home=kafka_home(), kafka_java=SERVER_JAVA) as broker,
    ):
        yield broker


@contextmanager
def scratch_node(home: Path) -> Iterator[SecuredNode]:
    """The same of an Apache Kafka with TLS, SCRAM and nobody who may do anything."""
    with (
        tempfile.TemporaryDirectory(prefix="rose-bench-") as folder,
        start_secured(Path(folder), kafka_home=home, java=SERVER_JAVA) as node,
    ):
        yield node


def user_of(node: SecuredNode, namespace: str, name: str, *roles: Role) -> BusSettings:
    """How a new user, with the rights of these roles in this namespace and no more, reaches the node."""
    user = f"{namespace}{name}"
    node.allow(user, dict.fromkeys(acl for role in roles for acl in acls(role, namespace)))
    return node.settings_of(user, namespace)
