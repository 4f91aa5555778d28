"""An Apache Kafka cluster on loopback that survives the loss of one node.

Keeps true: in a cluster of three nodes, every topic and internal topic may have a replica on each node, and two
replicas acknowledge. While two nodes run, no acknowledged record is lost and the cluster works.

Example
    with start_cluster(folder, kafka_home=home) as cluster:
        ...  # cluster.bootstrap names all nodes
        cluster.nodes[1].kill()  # its leaders move
        cluster.nodes[1].restart()
"""

import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from rose.topics.local_broker import QUIET, SPARING_JAVA, Broker, BrokerFailed, NodePlace, free_ports, node_kinds
from rose.topics.settings import BusSettings

CLUSTER_JAVA = ("-Xmx256m", *SPARING_JAVA)
"""Java options for each node of a cluster. The process takes about 330 MB."""

LOOK_SECONDS = 0.2
"""Time between two checks whether the replicas are in sync."""


class Cluster:
    """A cluster of several nodes on this machine, made by `start_cluster`. As a context manager it stops them."""

    def __init__(self, nodes: tuple[Broker, ...]) -> None:
        self.nodes = nodes
        """The nodes, which can be killed and restarted one by one. The node with id n is nodes[n - 1]."""
        self.name = f"{len(nodes)} nodes of {nodes[0].name}"
        self.bootstrap = ",".join(node.bootstrap for node in nodes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def settings(self, namespace: str = "", properties: Mapping[str, str] | None = None) -> BusSettings:
        """Settings for clients of this cluster."""
        return BusSettings(self.bootstrap, namespace, properties or {})

    def in_sync(self) -> bool:
        """Whether all nodes answer and each reports all replicas in sync, so that one node may be lost.

        Every node is queried, because for some seconds the others still report a node that is gone.
        """
        return all(node.alive() and self._knows_all(node) for node in self.nodes)

    def await_in_sync(self, seconds: float) -> None:
        """Wait until every partition has all its replicas in sync. Raises BrokerFailed after `seconds`."""
        deadline = time.monotonic() + seconds
        while not self.in_sync():
            if time.monotonic() > deadline:
                raise BrokerFailed(f"{self.name}: the copies were not in sync after {seconds:.0f} s")
            time.sleep(LOOK_SECONDS)

    def _knows_all(self, node: Broker) -> bool:
        try:
            found = AdminClient({"bootstrap.servers": node.bootstrap, **QUIET}).list_topics(timeout=2)
        except KafkaException:
            return False
        partitions = [partition for topic in found.topics.values() for partition in topic.partitions.values()]
        return len(found.brokers) == len(self.nodes) and all(
            partition.leader >= 0 and len(partition.isrs) == len(partition.replicas) for partition in partitions
        )

    def stop(self) -> None:
        """Kill all nodes: an orderly stop needs a quorum, which the last nodes lack. Acknowledged records are kept."""
        for node in self.nodes:
            node.kill()


def start_cluster(data_folder: Path, *, kafka_home: Path, nodes: int = 3) -> Cluster:
    """Start a cluster on loopback with a folder for each node in `data_folder`, and wait until all nodes answer.

    Call this from a thread that lives as long as the cluster should. Raises BrokerFailed.
    """
    folders = [data_folder.resolve() / f"node-{node}" for node in range(1, nodes + 1)]
    ports = free_ports(2 * nodes)
    places = []
    for number, folder in enumerate(folders):
        (folder / "apache-kafka").mkdir(parents=True, exist_ok=True)
        places.append(NodePlace(number + 1, ports[2 * number], ports[2 * number + 1], folder / "apache-kafka"))
    kinds = node_kinds(places, kafka_home, CLUSTER_JAVA)
    started = [Broker(kind, place.folder.parent, place.port) for kind, place in zip(kinds, places, strict=True)]
    cluster = Cluster(tuple(started))
    try:
        for node in started:  # all are launched first, because a node answers only once there is a quorum
            node.launch()
        for node in started:
            node.await_ready()
    except BaseException:
        cluster.stop()
        raise
    return cluster
