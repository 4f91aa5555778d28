"""The log read back: what is committed in a topic, from a place to its present end.

Keeps true
- Only committed records are seen, in order within a partition, and reading ends by itself.
- What does not decode is passed over, unless the caller asks for it: whoever consumes the topic buries it.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, KafkaError

from topics.catalog import Topic
from topics.errors import BusError
from topics.reader import Reader
from topics.records import EndOfPartition, Envelope, Place, Spoiled
from topics.settings import BusSettings

BATCH = 500
"""Records taken from librdkafka at once."""

LOOK_SECONDS = 0.5
"""How long one look for records lasts."""

DECIDED_SECONDS = 60.0
"""How long a transaction may stay open; the broker aborts those of the dead well before (`transaction.timeout.ms`)."""

DECIDED_POLL_SECONDS = 0.02
"""Pause between two looks at a partition with an open transaction."""


def read_back(
    settings: BusSettings,
    begins: Mapping[Place, int],
    *,
    client_id: str = "rose-log",
    spoiled: Callable[[Spoiled], None] = lambda found: None,
    meanwhile: Callable[[], None] = lambda: None,
) -> Iterator[Envelope]:
    """Every committed record from each place's offset to the end that it has when reading gets there.

    `spoiled` is told what does not decode. `meanwhile` is called at least once a second: for who must not fall silent
    elsewhere; what it raises ends the reading. Raises TopicMissing or BusError.
    """
    reader = Reader(settings.to_an_end(), client_id, ends=True, meanwhile=meanwhile)
    open_places = set(begins)
    try:
        reader.assign(begins)
        while open_places:
            meanwhile()
            for item in reader.read(BATCH, LOOK_SECONDS):
                if isinstance(item, EndOfPartition):
                    open_places.discard((item.topic, item.partition))
                elif (item.topic, item.partition) not in open_places:
                    continue
                elif isinstance(item, Spoiled):
                    spoiled(item)
                else:
                    yield item
    finally:
        reader.close()


def read_topics(settings: BusSettings, topics: Sequence[Topic], *, client_id: str = "rose-log") -> Iterator[Envelope]:
    """Every committed record that these topics still hold, all partitions."""
    reader = Reader(settings, client_id)
    try:
        begins = {(topic, part): OFFSET_BEGINNING for topic in topics for part in range(reader.partitions(topic))}
    finally:
        reader.close()
    yield from read_back(settings, begins, client_id=client_id)


def await_decided(
    settings: BusSettings,
    places: Sequence[Place],
    *,
    seconds: float = DECIDED_SECONDS,
    client_id: str = "rose-log",
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Wait until every transaction in these partitions has been committed or aborted.

    A transaction counts as committed before each of its partitions says so: who takes over what another has written
    waits for this before it reads back. `meanwhile`: as in `read_back`. Raises BusError when one is still open after
    the time given.
    """
    committed = Reader(settings, client_id, meanwhile=meanwhile)
    uncommitted: dict[str, Any] = {"isolation.level": "read_uncommitted"}
    written = Reader(settings, client_id, meanwhile=meanwhile, **uncommitted)
    deadline = time.monotonic() + seconds
    try:
        ends = {place: end for place, (_, end) in written.all_watermarks(places).items()}
        while ends:
            decided = committed.all_watermarks(list(ends))
            ends = {place: end for place, end in ends.items() if decided[place][1] < end}
            if ends and time.monotonic() > deadline:
                topic, partition = next(iter(ends))
                ended = "kafka-transactions.sh find-hanging tells whose it is, and abort ends it"
                where = f"{settings.topic(topic)} [{partition}]"
                raise BusError(f"waiting for a transaction in {where} ({ended})", KafkaError(KafkaError._TIMED_OUT))
            if ends:
                meanwhile()
                written.read(1, DECIDED_POLL_SECONDS)
    finally:
        committed.close()
        written.close()
