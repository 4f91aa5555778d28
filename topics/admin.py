"""Topics on the broker: created from the catalog, compared with it, described.

Keeps true
- Creating is idempotent; of a topic that is there it changes nothing, but adds the inboxes that are missing: a group's
  home follows from the number of homes. It returns once every topic has its leaders.
- Durability warnings are sentences; nothing is changed. What a broker does not answer is not held against it.
- What `find_drift` finds is what the catalog asks for and the broker does not have; settings beyond the catalog's are
  the operator's own business.
"""

import logging
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from time import monotonic
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewPartitions, NewTopic, OffsetSpec

from rose.topics.catalog import (
    CATALOG,
    DAY,
    DISPATCHED,
    MAX_DEAD_LETTER_BYTES,
    MAX_MESSAGE_BYTES,
    MINUTE,
    OUTCOME_RETENTION_SECONDS,
    Partitions,
    PartitionSetting,
    Topic,
)
from rose.topics.clients import new_client
from rose.topics.errors import (
    AUTHORIZATION_CODES,
    UNAVAILABLE_CODES,
    AdvertisedElsewhere,
    AuthenticationFailed,
    BrokerUnreachable,
    BusError,
)
from rose.topics.queries import metadata_of, offset_in
from rose.topics.settings import TRANSACTION_MILLISECONDS, BusSettings

SAFE_REPLICAS = 3
"""From so many copies on, a partition should go on and lose nothing without one of them."""


def durability_warnings(settings: BusSettings, *, replication_factor: int = 1) -> list[str]:
    """What to know of this broker, a sentence each; empty when there is nothing.

    `replication_factor`: what the topics should have. Raises BrokerUnreachable or BusError.
    """
    client = connect(settings)
    metadata = metadata_of(client)
    broker = ConfigResource(ConfigResource.Type.BROKER, str(next(iter(metadata.brokers), 0)))
    refused: list[str] = []
    sentences = list(_retention_warnings(_broker_settings(client, [broker], refused).get(broker.name, {})))
    copies = {
        name: min(len(each.replicas) for each in metadata.topics[name].partitions.values())
        for name in map(settings.topic, CATALOG)
        if name in metadata.topics and metadata.topics[name].partitions
    }
    configs = _broker_settings(client, [ConfigResource(ConfigResource.Type.TOPIC, name) for name in copies], refused)
    topics_of: dict[str, list[str]] = {}
    for name, number in copies.items():
        insync = configs.get(name, {}).get("min.insync.replicas", "")
        for warning in _replica_warnings(number, int(insync) if insync.isdigit() else None, replication_factor):
            topics_of.setdefault(warning, []).append(name)
    sentences += [f"{_topic_names(names)}: {warning}" for warning, names in topics_of.items()]
    return sentences + [f"this client has no right to {right}, so what is said there is not known" for right in refused]


def _retention_warnings(broker: Mapping[str, str]) -> Iterator[str]:
    kept = broker.get("offsets.retention.minutes", "")
    needed = round(OUTCOME_RETENTION_SECONDS * 1000 / MINUTE)
    if kept.isdigit() and int(kept) < needed:
        days = int(kept) * MINUTE / DAY
        yield (
            f"offsets.retention.minutes is {kept}: a run that stands still for longer than {days:g} days forgets how "
            f"far it has read, and meets its own prompts as strangers; {needed} is as long as outcomes are kept"
        )
    limit = broker.get("transaction.max.timeout.ms", "")
    if limit.isdigit() and int(limit) < TRANSACTION_MILLISECONDS:
        yield f"transaction.max.timeout.ms is {limit}: environment workers ask for {TRANSACTION_MILLISECONDS}"


def _replica_warnings(copies: int, insync: int | None, required: int) -> Iterator[str]:
    if copies < required:
        yield f"partitions have {copies} of the {required} copies that topics.replication_factor asks for"
    if insync is not None and insync > copies:
        yield f"min.insync.replicas is {insync} and partitions have {copies} copies, so nothing can be written"
    elif insync == 1 and copies >= SAFE_REPLICAS:
        yield "min.insync.replicas is 1, so what one broker alone has acknowledged is lost with it: set 2"


def _topic_names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more topics"


def _broker_settings(
    client: AdminClient, resources: Sequence[ConfigResource], refused: list[str]
) -> dict[str, dict[str, str]]:
    """What the broker says of its settings, by the resource's name; nothing of those that it does not answer for.

    The rights that are missing are added to `refused`.
    """
    found: dict[str, dict[str, str]] = {}
    if not resources:
        return found
    for resource, future in client.describe_configs(list(resources), request_timeout=ADMIN_SECONDS).items():
        try:
            entries: Mapping[str, Any] = future.result()
            found[resource.name] = {name: entry.value for name, entry in entries.items() if entry.value is not None}
        except KafkaException as error:
            if (kind := AUTHORIZATION_CODES.get(error.args[0].code())) is not None:
                refused.append(f"DescribeConfigs on {kind}" + (f" {resource.name}" if kind == "topic" else ""))
    return found


_CONNECTION_LOST = re.compile("transport (failure|error)|[Tt]imed out|destroyed")
"""In librdkafka's words for a connection that ended while it was signing in."""

ANSWER_SECONDS = 5.0
"""How long a broker may take to answer at all."""

CONNECT_SECONDS = 2.0
"""How long one of its nodes may take to accept a connection."""

ADMIN_SECONDS = 30.0
"""How long one administrative request may take."""

LEADER_SECONDS = 60.0
"""How long a new topic may be without the leaders of its partitions."""

LEADER_POLL_SECONDS = 0.1
"""Pause between two looks at the leaders."""

_NO_LEADER_YET = (
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError._NOENT,
    KafkaError._UNKNOWN_PARTITION,
    *UNAVAILABLE_CODES,
)
"""What a broker answers in the first moments of a topic or partition; librdkafka does not count them as retriable
here."""


@dataclass(frozen=True, slots=True)
class TopicState:
    """A topic as the broker has it."""

    topic: Topic
    partitions: int
    records: int
    """Offsets kept, transaction markers and aborted records among them."""
    config: Mapping[str, str]
    """Of the settings that the catalog names."""


@dataclass(frozen=True, slots=True)
class Drift:
    """One thing in which the broker differs from the catalog."""

    topic: str
    """The name on the broker."""
    subject: str
    """`topic`, `partitions`, or the name of a setting."""
    expected: str
    actual: str
    creatable: bool = False
    """Whether `create_topics` adds what is missing."""

    def __str__(self) -> str:
        return f"{self.topic}: {self.subject} is {self.actual}, the catalog says {self.expected}"


def connect(settings: BusSettings) -> AdminClient:
    """A client of a broker that has answered, and can be reached where it says that it is.

    Raises BrokerUnreachable or NotLetIn within about ten seconds, or UsageError for settings that are none.
    """
    complaints: list[KafkaError] = []
    quiet = logging.Logger("rose.topics.admin")
    quiet.addHandler(logging.NullHandler())
    config: dict[str, Any] = {
        **settings.client("rose-admin"),
        "error_cb": complaints.append,
    }
    client = new_client(AdminClient, config, logger=quiet)
    try:
        nodes = client.list_topics(timeout=ANSWER_SECONDS).brokers
    except KafkaException as error:
        client.poll(0)
        raise _connection_error(settings.bootstrap, complaints or [error.args[0]]) from None
    own = {f"{node.host}:{node.port}": (node.host, node.port) for node in nodes.values()}
    if own and not set(own) & set(settings.bootstrap.split(",")) and not any(map(_accepts, own.values())):
        raise AdvertisedElsewhere(settings.bootstrap, list(own))
    return client


def _accepts(place: tuple[str, int]) -> bool:
    """Whether anybody takes a connection there."""
    try:
        socket.create_connection(place, CONNECT_SECONDS).close()
    except (OSError, UnicodeError, OverflowError):  # the second: no name of a host; the third: no port
        return False
    return True


def _connection_error(bootstrap: str, complaints: Sequence[KafkaError]) -> AuthenticationFailed | BrokerUnreachable:
    """Why a broker was not reached, by what the client said of its attempts."""
    distrust = next(filter(_distrusts, complaints), None)  # it may have said before that it was disconnected
    foremost = complaints[0] if distrust is None else distrust
    detail = foremost.str().partition(" (after ")[0].split(": ", 1)[-1]
    return BrokerUnreachable(bootstrap, detail) if distrust is None else AuthenticationFailed(bootstrap, detail)


def _distrusts(complaint: KafkaError) -> bool:
    """Whether one does not trust the other; a connection that breaks off amid signing in has the same code."""
    return complaint.code() in (KafkaError._AUTHENTICATION, KafkaError._SSL) and not _CONNECTION_LOST.search(
        complaint.str()
    )


def create_topics(settings: BusSettings, partitions: Partitions, *, replication_factor: int = 1) -> list[str]:
    """Create what the catalog has and the broker lacks, inboxes too; return the names of topics created.

    All are asked for: the broker's list may still have what was deleted a moment ago. All topics have their leaders
    then. Raises BrokerUnreachable or BusError.
    """
    client = connect(settings)
    existing = metadata_of(client).topics
    required = [
        NewTopic(
            settings.topic(topic),
            num_partitions=partitions.count_of(topic.partition_setting),
            replication_factor=replication_factor,
            config=expected_settings(topic),
        )
        for topic in CATALOG
    ]
    counts = {
        settings.topic(topic): len(existing[settings.topic(topic)].partitions)
        if settings.topic(topic) in existing
        else partitions.count_of(topic.partition_setting)
        for topic in CATALOG
    }
    inboxes = settings.topic(DISPATCHED)
    if counts[inboxes] < partitions.slots:
        _add_partitions(client, inboxes, partitions.slots)
        counts[inboxes] = partitions.slots
    created = []
    for name, future in client.create_topics(required, request_timeout=ADMIN_SECONDS).items():
        try:
            future.result()
            created.append(name)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise BusError(f"creating topic {name}", error.args[0], f"Create on topic {name}") from error
    _await_leaders(client, [TopicPartition(name, number) for name, count in counts.items() for number in range(count)])
    return created


def describe_topics(settings: BusSettings) -> list[TopicState]:
    """The catalog's topics that the broker has. Raises BrokerUnreachable or BusError."""
    client = connect(settings)
    existing = metadata_of(client).topics
    present = {
        topic: len(existing[settings.topic(topic)].partitions) for topic in CATALOG if settings.topic(topic) in existing
    }
    configs = _configs(client, settings, list(present))
    return [
        TopicState(topic, partitions, _records(client, settings.topic(topic), partitions), configs[topic])
        for topic, partitions in present.items()
    ]


def find_drift(settings: BusSettings, partitions: Partitions) -> list[Drift]:
    """Where the broker differs from the catalog; empty when all is as it should be.

    Raises BrokerUnreachable or BusError.
    """
    client = connect(settings)
    existing = metadata_of(client).topics
    found: list[Drift] = []
    present: list[Topic] = []
    for topic in CATALOG:
        name = settings.topic(topic)
        if name not in existing:
            found.append(Drift(name, "topic", expected="there", actual="missing", creatable=True))
            continue
        present.append(topic)
        expected, actual = partitions.count_of(topic.partition_setting), len(existing[name].partitions)
        if expected != actual:
            inboxes = topic.partition_setting is PartitionSetting.SLOTS and actual < expected
            found.append(Drift(name, "partitions", expected=str(expected), actual=str(actual), creatable=inboxes))
    for topic, config in _configs(client, settings, present).items():
        for setting, value in expected_settings(topic).items():
            if not _is_equal(value, config.get(setting)):
                found.append(
                    Drift(settings.topic(topic), setting, expected=value, actual=config.get(setting, "not set"))
                )
    return found


def expected_settings(topic: Topic) -> dict[str, str]:
    """What the broker is to have set for a topic, by Kafka's names."""
    return {**topic.config, "max.message.bytes": str(MAX_MESSAGE_BYTES if topic.record else MAX_DEAD_LETTER_BYTES)}


def _add_partitions(client: AdminClient, name: str, count: int) -> None:
    """Have the topic have so many. Raises BusError."""
    for future in client.create_partitions([NewPartitions(name, count)], request_timeout=ADMIN_SECONDS).values():
        try:
            future.result()
        except KafkaException as error:
            raise BusError(f"adding partitions to {name}", error.args[0], f"Alter on topic {name}") from error


def _is_equal(expected: str, actual: str | None) -> bool:
    """Equal as a set of words (`compact,delete`) or as a number (`0.2`, `0.20`)."""
    if actual is None:
        return False
    try:
        return float(expected) == float(actual)
    except ValueError:
        return {word.strip() for word in expected.split(",")} == {word.strip() for word in actual.split(",")}


def _configs(client: AdminClient, settings: BusSettings, topics: Sequence[Topic]) -> dict[Topic, dict[str, str]]:
    if not topics:
        return {}
    resources = {ConfigResource(ConfigResource.Type.TOPIC, settings.topic(topic)): topic for topic in topics}
    futures: dict[ConfigResource, Future[Any]] = client.describe_configs(list(resources), request_timeout=ADMIN_SECONDS)
    configs: dict[Topic, dict[str, str]] = {}
    for resource, future in futures.items():
        topic = resources[resource]
        try:
            entries = future.result()
        except KafkaException as error:
            right = f"DescribeConfigs on topic {resource.name}"
            raise BusError(f"describing topic {resource.name}", error.args[0], right) from error
        configs[topic] = {key: entries[key].value for key in expected_settings(topic) if key in entries}
    return configs


def _records(client: AdminClient, name: str, partitions: int) -> int:
    def ends(spec: OffsetSpec) -> int:
        requests = {TopicPartition(name, partition): spec for partition in range(partitions)}
        try:
            answers = client.list_offsets(requests, request_timeout=ADMIN_SECONDS)
            return sum(offset_in(future) for future in answers.values())
        except KafkaException as error:
            raise BusError(f"reading the ends of {name}", error.args[0], f"Describe on topic {name}") from error

    return ends(OffsetSpec.latest()) - ends(OffsetSpec.earliest())


def _await_leaders(client: AdminClient, places: Sequence[TopicPartition]) -> None:
    """Wait until every partition's leader answers: metadata alone names leaders that do not know of it yet."""
    deadline = monotonic() + LEADER_SECONDS
    waiting = list(places)
    while waiting:
        futures = client.list_offsets(dict.fromkeys(waiting, OffsetSpec.latest()), request_timeout=ADMIN_SECONDS)
        waiting = []
        for place, future in futures.items():
            try:
                offset_in(future)
            except KafkaException as error:
                if error.args[0].code() not in _NO_LEADER_YET or monotonic() > deadline:
                    right = f"Describe on topic {place.topic}"
                    raise BusError(f"waiting for the leader of {place.topic}", error.args[0], right) from error
                waiting.append(place)
        if waiting:
            client.poll(LEADER_POLL_SECONDS)
            metadata_of(client)  # or librdkafka goes on believing that there is no leader
