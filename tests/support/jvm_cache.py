"""The classes of Apache Kafka as Java has them in memory, written once per test run and read at each start of a node.

A node checks and links some thousands of classes as it starts, which takes a third of its processor time. Java starts
as always if there is no such file, or if the file is from another Java or other jars.

    archive = JvmClassArchive(Path("folder"))
    os.environ |= archive.environment  # for every node started from now on
    archive.write()
"""

import os
from pathlib import Path

from rose.topics.local_broker import LONE_JAVA, free_ports, lone_node, start_broker
from tests.support.brokers import KAFKA, home_of

OPTIONS = "JDK_JAVA_OPTIONS"
"""The variable of the `java` command that holds options for it."""

QUIET = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off")
"""Options that silence the warning of Java about an archive of other jars."""


class JvmClassArchive:
    """The archive of classes, in the file `classes.jsa` of `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / "classes.jsa"
        options = os.environ.get(OPTIONS, ""), f'"-XX:SharedArchiveFile={self._file}"', *QUIET
        self.environment = {OPTIONS: " ".join(options)}

    def write(self) -> None:
        """Start a node that writes the archive as it ends. Raises BrokerFailed."""
        home, [port] = home_of(KAFKA), free_ports(1)
        assert home is not None
        lone_node(self.folder, port, home)  # formats the folder, which loads other classes
        java = (*LONE_JAVA, f"-XX:ArchiveClassesAtExit={self._file}", *QUIET)
        start_broker(self.folder, kafka_home=home, port=port, kafka_java=java).stop()
