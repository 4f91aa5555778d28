"""The log read back: what is committed in a topic, from a place to its present end.

Keeps true: only committed records are seen, in order within a partition, and reading ends by itself.
"""

from collections.abc import Iterator, Mapping, Sequence

from confluent_kafka import OFFSET_BEGINNING

from topics.bus import EndOfPartition, Envelope, Place, Reader
from topics.catalog import Topic
from topics.settings import BusSettings

BATCH = 500
"""Records taken from librdkafka at once."""


def read_back(settings: BusSettings, begins: Mapping[Place, int], *, client_id: str = "rose-log") -> Iterator[Envelope]:
    """Every committed record from each place's offset to the end that it has when reading gets there.

    Raises TopicMissing or BusError.
    """
    reader = Reader(settings, client_id, group="log", ends=True)
    open_places = set(begins)
    try:
        reader.assign(begins)
        while open_places:
            for item in reader.read(BATCH, 1.0):
                if isinstance(item, EndOfPartition):
                    open_places.discard((item.topic, item.partition))
                elif (item.topic, item.partition) in open_places:
                    yield item
    finally:
        reader.close()


def read_topics(settings: BusSettings, topics: Sequence[Topic], *, client_id: str = "rose-log") -> Iterator[Envelope]:
    """Every committed record that these topics still hold, all partitions."""
    reader = Reader(settings, client_id, group="log")
    try:
        begins = {(topic, part): OFFSET_BEGINNING for topic in topics for part in range(reader.partitions(topic))}
    finally:
        reader.close()
    yield from read_back(settings, begins, client_id=client_id)
