"""The audit of a log: the ledger's fold over what the broker keeps.

Keeps true
- It reads and writes nothing else: no program's memory, no committed offset.
- A run in progress is not accused. Topics are read in the order in which a trajectory passes them, prompts after all of
  them: what happens meanwhile can move a trajectory on, never make it look lost or unasked.
"""

from pipeline.accounting.ledger import Audit, Ledger
from schemas.environments import EnvSnapshot
from schemas.prompts import Prompt
from schemas.samples import Sample, SampleOutcome
from schemas.turns import TurnRequest, TurnResult
from topics.catalog import COMPLETED, OUTCOMES, PROMPTS, REQUESTED, SAMPLES, SNAPSHOTS
from topics.letters import read_letters
from topics.log import read_topics
from topics.reader import Reader
from topics.records import Envelope
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
    for letter in read_letters(settings, PROMPTS, client_id=CLIENT):
        ledger.dead_prompt((letter.partition, letter.offset))
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
