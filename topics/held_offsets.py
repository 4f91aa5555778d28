"""Committed offsets that a broker keeps back, since it takes a transaction for open that is over.

A broker that crashes may take a transaction for ended whose end its group never heard of (KAFKA-20734, seen with 4.3.1:
a partition that has no leader at that moment counts as deleted; the transaction coordinator's log has COMPLETE_ABORT,
`__consumer_offsets` no marker). Then it answers nobody who asks for the group's offsets, for ever: neither a timeout
nor the next owner of the transactional id ends what has ended. The next transaction of that id does.

Keeps true
- What is told are the offsets of all that was ever committed: an open transaction is waited for, for as long as the
  broker lets one be open.
- A transaction of another id that hangs so is told with what ends it.
"""

from collections.abc import Sequence

import structlog
from confluent_kafka import KafkaError

from rose.topics.errors import BusError
from rose.topics.reader import Reader
from rose.topics.records import Place
from rose.topics.writer import Writer

HELD_BACK_SECONDS = 6.0
"""After which it is looked at why the offsets are not told; a coordinator that comes up takes as long."""


def committed_offsets(reader: Reader, writer: Writer, places: Sequence[Place]) -> dict[Place, int | None]:
    """The committed offsets of the reader's group, whose transactions the writer writes; None where there is none.

    Raises BusError; the writer is to be thrown away then.
    """
    try:
        return reader.committed(places, seconds=HELD_BACK_SECONDS)
    except BusError as error:
        if error.code != KafkaError._TIMED_OUT:
            raise
    reader.commit_metadata(places)  # it tells them to whom open transactions are all the same
    structlog.get_logger("bus").warning("offsets are held back", reason="a transaction counts as open at the group")
    writer.abort_open_transaction(places, reader)
    try:
        return reader.committed(places)
    except BusError as error:
        if error.code != KafkaError._TIMED_OUT:
            raise
        action = "reading committed offsets, which another's transaction holds back (kafka-transactions.sh tells whose)"
        raise BusError(action, KafkaError(KafkaError._TIMED_OUT)) from error
