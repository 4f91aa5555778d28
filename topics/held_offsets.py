"""Held offsets: committed offsets that a broker does not return because it takes a finished transaction for open.

After a crash, the transaction coordinator may count a transaction as ended although the group's coordinator has no
marker of its end (KAFKA-20734, seen with 4.3.1: a partition without a leader at that moment counts as deleted; the
transaction coordinator's log has COMPLETE_ABORT, `__consumer_offsets` has no marker). The broker then never returns the
group's offsets. Neither a timeout nor the next owner of the transactional id ends the transaction; the next transaction
of that id does.

Keeps true
- The returned offsets include every commit: an open transaction is waited for, as long as the broker allows it to be
  open.
- If a transaction of another id holds the offsets, the error names the tool that finds it.
"""

from collections.abc import Sequence

import structlog
from confluent_kafka import KafkaError

from rose.topics.errors import BusError
from rose.topics.reader import Reader
from rose.topics.records import Place
from rose.topics.writer import Writer

HELD_BACK_SECONDS = 6.0
"""How long to wait for the offsets before the transaction is ended. A coordinator that starts takes as long."""


def committed_offsets(
    reader: Reader, writer: Writer, places: Sequence[Place], *, mark: str | None = None
) -> dict[Place, int | None]:
    """The committed offsets of the reader's group; None for a place without a committed offset.

    `writer`: the transactional writer that commits the group's offsets. `mark`: see `Reader.committed`. Raises
    BusError; discard the writer then.
    """
    try:
        return reader.committed(places, seconds=HELD_BACK_SECONDS, mark=mark)
    except BusError as error:
        if not error.outcome_unknown:
            raise
    reader.commit_metadata(places)  # raises if the coordinator is away: it answers this also during a transaction
    structlog.get_logger("bus").warning("offsets_held_back", reason="a transaction counts as open at the group")
    writer.abort_open_transaction(places, reader)
    try:
        return reader.committed(places, mark=mark)
    except BusError as error:
        if not error.outcome_unknown:
            raise
        action = "reading committed offsets, which another's transaction holds back (kafka-transactions.sh tells whose)"
        raise BusError(action, KafkaError(KafkaError._TIMED_OUT)) from error
