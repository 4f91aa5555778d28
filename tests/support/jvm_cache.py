"""The classes of Apache Kafka as Java has them in memory, written once a run of tests and read at each start of a node.

A node checks and links some thousands of classes as it starts: a third of the processor time of that. Where there is no
such file, or one of another Java or other jars, Java does as it always does.

    archive = JvmClassArchive(Path("folder"))
    os.environ |= archive.environment  # of all that start nodes from now on
    archive.write()
"""

import os
from pathlib import Path

from rose.topics.local_broker import LONE_JAVA, free_ports, lone_node, start_broker
from tests.support.brokers import KAFKA, home_of

OPTIONS = "JDK_JAVA_OPTIONS"
"""The variable of the `java` command that holds options for it."""

QUIET = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off")
"""What Java says of an archive of other jars."""


class JvmClassArchive:
    """In this folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / "classes.jsa"
        options = os.environ.get(OPTIONS, ""), f'"-XX:SharedArchiveFile={self._file}"', *QUIET
        self.environment = {OPTIONS: " ".join(options)}

    def write(self) -> None:
        """Start a node that writes them as it ends. Raises BrokerFailed."""
        home, [port] = home_of(KAFKA), free_ports(1)
        assert home is not None
        lone_node(self.folder, port, home)  # formats: that has other classes
        java = (*LONE_JAVA, f"-XX:ArchiveClassesAtExit={self._file}", *QUIET)
        start_broker(self.folder, kafka_home=home, port=port, kafka_java=java).stop()
