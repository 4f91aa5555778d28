"""The cores that ran during a run, from their journals, and the records that the journals name.

Keeps true
- A core can be repeated only from its start. A core whose start is not on the log any more is listed with that reason.
- The journal of a core is used up to the first record that is missing, and a batch is used whole or not at all.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Protocol

from rose.pipeline.journal import MICROSECONDS
from rose.schemas.grants import GrantSource, parse_grant_key
from rose.schemas.journal import CoreJournal, EntryKind, JournalDecision, JournalInput, RestoredRange
from rose.schemas.turns import TurnOutcome, TurnResult
from rose.topics.catalog import COMPLETED, DISPATCHED, GRANTS, JOURNAL, Topic
from rose.topics.log_reader import RecordFetch, read_to_end, read_whole_topics
from rose.topics.reader import Reader
from rose.topics.records import Envelope, Place
from rose.topics.settings import BusSettings

CLIENT = "rose-replay"

TOPIC_OF_DECISION: Mapping[EntryKind, Topic] = {
    EntryKind.DISPATCH: DISPATCHED,
    EntryKind.RESULT: COMPLETED,
    EntryKind.GRANT: GRANTS,
}
"""Topic of the record of a decision."""


@dataclass(slots=True)
class JournalBatch:
    """Consecutive inputs of a core, and the decisions that the core made of them."""

    inputs: list[JournalInput] = field(default_factory=list)
    decisions: list[JournalDecision] = field(default_factory=list)


@dataclass(slots=True)
class RecordedCore:
    """One core from its start on."""

    core: str
    cell: int | None
    """None for the core of a control app."""
    began_at: int
    """Microseconds since 1970, by the core's clock."""
    settings: dict[str, float] = field(default_factory=dict)
    job: str = ""
    restored: list[RestoredRange] = field(default_factory=list)
    batches: list[JournalBatch] = field(default_factory=list)
    journaled: list[JournalDecision] = field(default_factory=list)
    """Every decision that the journal names, also behind a gap."""
    gap: str = ""
    """Why the journal cannot be used, or cannot be used to its end; empty if it can."""

    @property
    def name(self) -> str:
        """The name for people."""
        return self.core if self.cell is None else f"{self.core}, cell {self.cell}"

    @property
    def ended_at(self) -> float:
        """Time of the last input in unix seconds; infinite if a part of the journal cannot be used."""
        if self.gap:
            return math.inf
        inputs = (entry.microseconds for batch in self.batches for entry in batch.inputs)
        return (self.began_at + sum(inputs)) / MICROSECONDS


def recorded_cores(journals: Iterable[CoreJournal]) -> list[RecordedCore]:
    """Arrange journals by core, in the order of the starts. Within a core the journals are in the order of the log."""
    found: dict[tuple[str, int | None, int], list[CoreJournal]] = {}
    for journal in journals:
        found.setdefault((journal.core, journal.cell, journal.began_at), []).append(journal)
    cores = [_recorded_core(records) for records in found.values()]
    return sorted(cores, key=lambda core: core.began_at)


def _recorded_core(records: Sequence[CoreJournal]) -> RecordedCore:
    first = records[0]
    core = RecordedCore(first.core, first.cell, first.began_at, first.settings, first.job)
    core.journaled = [decision for record in records for decision in record.decisions]
    if first.sequence:
        core.gap = "its start is not on the log any more"
        return core
    batch, restored = JournalBatch(), list[RestoredRange]()
    for expected, record in enumerate(records):
        if record.sequence != expected:
            core.gap = f"record {expected} of its journal is missing"
            break
        restored += record.restored
        batch.inputs += record.inputs
        batch.decisions += record.decisions
        if not record.continued:
            core.restored += restored
            core.batches.append(batch)
            batch, restored = JournalBatch(), []
    if not core.gap and records[-1].continued:
        core.gap = "the end of its last batch is not on the log"
    return core


class RecordSource(Protocol):
    """Records of a log, by place."""

    def fetch(self, places: Mapping[Place, Sequence[int]]) -> Iterator[Envelope]:
        """The records at these offsets that the log has, in order within a partition."""
        ...

    def first_offsets(self, places: Sequence[Place]) -> dict[Place, int]:
        """The first offset that the log still has, for each place."""
        ...


class KafkaLog:
    """The records of a log on a broker."""

    def __init__(self, settings: BusSettings) -> None:
        """Raises BusError."""
        self._reader = Reader(settings.for_bounded_reads(), CLIENT, report_ends=True)

    def fetch(self, places: Mapping[Place, Sequence[int]]) -> Iterator[Envelope]:
        """See `RecordSource`. Raises TopicMissing, BusError or FetchStalled."""
        return iter(RecordFetch(self._reader, places))

    def first_offsets(self, places: Sequence[Place]) -> dict[Place, int]:
        """See `RecordSource`. Raises TopicMissing or BusError."""
        return {place: low for place, (low, _) in self._reader.all_watermarks(places).items()}

    def close(self) -> None:
        """Close the client."""
        self._reader.close()


def read_recorded_cores(settings: BusSettings) -> list[RecordedCore]:
    """The cores whose journals are on the log. Raises TopicMissing or BusError."""
    with closing(Reader(settings, CLIENT)) as reader:
        reader.partition_count(JOURNAL)
    records = (envelope.record for envelope in read_whole_topics(settings, [JOURNAL], client_id=CLIENT))
    return recorded_cores(record for record in records if isinstance(record, CoreJournal))


def unjournaled_decisions(settings: BusSettings, cores: Iterable[RecordedCore], begin: float, end: float) -> int:
    """Return how many decisions were stored between two times, in unix seconds, and are named by no journal.

    Raises TopicMissing or BusError.
    """
    named = {
        (TOPIC_OF_DECISION[decision.kind], decision.partition, decision.offset)
        for core in cores
        for decision in core.journaled
    }
    with closing(Reader(settings, CLIENT)) as reader:
        places = [
            (topic, part) for topic in TOPIC_OF_DECISION.values() for part in range(reader.partition_count(topic))
        ]
        starts = reader.offsets_at(places, max(0.0, begin))
    return sum(
        begin <= each.timestamp_seconds <= end
        and _is_decision(each)
        and (each.topic, each.partition, each.offset) not in named
        for each in read_to_end(settings, starts, client_id=CLIENT)
    )


def _is_decision(envelope: Envelope) -> bool:
    """Whether a router or a control app wrote the record as a decision."""
    record = envelope.record
    if envelope.topic is GRANTS:
        return parse_grant_key(envelope.key)[1] in (GrantSource.LEASED, GrantSource.CELL)
    if isinstance(record, TurnResult):
        return record.outcome is TurnOutcome.FAILED
    return record is not None
