"""The reference of the topics, from the catalog and from the rights of the roles."""

from rose.pipeline.config.field_docs import class_docstring
from rose.pipeline.observability.reference.pages import Page, code, page, table
from rose.topics.acl import ROLES
from rose.topics.catalog import (
    DAY,
    DEAD_LETTERS,
    DEFAULT_RETENTION,
    HOUR,
    MINUTE,
    RECORD_TOPICS,
    Partitions,
    PartitionSetting,
    Topic,
)

INTRODUCTION = """ROSE has one topic for each kind of record. `rose topics create` creates the topics;
`rose topics check` compares a broker with this page. `broker.namespace` is put before every name.

The fields of the records are in [asyncapi.json](../asyncapi.json), which `rose topics asyncapi` prints.

- In a key, `{field}` is the value of that field, and `[a|b]` is one of these texts or none.
- The number of partitions is a setting of the section `topics`; the number in brackets is its default.
- Producers and consumers are the roles of `rose topics acl`. `executor` stands for lenders too, `view` for the commands
  that only read, and `operator` for the commands that change a run."""

DELETED = "until its readers need the record no more"
"""Retention of topics from which time deletes nothing."""

UNITS = ((DAY, "day"), (HOUR, "hour"), (MINUTE, "minute"))


def as_markdown() -> str:
    """Return the page of the topics."""
    return page(Page.TOPICS, INTRODUCTION, (_records(), _settings(), _dead_letters()))


def _records() -> str:
    rows = [
        [code(topic.name), _record(topic), code(topic.key), _roles(topic, "writes"), _roles(topic, "reads")]
        for topic in RECORD_TOPICS
    ]
    return f"## Records\n\n{table(('topic', 'record', 'key', 'producers', 'consumers'), rows)}"


def _settings() -> str:
    rows = [
        [code(topic.name), _partitions(topic), code(topic.config["cleanup.policy"]), _retention(topic)]
        for topic in RECORD_TOPICS
    ]
    return f"## Settings\n\n{table(('topic', 'partitions', 'cleanup policy', 'retention'), rows)}"


def _dead_letters() -> str:
    first = DEAD_LETTERS[0]
    return (
        "## Dead letter queues\n\n"
        "Every topic `TOPIC` has a dead letter queue `TOPIC.dlq`. A dead letter is the message as it came, with the "
        "reason and the origin in headers. The settings of all dead letter queues are the same:\n\n"
        + table(
            ("key", "partitions", "cleanup policy", "retention"),
            [[code(first.key), _partitions(first), code(first.config["cleanup.policy"]), _retention(first)]],
        )
    )


def _record(topic: Topic) -> str:
    assert topic.record is not None, "only a dead letter queue has no record"
    summary = class_docstring(topic.record).partition("\n\n")[0]
    return f"{code(topic.record.__name__)}: {' '.join(summary.split())}"


def _roles(topic: Topic, use: str) -> str:
    return ", ".join(name for name, role in ROLES.items() if topic in getattr(role, use))


def _partitions(topic: Topic) -> str:
    setting = topic.partition_setting
    count = Partitions().count_of(setting)
    return str(count) if setting is PartitionSetting.ONE else f"{code(f'topics.{setting.value}')} ({count})"


def _retention(topic: Topic) -> str:
    config = topic.config_with(DEFAULT_RETENTION)
    milliseconds = int(config.get("retention.ms", "-1"))
    if "compact" in config["cleanup.policy"] and milliseconds < 0:
        return "the newest record of each key"
    if milliseconds < 0:
        return DELETED
    size, name = next((size, name) for size, name in UNITS if milliseconds % size == 0)
    count = milliseconds // size
    return f"{count} {name}{'s' if count > 1 else ''}"
