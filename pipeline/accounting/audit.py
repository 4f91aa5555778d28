"""The audit of a log: the ledger's fold over what the broker keeps.

Keeps true
- It reads and writes nothing else: no program's memory, no committed offset.
- A run in progress is not accused. Topics are read in the order in which a trajectory passes them, prompts after all of
  them: what happens meanwhile can move a trajectory on, never make it look lost or unasked.
"""

from collections.abc import Iterator

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

from pipeline.accounting.ledger import Audit, Ledger, PromptPlace
from schemas.environments import EnvSnapshot
from schemas.prompts import Prompt
from schemas.samples import Sample, SampleOutcome
from schemas.turns import TurnRequest, TurnResult
from topics.bus import Envelope, Reader
from topics.catalog import COMPLETED, OUTCOMES, PROMPTS, REQUESTED, SAMPLES, SNAPSHOTS
from topics.errors import BusError, TopicMissing
from topics.log import read_topics
from topics.settings import BusSettings

CLIENT = "rose-audit"

PASSED_IN_ORDER = (COMPLETED, REQUESTED, SNAPSHOTS, SAMPLES, OUTCOMES, PROMPTS)
"""A turn's records mean that a snapshot was written, a tombstone that a sample was, an outcome that a prompt was."""


def audit_log(settings: BusSettings) -> Audit:
    """What became of every trajectory, from the log alone. Raises TopicMissing or BusError."""
    ledger = Ledger()
    for topic in PASSED_IN_ORDER:
        for envelope in read_topics(settings, [topic], client_id=CLIENT):
            _fold(ledger, envelope)
    for place in _dead_prompts(settings):
        ledger.dead_prompt(place)
    return ledger.audit(prompts_expired=_prompts_expired(settings))


def _fold(ledger: Ledger, envelope: Envelope) -> None:
    match envelope.record:
        case TurnRequest() | TurnResult() as record:
            ledger.turn(record)
        case EnvSnapshot() as record:
            ledger.snapshot(record.trajectory_id, record)
        case None if envelope.topic is SNAPSHOTS:
            ledger.snapshot(envelope.key, None)
        case Sample() as record:
            ledger.sample(record)
        case SampleOutcome() as record:
            ledger.outcome(record)
        case Prompt() as record:
            ledger.prompt(record, place=(envelope.partition, envelope.offset))


def _prompts_expired(settings: BusSettings) -> bool:
    reader = Reader(settings, CLIENT, group="audit")
    try:
        return any(reader.watermarks((PROMPTS, part))[0] > 0 for part in range(reader.partitions(PROMPTS)))
    finally:
        reader.close()


def _dead_prompts(settings: BusSettings) -> Iterator[PromptPlace]:
    """Where the dead-lettered prompts lay."""
    name = f"{settings.namespace}{PROMPTS.dead_letters}"
    consumer = Consumer({**settings.consumer(CLIENT, "audit"), "enable.partition.eof": True})
    try:
        consumer.assign([TopicPartition(name, 0, OFFSET_BEGINNING)])
        while True:
            message = consumer.poll(1.0)
            if message is None:
                continue
            error = message.error()
            if error is None:
                headers = dict(message.headers() or ())
                yield int(headers["partition"] or b""), int(headers["offset"] or b"")
            elif error.code() == KafkaError._PARTITION_EOF:
                return
            elif error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_PARTITION):
                raise TopicMissing(name)
            elif not error.retriable():
                raise BusError(f"reading {name}", error)
    finally:
        consumer.close()
