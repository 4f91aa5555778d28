"""Where an executor reads, and from where on: its start is marked in its inbox.

Keeps true: what is dispatched to a start is read by it, and no two starts in one inbox have the same incarnation,
whoever's they are.
"""

import secrets

from schemas.errors import UsageError
from schemas.homes import slot_of
from topics.catalog import DISPATCHED
from topics.reader import Reader
from topics.records import Place
from topics.writer import Writer
from workers.executor.config import ExecutorConfig

START_BITS = 16
"""Random bits of an incarnation, below the offset: a broker that lost its newest records may give an offset twice."""


def inbox_of(reader: Reader, config: ExecutorConfig) -> Place:
    """The inbox of an executor. Raises UsageError where there is none, TopicMissing or BusError."""
    slots = reader.partitions(DISPATCHED)
    slot = slot_of(config.worker, slots) if config.slot is None else config.slot
    if not 0 <= slot < slots:
        raise UsageError(
            f"executor.slot is {slot} and the last inbox {slots - 1}: leave it out, and it follows from the name; or "
            "with more topics.inbox_slots, `rose topics create` adds some"
        )
    return DISPATCHED, slot


def begin(inbox: Place, name: str, reader: Reader, writer: Writer) -> int:
    """Mark a start in the inbox and read on from there: what is dispatched after a heartbeat is read.

    Returns the incarnation. Raises TopicMissing or BusError.
    """
    reader.watermarks(inbox)
    marks: list[int] = []
    writer.tombstone(DISPATCHED, key=name, partition=inbox[1], on_delivery=lambda _, offset: marks.append(offset))
    writer.flush()
    reader.assign({inbox: marks[0] + 1})
    return marks[0] << START_BITS | secrets.randbits(START_BITS)
