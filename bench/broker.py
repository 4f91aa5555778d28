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
"""JVM options of Apache Kafka's own start scripts. With a small heap the JVM pauses for about 12 ms in each second, and
such pauses would decide the latency tail."""


def kafka_home() -> Path | None:
    """Return the folder of Apache Kafka that KAFKA_HOME names, if it is set."""
    home = os.environ.get("KAFKA_HOME")
    return Path(home) if home else None


@contextmanager
def scratch_broker() -> Iterator[Broker]:
    """Start a broker whose data is in a folder that is deleted with the broker."""
    with (
        tempfile.TemporaryDirectory(prefix="rose-bench-") as folder,
        start_broker(Path(folder), kafka_home=kafka_home(), kafka_java=SERVER_JAVA) as broker,
    ):
        yield broker


@contextmanager
def scratch_node(home: Path) -> Iterator[SecuredNode]:
    """Start an Apache Kafka node with TLS, SCRAM and an authorizer that denies everything by default."""
    with (
        tempfile.TemporaryDirectory(prefix="rose-bench-") as folder,
        start_secured(Path(folder), kafka_home=home, java=SERVER_JAVA) as node,
    ):
        yield node


def user_of(node: SecuredNode, namespace: str, name: str, *roles: Role) -> BusSettings:
    """Return the settings of a new user, who has exactly the rights of these roles in this namespace."""
    user = f"{namespace}{name}"
    node.allow(user, dict.fromkeys(acl for role in roles for acl in acls(role, namespace)))
    return node.settings_of(user, namespace)
