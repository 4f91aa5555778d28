"""The audit of a log: the ledger's fold over the records that the broker keeps.

Keeps true
- The audit only reads the log: no process's memory and no committed offset. It reads no contexts: live trajectories are
  known by key, and of a sample only the trajectory id is decoded.
- A run in progress gives no false findings. Topics are read in the order in which a trajectory passes them, prompts
  last: a change during the reading can move a trajectory on, but cannot make it look lost or unasked.
- A transaction becomes visible partition by partition, so a finding counts only if a second reading repeats it.
- A dead letter requests nothing and ends nothing: it is the outcome of its message.
"""

import time
from contextlib import closing
from dataclasses import dataclass

import msgspec

from rose.pipeline.accounting.ledger import Audit, Ledger
from rose.schemas.errors import RecordError, RoseError
from rose.schemas.progress import Group
from rose.schemas.prompts import Prompt
from rose.schemas.samples import SampleOutcome
from rose.schemas.wire import decode
from rose.topics.catalog import (
    DEAD_LETTER_SOURCES,
    GROUPS,
    OUTCOMES,
    PROGRESS,
    PROMPTS,
    SAMPLES,
    Topic,
    home_partition,
)
from rose.topics.dead_letters import DeadLetterIndex, dead_lettered_places
from rose.topics.log_reader import KeyedMessage, read_keyed_messages, topic_starts
from rose.topics.reader import Reader
from rose.topics.settings import BusSettings

CLIENT = "rose-audit"

PASSED_IN_ORDER = (GROUPS, PROGRESS, SAMPLES, OUTCOMES, PROMPTS)
"""A trajectory of a group has progress, then a sample, then an outcome; each of these has, or had, a prompt."""

AGAIN_SECONDS = 1.0
"""Pause between a reading with findings and the second reading."""


class SampleName(msgspec.Struct, frozen=True):
    """The fields of a sample that the audit decodes."""

    trajectory_id: str


@dataclass(frozen=True, slots=True)
class LogAudit:
    """The audit of a log, with the extent of the log."""

    audit: Audit
    since: float | None
    """Timestamp in Unix seconds of the oldest record that was read; None if there was no record."""
    letters: dict[Topic, int]
    """Number of dead letters by topic, of the topics that have any."""


def audit_log(settings: BusSettings) -> Audit:
    """Return the audit of the log. Raises TopicMissing or BusError."""
    return inspect_log(settings).audit


def inspect_log(settings: BusSettings) -> LogAudit:
    """Return the audit of the log with its extent. Raises TopicMissing or BusError."""
    found = _read(settings)
    if not found.audit.clean:
        time.sleep(AGAIN_SECONDS)  # topics are read one after the other: records written meanwhile may appear in part
        found = _read(settings)
    return found


def _read(settings: BusSettings) -> LogAudit:
    ledger = Ledger()
    dead_samples = dead_lettered_places(settings, SAMPLES, client_id=CLIENT)
    oldest: list[float] = []
    begins = {topic: topic_starts(settings, [topic], client_id=CLIENT) for topic in PASSED_IN_ORDER}
    for topic in PASSED_IN_ORDER:
        for message in read_keyed_messages(settings, begins[topic], client_id=CLIENT):
            oldest = [min([message.timestamp_seconds, *oldest])]
            if message.topic is not SAMPLES or (message.partition, message.offset) not in dead_samples:
                _apply(ledger, message, homes=len(begins[PROMPTS]))
    letters = DeadLetterIndex(settings, *DEAD_LETTER_SOURCES, client_id=CLIENT)
    letters.read()
    for place in letters.places(PROMPTS):
        ledger.on_dead_prompt(place)
    with closing(Reader(settings, CLIENT)) as reader:
        outcomes_from = reader.watermarks((OUTCOMES, 0))[0]
    forgotten_before = time.time() - settings.retention.outcomes
    counts = {topic: count for topic in DEAD_LETTER_SOURCES if (count := letters.count(topic))}
    audit = ledger.audit(outcomes_from=outcomes_from, forgotten_before=forgotten_before)
    return LogAudit(audit, oldest[0] if oldest else None, counts)


def _apply(ledger: Ledger, message: KeyedMessage, *, homes: int) -> None:
    """Fold one message. An invalid message is skipped: it is a dead letter, or will be."""
    value = message.raw.value
    try:
        if message.topic is PROGRESS:
            ledger.on_progress(message.key, live=value is not None)
        elif message.topic is GROUPS:
            ledger.on_group(message.key, None if value is None else decode(Group, value, message.raw.headers))
        elif value is None:
            return
        elif message.topic is SAMPLES:
            ledger.on_sample(_sample_names.decode(value).trajectory_id)
        elif message.topic is OUTCOMES:
            ledger.on_outcome(decode(SampleOutcome, value, message.raw.headers))
        else:
            prompt = decode(Prompt, value, message.raw.headers)
            at_home = home_partition(prompt.group_id, homes) == message.partition
            place = message.partition, message.offset
            ledger.on_prompt(prompt.group_id, prompt.group_size, place=place, at_home=at_home)
    except (RecordError, msgspec.DecodeError):
        return


_sample_names = msgspec.msgpack.Decoder(SampleName)


class AuditFailed(RoseError):
    """The conservation law does not hold on the log."""
