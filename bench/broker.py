"""A broker for one measurement: the embedded one, or Apache Kafka with KAFKA_HOME."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from topics.broker import Broker
from topics.embedded import start_broker


@contextmanager
def scratch_broker() -> Iterator[Broker]:
    """Start it with its data in a folder that goes with it."""
    home = os.environ.get("KAFKA_HOME")
    with (
        tempfile.TemporaryDirectory(prefix="rose-bench-") as folder,
        start_broker(Path(folder), kafka_home=Path(home) if home else None) as broker,
    ):
        yield broker
