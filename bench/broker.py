"""A broker for one measurement: the embedded one, or Apache Kafka with KAFKA_HOME."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from topics.broker import Broker
from topics.embedded import start_broker

SERVER_JAVA = ("-Xms1g", "-Xmx1g", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20", "-XX:InitiatingHeapOccupancyPercent=35")
"""As Apache Kafka's own scripts start a node. With a small heap Java holds all up for some 12 ms a second, and whether
that is more than 1 % of the turns would decide about their tail.
"""


@contextmanager
def scratch_broker() -> Iterator[Broker]:
    """Start it with its data in a folder that goes with it."""
    home = os.environ.get("KAFKA_HOME")
    with (
        tempfile.TemporaryDirectory(prefix="rose-bench-") as folder,
        start_broker(Path(folder), kafka_home=Path(home) if home else None, kafka_java=SERVER_JAVA) as broker,
    ):
        yield broker
