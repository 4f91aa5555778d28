"""Topics on the broker: created from the catalog, compared with it, described, and cleared of unneeded records.

Keeps true
- `create_topics` is idempotent. It does not change a topic that exists, except that it adds missing inboxes: the number
  of home partitions decides a group's home, so it must not change. It returns once every partition has a leader.
- `durability_warnings` returns sentences and changes nothing. A setting that a broker does not report causes none.
- `find_drift` reports where the broker differs from the catalog. Settings that the catalog does not name belong to the
  operator.
- `delete_before` deletes from topics whose records time alone does not delete. Needed records stay, and so do records
  younger than the topic's retention. The age of a record is the difference of its timestamp to the newest timestamp, so
  a clock of this machine that is ahead deletes nothing too soon.
"""

import logging
import math
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewPartitions, NewTopic, OffsetSpec

from rose.topics.catalog import (
    CATALOG,
    DAY,
    DISPATCHED,
    MINUTE,
    Partitions,
    PartitionSetting,
    Retention,
    Topic,
)
from rose.topics.errors import (
    AUTHORIZATION_CODES,
    TRANSIENT_CODES,
    UNKNOWN_PARTITION_CODES,
    AdvertisedElsewhere,
    AuthenticationFailed,
    BrokerUnreachable,
    BusError,
    bus_errors,
)
from rose.topics.queries import metadata_of, offset_in
from rose.topics.reader import Reader
from rose.topics.records import Place
from rose.topics.settings import TRANSACTION_MILLISECONDS, BusSettings, new_client

SAFE_REPLICAS = 3
"""Number of replicas from which on a partition should survive the loss of one replica."""


def durability_warnings(settings: BusSettings, *, replication_factor: int = 1) -> list[str]:
    """Warnings about settings of the broker and its topics that risk records, a sentence each.

    `replication_factor`: the replicas that the topics should have. Raises BrokerUnreachable or BusError.
    """
    client = connect(settings)
    metadata = metadata_of(client)
    broker = ConfigResource(ConfigResource.Type.BROKER, str(next(iter(metadata.brokers), 0)))
    refused: list[str] = []
    sentences = list(
        _retention_warnings(_broker_settings(client, [broker], refused).get(broker.name, {}), settings.retention)
    )
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
    for warning, names in topics_of.items():
        more = f" and {len(names) - 1} more topics" if len(names) > 1 else ""
        sentences.append(f"{names[0]}{more}: {warning}")
    return sentences + [f"this client has no right to {right}, so the settings there are unknown" for right in refused]


def _retention_warnings(broker: Mapping[str, str], retention: Retention) -> Iterator[str]:
    kept = broker.get("offsets.retention.minutes", "")
    needed = math.ceil(retention.outcomes * 1000 / MINUTE)
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


def _broker_settings(
    client: AdminClient, resources: Sequence[ConfigResource], refused: list[str]
) -> dict[str, dict[str, str]]:
    """The settings of each resource by its name, without resources for which the broker does not answer.

    Missing rights are appended to `refused`.
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
"""Matches librdkafka's messages about a connection that ended during authentication."""

ANSWER_SECONDS = 5.0
"""How long a broker may take to answer at all."""

CONNECT_SECONDS = 2.0
"""How long a node may take to accept a connection."""

ADMIN_SECONDS = 30.0
"""How long one administrative request may take."""

LEADER_SECONDS = 60.0
"""How long a new topic may be without the leaders of its partitions."""

LEADER_POLL_SECONDS = 0.1
"""Pause between two checks of the leaders."""

_NO_LEADER_YET = (
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError._NOENT,
    *UNKNOWN_PARTITION_CODES,
    *TRANSIENT_CODES,
)
"""Errors shortly after the creation of a topic or partition. librdkafka does not mark them as retriable here."""


@dataclass(frozen=True, slots=True)
class TopicState:
    """Partitions, records and settings of a topic on the broker."""

    topic: Topic
    partitions: int
    records: int
    """Number of offsets that are kept, including transaction markers and aborted records."""
    config: Mapping[str, str]
    """Values of the settings that the catalog names."""


@dataclass(frozen=True, slots=True)
class Drift:
    """One difference between the broker and the catalog."""

    topic: str
    """The name on the broker."""
    subject: str
    """`topic`, `partitions`, or the name of a setting."""
    expected: str
    actual: str
    creatable: bool = False
    """Whether `create_topics` removes the difference."""

    def __str__(self) -> str:
        return f"{self.topic}: {self.subject} is {self.actual}, the catalog says {self.expected}"


def connect(settings: BusSettings) -> AdminClient:
    """An admin client of a broker that has answered and can be reached at an address that it advertises.

    Raises BrokerUnreachable or AuthenticationFailed within about ten seconds, or UsageError for invalid settings.
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
    """Whether a connection to this host and port is accepted."""
    try:
        socket.create_connection(place, CONNECT_SECONDS).close()
    except (OSError, UnicodeError, OverflowError):  # UnicodeError: invalid host name; OverflowError: invalid port
        return False
    return True


def _connection_error(bootstrap: str, complaints: Sequence[KafkaError]) -> AuthenticationFailed | BrokerUnreachable:
    """The error for a broker that was not reached, from the client's errors during its attempts."""
    distrust = next(filter(_distrusts, complaints), None)  # an error about a lost connection may come first
    foremost = complaints[0] if distrust is None else distrust
    detail = foremost.str().partition(" (after ")[0].split(": ", 1)[-1]
    return BrokerUnreachable(bootstrap, detail) if distrust is None else AuthenticationFailed(bootstrap, detail)


def _distrusts(complaint: KafkaError) -> bool:
    """Whether authentication failed. A connection that breaks off during authentication has the same error code."""
    return complaint.code() in (KafkaError._AUTHENTICATION, KafkaError._SSL) and not _CONNECTION_LOST.search(
        complaint.str()
    )


def create_topics(settings: BusSettings, partitions: Partitions, *, replication_factor: int = 1) -> list[str]:
    """Create the catalog's topics and inboxes that the broker lacks; return the names of the created topics.

    Creation is requested for all topics, because the broker's list may still have a topic that was just deleted. On
    return all partitions have leaders. Raises BrokerUnreachable or BusError.
    """
    client = connect(settings)
    existing = metadata_of(client).topics
    required = [
        NewTopic(
            settings.topic(topic),
            num_partitions=partitions.count_of(topic.partition_setting),
            replication_factor=replication_factor,
            config=expected_settings(topic, settings.retention),
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
    """State of the catalog's topics that exist on the broker. Raises BrokerUnreachable or BusError."""
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
    """Differences between the broker and the catalog. Raises BrokerUnreachable or BusError."""
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
        for setting, value in expected_settings(topic, settings.retention).items():
            if not _is_equal(value, config.get(setting)):
                found.append(
                    Drift(settings.topic(topic), setting, expected=value, actual=config.get(setting, "not set"))
                )
    return found


def remaining_drift(settings: BusSettings, partitions: Partitions, created: Sequence[str]) -> list[str]:
    """Lines for a user about the differences that `create_topics` has left; none if there is no difference.

    `created`: the topics that it has just created. Raises BrokerUnreachable or BusError.
    """
    differs = [f"not changed: {each}" for each in find_drift(settings, partitions) if each.topic not in created]
    return [*differs, "`rose topics check` says what to do about these topics"] if differs else []


def expected_settings(topic: Topic, retention: Retention) -> dict[str, str]:
    """The settings that a topic shall have on the broker, by Kafka's names."""
    return {
        **topic.config_with(retention),
        "max.message.bytes": str(topic.message_bytes),
    }


def _add_partitions(client: AdminClient, name: str, count: int) -> None:
    """Increase a topic's partitions to `count`. Raises BusError."""
    for future in client.create_partitions([NewPartitions(name, count)], request_timeout=ADMIN_SECONDS).values():
        with bus_errors(f"adding partitions to {name}", f"Alter on topic {name}"):
            future.result()


def _is_equal(expected: str, actual: str | None) -> bool:
    """Whether two values are equal as a set of words (`compact,delete`) or as a number (`0.2`, `0.20`)."""
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
        with bus_errors(f"describing topic {resource.name}", f"DescribeConfigs on topic {resource.name}"):
            entries = future.result()
        configs[topic] = {
            key: entries[key].value for key in expected_settings(topic, settings.retention) if key in entries
        }
    return configs


def _records(client: AdminClient, name: str, partitions: int) -> int:
    def ends(spec: OffsetSpec) -> int:
        requests = {TopicPartition(name, partition): spec for partition in range(partitions)}
        with bus_errors(f"reading the ends of {name}", f"Describe on topic {name}"):
            return sum(map(offset_in, client.list_offsets(requests, request_timeout=ADMIN_SECONDS).values()))

    return ends(OffsetSpec.latest()) - ends(OffsetSpec.earliest())


def _await_leaders(client: AdminClient, places: Sequence[TopicPartition]) -> None:
    """Wait until every partition's leader answers. The metadata may name a leader that does not know the partition yet.

    Raises BusError for an error that is not transient, or after LEADER_SECONDS.
    """
    deadline = time.monotonic() + LEADER_SECONDS
    waiting = list(places)
    while waiting:
        futures = client.list_offsets(dict.fromkeys(waiting, OffsetSpec.latest()), request_timeout=ADMIN_SECONDS)
        waiting = []
        for place, future in futures.items():
            try:
                offset_in(future)
            except KafkaException as error:
                if error.args[0].code() not in _NO_LEADER_YET or time.monotonic() > deadline:
                    right = f"Describe on topic {place.topic}"
                    raise BusError(f"waiting for the leader of {place.topic}", error.args[0], right) from error
                waiting.append(place)
        if waiting:
            client.poll(LEADER_POLL_SECONDS)
            metadata_of(client)  # otherwise librdkafka does not learn of the new leaders


def lowest_committed(
    settings: BusSettings, groups: str, places: Sequence[Place], *, client_id: str
) -> dict[Place, int]:
    """The lowest committed offset of each partition, over all consumer groups whose names begin with `groups`.

    Partitions without a committed offset are left out. Raises BrokerUnreachable, TopicMissing or BusError.
    """
    admin = connect(settings)  # kept in a variable, because the client must live until its request is answered
    try:
        with bus_errors("listing consumer groups"):
            listed = admin.list_consumer_groups(request_timeout=ADMIN_SECONDS).result(ADMIN_SECONDS)
    except TimeoutError as error:
        raise BusError("listing consumer groups", KafkaError(KafkaError._TIMED_OUT)) from error
    if listed.errors:
        raise BusError("listing consumer groups", listed.errors[0])
    lowest: dict[Place, int] = {}
    for name in sorted(group.group_id for group in listed.valid if group.group_id.startswith(settings.name(groups))):
        with closing(Reader(settings, client_id, group=name.removeprefix(settings.name("")))) as reader:
            for place, offset in reader.committed(places).items():
                if offset is not None:
                    lowest[place] = min(offset, lowest.get(place, offset))
    return lowest


def delete_before(settings: BusSettings, needed: Mapping[Place, int], *, client_id: str) -> dict[Place, int]:
    """Delete the records that are before the needed offset of their partition and older than their topic's retention.

    `needed`: the first offset that is still needed, by partition. Returns the new first offset of each partition from
    which records were deleted. Raises BrokerUnreachable, TopicMissing or BusError.
    """
    places = list(needed)
    admin = connect(settings)
    now = min([time.time(), *_latest_timestamps(admin, settings, places)])
    with closing(Reader(settings, client_id)) as reader:
        aged: dict[Place, int] = {}
        for seconds, kept in _by_retention(settings, places).items():
            aged |= reader.offsets_at(kept, now - seconds)
        begins = {place: low for place, (low, _) in reader.all_watermarks(places).items()}
    before = {place: min(offset, aged[place]) for place, offset in needed.items()}
    before = {place: offset for place, offset in before.items() if offset > begins[place]}
    if before:
        requests = [TopicPartition(settings.topic(topic), part, offset) for (topic, part), offset in before.items()]
        for partition, deleted in admin.delete_records(requests).items():
            with bus_errors("deleting records that are not needed any more", f"Delete on topic {partition.topic}"):
                deleted.result()
    return before


def _by_retention(settings: BusSettings, places: Sequence[Place]) -> dict[float, list[Place]]:
    """The places whose records are kept for the same number of seconds."""
    found: dict[float, list[Place]] = {}
    for place in places:
        setting = place[0].retention_setting
        assert setting is not None, f"{place[0].name} is compacted"
        found.setdefault(settings.retention.seconds_of(setting), []).append(place)
    return found


def _latest_timestamps(admin: AdminClient, settings: BusSettings, places: Sequence[Place]) -> list[float]:
    """A time just after the newest timestamp in these partitions, unix seconds; empty if no broker reports one."""
    requests = {TopicPartition(settings.topic(topic), part): OffsetSpec.max_timestamp() for topic, part in places}
    stamps = []
    for answer in admin.list_offsets(requests, request_timeout=ADMIN_SECONDS).values():
        with suppress(KafkaException):  # the broker does not support this query
            stamps.append(answer.result().timestamp / 1000)
    return [max(stamps) + 1.0] if stamps and max(stamps) > 0 else []
