"""Starts a local broker, the embedded default or an Apache Kafka node, behind one interface.

Keeps true
- `start_broker` returns only when the broker answers on loopback and every partition has its leader.
- The broker does not create a topic because a client names it.

Example:
    with start_broker(run_folder / "broker", kafka_home=settings.kafka_home) as broker:
        ...  # broker.bootstrap is "127.0.0.1:PORT"
        broker.check()
"""

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from rose.topics.apache_kafka import LONE_JAVA, lone_node
from rose.topics.local_broker.process import HOST, Broker, BrokerFailed, BrokerKind, free_ports


def start_broker(
    data_folder: Path, *, kafka_home: Path | None = None, port: int | None = None, kafka_java: Sequence[str] = LONE_JAVA
) -> Broker:
    """Start a broker on loopback with its data and log in `data_folder`, and wait until it answers.

    `kafka_home`: a folder with Apache Kafka's `libs/`; None starts the embedded broker. `port`: None picks a free port.
    `kafka_java`: Java's options for Apache Kafka. Call this from a thread that lives as long as the broker should: the
    broker ends with that thread. Raises BrokerFailed with a sentence that names the cause and the remedy.
    """
    data_folder.mkdir(parents=True, exist_ok=True)
    data_folder = data_folder.resolve()
    if port is None:
        [port] = free_ports(1)
    kind = (
        _embedded_kind(data_folder, port)
        if kafka_home is None
        else lone_node(data_folder, port, kafka_home, kafka_java)
    )
    broker = Broker(kind, data_folder, port)
    broker.launch()
    broker.await_ready()
    return broker


def _embedded_kind(data_folder: Path, port: int) -> BrokerKind:
    package = importlib.util.find_spec("noida_db")
    if package is None or package.origin is None:
        raise BrokerFailed(
            "the embedded broker is not installed: pip install 'rose-rollouts[embedded]', "
            "or name an Apache Kafka (KAFKA_HOME) or a running cluster (--bootstrap-server)"
        )
    binary = Path(package.origin).with_name("noida-db")
    own = data_folder / "noida-db"
    options = ["--data-dir", str(own), "--host", HOST, "--only", "kafka", "--kafka-port", str(port)]
    own.mkdir(exist_ok=True)
    return BrokerKind(
        name=f"noida-db {importlib.metadata.version('noida-db')}",
        command=[str(binary), "start", *options],
        snapshot=own / "kafka.json",
    )
