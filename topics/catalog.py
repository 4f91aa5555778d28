"""The catalog of topics: record, key, partitions and retention of each.

Keeps true
- Topics are created from here alone, never by the broker on first use.
- The topics of the sample path (prompts, requests, results, groups, progress, snapshots) have equally many *home*
  partitions: the owner of home partition p reads all records of a trajectory, in order.
- No record that is needed is deleted because of its age: a role deletes records that may be needed for long.
- The broker stamps records when it appends them. So a writer's clock does not matter, and retention follows the clocks
  of the brokers alone.
- Cell c of C has the homes, inboxes and the partition of the heartbeats whose numbers are c modulo C; there are as many
  cells as the heartbeats have partitions.
- `rose.turns.dispatched.v1` has one partition per inbox slot; an executor reads its own by hand.
- The home of a group and the inbox slot of an executor are functions of the name alone: the partition into which
  Kafka's default partitioner puts a record with the name as its key.
"""

from dataclasses import dataclass, field
from enum import Enum

from rose.schemas.cells import CellSummary
from rose.schemas.evaluations import EvaluationResult
from rose.schemas.grants import CapacityGrant, GrantSource
from rose.schemas.heartbeats import RoleBegun, SlackHeartbeat
from rose.schemas.journal import CoreJournal
from rose.schemas.limits import MAX_RECORD_BYTES, RECORD_OVERHEAD_BYTES
from rose.schemas.progress import EnvSnapshot, Group, SettleRequest, TrajectoryProgress
from rose.schemas.prompts import Prompt
from rose.schemas.record import Record
from rose.schemas.samples import Sample, SampleOutcome
from rose.schemas.turns import FENCING_KEY, TurnDispatch, TurnRequest, TurnResult
from rose.schemas.weights import WeightChunk, WeightManifest

MESSAGE_OVERHEAD_BYTES = 48 * 1024
"""Room for keys and headers in addition to the largest record of a topic."""

MAX_MESSAGE_BYTES = MAX_RECORD_BYTES + RECORD_OVERHEAD_BYTES + MESSAGE_OVERHEAD_BYTES
"""`max.message.bytes` of topics whose records hold no whole context. Under Kafka's 1 MiB default."""

MAX_DEAD_LETTER_BYTES = MAX_MESSAGE_BYTES + 16 * 1024
"""`max.message.bytes` of the dead letter queues. They hold the beginning of a message that is larger than
MAX_MESSAGE_BYTES, and any other message whole, with the headers of a dead letter."""

MINUTE = 60_000
HOUR = 60 * MINUTE
DAY = 24 * HOUR
"""Milliseconds."""


class PartitionSetting(Enum):
    """Setting from which a topic has its number of partitions."""

    HOME = "home_partitions"
    SLOTS = "inbox_slots"
    SAMPLES = "sample_partitions"
    CHUNKS = "chunk_partitions"
    CELLS = "cells"
    ONE = "one"


@dataclass(frozen=True, slots=True)
class Partitions:
    """Number of partitions of each kind of topic. It is fixed for the life of a topic, but inboxes may be added."""

    home: int = 8
    slots: int = 32
    samples: int = 4
    chunks: int = 4
    cells: int = 1

    def count_of(self, setting: PartitionSetting) -> int:
        """Return the number of partitions that a setting gives."""
        return {
            PartitionSetting.HOME: self.home,
            PartitionSetting.SLOTS: self.slots,
            PartitionSetting.SAMPLES: self.samples,
            PartitionSetting.CHUNKS: self.chunks,
            PartitionSetting.CELLS: self.cells,
            PartitionSetting.ONE: 1,
        }[setting]


class RetentionSetting(Enum):
    """The setting for the retention of a topic."""

    PROMPTS = "prompts_retention_seconds"
    TURNS = "turns_retention_seconds"
    SAMPLES = "samples_retention_seconds"
    OUTCOMES = "outcomes_retention_seconds"
    WEIGHTS = "weights_retention_seconds"
    DISPATCHES = "dispatches_retention_seconds"
    HEARTBEATS = "heartbeats_retention_seconds"
    DEAD_LETTERS = "dead_letters_retention_seconds"


@dataclass(frozen=True, slots=True)
class Retention:
    """Retention of records in seconds, by family of topics, counted from the write of a record.

    The broker deletes outcomes, dispatches, heartbeats and dead letters by their age alone. ROSE deletes prompts,
    turns, samples and weights of this age once they are not needed any more.
    """

    prompts: float = 7 * DAY / 1000
    turns: float = 7 * DAY / 1000
    """Requests and results."""
    samples: float = 7 * DAY / 1000
    outcomes: float = 30 * DAY / 1000
    """Outcomes, and with them the groups: a second prompt of a group is met by the first meanwhile."""
    weights: float = HOUR / 1000
    """Chunks. They are written before their manifest, so a chunk may be young and not be needed yet."""
    dispatches: float = HOUR / 1000
    heartbeats: float = 10 * MINUTE / 1000
    """Heartbeats, summaries of cells, starts of roles, and journals."""
    dead_letters: float = 30 * DAY / 1000

    def seconds_of(self, setting: RetentionSetting) -> float:
        """Return the retention in seconds that this setting names."""
        return {
            RetentionSetting.PROMPTS: self.prompts,
            RetentionSetting.TURNS: self.turns,
            RetentionSetting.SAMPLES: self.samples,
            RetentionSetting.OUTCOMES: self.outcomes,
            RetentionSetting.WEIGHTS: self.weights,
            RetentionSetting.DISPATCHES: self.dispatches,
            RetentionSetting.HEARTBEATS: self.heartbeats,
            RetentionSetting.DEAD_LETTERS: self.dead_letters,
        }[setting]


DEFAULT_RETENTION = Retention()


@dataclass(frozen=True, slots=True, eq=False)
class Topic:
    """One topic. There is one object of each topic, so identity is equality."""

    name: str
    record: type[Record] | None
    """Type of the records; None for a dead letter queue, which holds the bytes of other topics."""
    key: str
    """Key of the records: `{field}` is the value of that field, and `[a|b]` is one of these texts or none."""
    partition_setting: PartitionSetting
    config: dict[str, str] = field(default_factory=dict)
    """Settings on the broker, except the settings that follow from a Retention."""
    retention_setting: RetentionSetting | None = None
    """None for a topic that is only compacted."""
    marker_keys: tuple[str, ...] = ()
    """Keys of tombstones that delete no record: their offsets have a meaning."""

    @property
    def dead_letters(self) -> str:
        """Name of the dead letter queue."""
        return f"{self.name}.dlq"

    @property
    def message_bytes(self) -> int:
        """`max.message.bytes`: the largest message of the topic."""
        if self.record is None:
            return MAX_DEAD_LETTER_BYTES
        return max(MAX_MESSAGE_BYTES, self.record.MAX_BYTES + MESSAGE_OVERHEAD_BYTES)

    @property
    def is_deleted_by_broker(self) -> bool:
        """Whether the broker deletes the records of the topic by their age alone."""
        return self.retention_setting is not None and "retention.ms" not in self.config

    def config_with(self, retention: Retention) -> dict[str, str]:
        """All settings on the broker, with this retention."""
        if self.retention_setting is None or not self.is_deleted_by_broker:
            return self.config
        milliseconds = round(1000 * retention.seconds_of(self.retention_setting))
        # A segment is deleted whole: it must close well before its records may go.
        times = {"retention.ms": str(milliseconds), "segment.ms": str(max(MINUTE, milliseconds // 8))}
        return {**self.config, **times}


_BROKER_TIMESTAMPS = {"message.timestamp.type": "LogAppendTime"}
"""Timestamps by the broker. Apache Kafka 4 refuses records whose timestamp is more than an hour ahead
(`message.timestamp.after.max.ms`), and time-based retention would delete records of a clock that is far behind."""


_BY_AGE = {**_BROKER_TIMESTAMPS, "cleanup.policy": "delete"}
"""Deleted by the broker, once as old as the topic's RetentionSetting says."""

_UNTIL_DELETED = {
    **_BROKER_TIMESTAMPS,
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "segment.ms": str(6 * HOUR),
}
"""Settings of topics whose records are kept until a role deletes them (`topics/admin.py: delete_before`)."""


def partitions_of_cell(cell: int, cells: int, partitions: int) -> range:
    """Return the numbers of the partitions, of homes or inboxes, that belong to a cell."""
    return range(cell, partitions, cells)


_COMPACTED = {
    **_BROKER_TIMESTAMPS,
    "cleanup.policy": "compact",
    "segment.ms": str(10 * MINUTE),
    "min.cleanable.dirty.ratio": "0.2",
}

_DEAD_LETTER_CONFIG = {**_BROKER_TIMESTAMPS, "cleanup.policy": "compact,delete"}
"""Settings of dead letter queues. The key is the origin, so a dead letter that was written twice is kept once."""

_GRANT_KEY = f"{{worker}}[{'|'.join(source.value for source in GrantSource if source.value)}]"
"""Key of a grant. A key that is only the worker's name is a lease of the control app."""

_VERSION_KEY = "{model_id}/{run}/{version}[/{file}]"
"""Key of a manifest. The file is the first one in the store, for an anchor in the store."""

PROMPTS = Topic(
    "rose.prompts.submitted.v1", Prompt, "{group_id}", PartitionSetting.HOME, _UNTIL_DELETED, RetentionSetting.PROMPTS
)
REQUESTED = Topic(
    "rose.turns.requested.v1",
    TurnRequest,
    "{trajectory_id}",
    PartitionSetting.HOME,
    _UNTIL_DELETED,
    RetentionSetting.TURNS,
)
DISPATCHED = Topic(
    "rose.turns.dispatched.v1",
    TurnDispatch,
    "{trajectory_id}",
    PartitionSetting.SLOTS,
    _BY_AGE,
    RetentionSetting.DISPATCHES,
    marker_keys=(FENCING_KEY, "{worker}"),
)
"""The key is the trajectory of the request. A router marks its claim of an inbox, an executor its start there."""
COMPLETED = Topic(
    "rose.turns.completed.v1",
    TurnResult,
    "{trajectory_id}",
    PartitionSetting.HOME,
    _UNTIL_DELETED,
    RetentionSetting.TURNS,
)
HEARTBEATS = Topic(
    "rose.slack.heartbeats.v1",
    SlackHeartbeat,
    "{worker}",
    PartitionSetting.CELLS,
    _BY_AGE,
    RetentionSetting.HEARTBEATS,
)
SUMMARIES = Topic(
    "rose.cells.summaries.v1", CellSummary, "{cell}", PartitionSetting.ONE, _BY_AGE, RetentionSetting.HEARTBEATS
)
GRANTS = Topic("rose.capacity.grants.v1", CapacityGrant, _GRANT_KEY, PartitionSetting.ONE, _COMPACTED)
SAMPLES = Topic(
    "rose.samples.completed.v1",
    Sample,
    "{group_id}",
    PartitionSetting.SAMPLES,
    _UNTIL_DELETED,
    RetentionSetting.SAMPLES,
)
OUTCOMES = Topic(
    "rose.samples.outcomes.v1",
    SampleOutcome,
    "{trajectory_id}",
    PartitionSetting.ONE,
    _BY_AGE,
    RetentionSetting.OUTCOMES,
)
GROUPS = Topic("rose.groups.opened.v1", Group, "{group_id}", PartitionSetting.HOME, _COMPACTED)
PROGRESS = Topic(
    "rose.trajectories.progress.v1", TrajectoryProgress, "{trajectory_id}", PartitionSetting.HOME, _COMPACTED
)
SNAPSHOTS = Topic("rose.env.snapshots.v1", EnvSnapshot, "{trajectory_id}", PartitionSetting.HOME, _COMPACTED)
SETTLES = Topic("rose.settlements.requested.v1", SettleRequest, "{trajectory_id}", PartitionSetting.ONE, _COMPACTED)
MANIFESTS = Topic("rose.weights.manifests.v1", WeightManifest, _VERSION_KEY, PartitionSetting.ONE, _COMPACTED)
ROLE_STARTS = Topic(
    "rose.roles.begun.v1", RoleBegun, "{role}", PartitionSetting.ONE, _BY_AGE, RetentionSetting.HEARTBEATS
)
JOURNAL = Topic(
    "rose.cores.journal.v1", CoreJournal, "{core}", PartitionSetting.CELLS, _BY_AGE, RetentionSetting.HEARTBEATS
)
"""A router writes into the partition of its cell, a control app into partition 0."""
CHUNKS = Topic(
    "rose.weights.chunks.v1",
    WeightChunk,
    "{tensor}",
    PartitionSetting.CHUNKS,
    _UNTIL_DELETED,
    RetentionSetting.WEIGHTS,
)

EVALUATIONS = Topic("rose.evaluations.requested.v1", Prompt, "{group_id}", PartitionSetting.ONE, _COMPACTED)
"""Prompts of evaluations, apart from those to train on: a window of training groups that is full delays none of them.
Every environment worker reads all of them; a tombstone withdraws the prompts of an evaluation that has ended."""
EVALUATION_RESULTS = Topic(
    "rose.evaluations.completed.v1",
    EvaluationResult,
    "{run}/{evaluation}/{version}",
    PartitionSetting.ONE,
    _COMPACTED,
)

RECORD_TOPICS: tuple[Topic, ...] = (
    PROMPTS,
    REQUESTED,
    DISPATCHED,
    COMPLETED,
    HEARTBEATS,
    SUMMARIES,
    GRANTS,
    SAMPLES,
    OUTCOMES,
    GROUPS,
    PROGRESS,
    SNAPSHOTS,
    SETTLES,
    MANIFESTS,
    CHUNKS,
    ROLE_STARTS,
    JOURNAL,
    EVALUATIONS,
    EVALUATION_RESULTS,
)

DEAD_LETTERS: tuple[Topic, ...] = tuple(
    Topic(
        topic.dead_letters,
        None,
        "{topic}/{partition}/{offset}",
        PartitionSetting.ONE,
        _DEAD_LETTER_CONFIG,
        RetentionSetting.DEAD_LETTERS,
    )
    for topic in RECORD_TOPICS
)
"""Dead letter queues; the key of a dead letter is its origin, which its headers name too."""

DEAD_LETTER_SOURCES = tuple(
    topic for topic in RECORD_TOPICS if topic not in (ROLE_STARTS, JOURNAL, EVALUATIONS, EVALUATION_RESULTS)
)
"""Topics whose dead letters are read. The others have none, and logs of earlier versions lack them."""

ENVIRONMENT_GROUP = "environment"
"""The consumer group of all environment workers."""

CONTROL_GROUP = "control"
"""The consumer group of the control app: one member reads the summaries and decides."""

ROUTER_GROUP = "router"
"""The consumer group of the routers, under which their low water is committed."""

TRAINER_PREFIX = "trainer-"
"""Prefix of the consumer groups and transactional ids of trainers; the name of the model follows."""

EVALUATOR_PREFIX = "evaluator-"
"""Prefix of the consumer groups and transactional ids of evaluators; the names of model and set follow."""

TRACKER_PREFIX = "tracker-"
"""Prefix of the consumer groups of `rose track`; the name of the tracker follows."""

LOG_GROUP = "log"
"""Group that a client of assigned partitions must name; it joins nothing and commits nothing."""

ENVIRONMENT_TRANSACTIONAL_PREFIX = "environment."
"""Prefix of the transactional ids of environment workers; the name of the worker follows."""

DEAD_LETTERS_TRANSACTIONAL_ID = "letters"
"""Transactional id under which dead letters are sent back."""

CATALOG: tuple[Topic, ...] = RECORD_TOPICS + DEAD_LETTERS

LARGEST_MESSAGE_BYTES = max(topic.message_bytes for topic in CATALOG)
"""The largest message of any topic."""


_MULTIPLIER = 0x5BD1E995
_SEED = 0x9747B28C
_WORD = 0xFFFFFFFF


def home_partition(group_id: str, partitions: int) -> int:
    """Return the home of a group among this number of home partitions."""
    return _partition_of(group_id, partitions)


def inbox_slot(worker: str, slots: int) -> int:
    """Return the default inbox slot of an executor among this number of slots; several executors may have the same."""
    return _partition_of(worker, slots)


def murmur2(data: bytes) -> int:
    """The 32-bit MurmurHash2 that Kafka's clients use, as an unsigned number."""
    whole = len(data) & ~3
    digest = _SEED ^ len(data)
    for at in range(0, whole, 4):
        word = int.from_bytes(data[at : at + 4], "little") * _MULTIPLIER & _WORD
        word = (word ^ word >> 24) * _MULTIPLIER & _WORD
        digest = (digest * _MULTIPLIER & _WORD) ^ word
    if tail := data[whole:]:
        digest = (digest ^ int.from_bytes(tail, "little")) * _MULTIPLIER & _WORD
    digest = (digest ^ digest >> 13) * _MULTIPLIER & _WORD
    return digest ^ digest >> 15


def _partition_of(key: str, partitions: int) -> int:
    return (murmur2(key.encode()) & 0x7FFFFFFF) % partitions
