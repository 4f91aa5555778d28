"""Topics on the broker: created from the catalog, compared with it, described.

Keeps true
- Creating is idempotent; of a topic that is there it changes nothing, but adds the inboxes that are missing: a group's
  home follows from the number of homes. It returns once every topic has its leaders.
- What `drift` finds is what the catalog asks for and the broker does not have; settings beyond the catalog's are the
  operator's own business.
"""

import logging
import re
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from time import monotonic
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewPartitions, NewTopic, OffsetSpec

from topics.asking import metadata_of, offset_in
from topics.catalog import CATALOG, DISPATCHED, LETTER_BYTES, MAX_MESSAGE_BYTES, Partitions, Spread, Topic
from topics.clients import made
from topics.errors import BROKER_AWAY, AdvertisedElsewhere, BrokerUnreachable, BusError, NotLetIn
from topics.settings import BusSettings

_BROKEN_OFF = re.compile("transport (failure|error)|[Tt]imed out|destroyed")
"""In librdkafka's words for a connection that ended while it was signing in."""

REACH_SECONDS = 5.0
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
    *BROKER_AWAY,
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
    what: str
    """`topic`, `partitions`, or the name of a setting."""
    wanted: str
    found: str
    creatable: bool = False
    """Whether `create_topics` adds what is missing."""

    def __str__(self) -> str:
        return f"{self.topic}: {self.what} is {self.found}, the catalog says {self.wanted}"


def reach(settings: BusSettings) -> AdminClient:
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
    client = made(AdminClient, config, logger=quiet)
    try:
        nodes = client.list_topics(timeout=REACH_SECONDS).brokers
    except KafkaException as error:
        client.poll(0)
        raise _why_not(settings.bootstrap, complaints or [error.args[0]]) from None
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


def _why_not(bootstrap: str, complaints: Sequence[KafkaError]) -> NotLetIn | BrokerUnreachable:
    """Why a broker was not reached, by what the client said of its attempts."""
    distrust = next(filter(_distrusts, complaints), None)  # it may have said before that it was disconnected
    foremost = complaints[0] if distrust is None else distrust
    detail = foremost.str().partition(" (after ")[0].split(": ", 1)[-1]
    return BrokerUnreachable(bootstrap, detail) if distrust is None else NotLetIn(bootstrap, detail)


def _distrusts(complaint: KafkaError) -> bool:
    """Whether one does not trust the other; a connection that breaks off amid signing in has the same code."""
    return complaint.code() in (KafkaError._AUTHENTICATION, KafkaError._SSL) and not _BROKEN_OFF.search(complaint.str())


def create_topics(settings: BusSettings, partitions: Partitions, *, replication_factor: int = 1) -> list[str]:
    """Create what the catalog has and the broker lacks, inboxes too; return the names of topics created.

    All are asked for: the broker's list may still have what was deleted a moment ago. All topics have their leaders
    then. Raises BrokerUnreachable or BusError.
    """
    client = reach(settings)
    there = metadata_of(client).topics
    wanted = [
        NewTopic(
            settings.topic(topic),
            num_partitions=partitions.of(topic.spread),
            replication_factor=replication_factor,
            config=wanted_settings(topic),
        )
        for topic in CATALOG
    ]
    counts = {
        settings.topic(topic): len(there[settings.topic(topic)].partitions)
        if settings.topic(topic) in there
        else partitions.of(topic.spread)
        for topic in CATALOG
    }
    inboxes = settings.topic(DISPATCHED)
    if counts[inboxes] < partitions.slots:
        _add_partitions(client, inboxes, partitions.slots)
        counts[inboxes] = partitions.slots
    created = []
    for name, future in client.create_topics(wanted, request_timeout=ADMIN_SECONDS).items():
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
    client = reach(settings)
    there = metadata_of(client).topics
    present = {
        topic: len(there[settings.topic(topic)].partitions) for topic in CATALOG if settings.topic(topic) in there
    }
    configs = _configs(client, settings, list(present))
    return [
        TopicState(topic, partitions, _records(client, settings.topic(topic), partitions), configs[topic])
        for topic, partitions in present.items()
    ]


def drift(settings: BusSettings, partitions: Partitions) -> list[Drift]:
    """Where the broker differs from the catalog; empty when all is as it should be.

    Raises BrokerUnreachable or BusError.
    """
    client = reach(settings)
    there = metadata_of(client).topics
    found: list[Drift] = []
    present: list[Topic] = []
    for topic in CATALOG:
        name = settings.topic(topic)
        if name not in there:
            found.append(Drift(name, "topic", wanted="there", found="missing", creatable=True))
            continue
        present.append(topic)
        wanted, has = partitions.of(topic.spread), len(there[name].partitions)
        if wanted != has:
            inboxes = topic.spread is Spread.SLOTS and has < wanted
            found.append(Drift(name, "partitions", wanted=str(wanted), found=str(has), creatable=inboxes))
    for topic, config in _configs(client, settings, present).items():
        for setting, value in wanted_settings(topic).items():
            if not _same(value, config.get(setting)):
                found.append(Drift(settings.topic(topic), setting, wanted=value, found=config.get(setting, "not set")))
    return found


def wanted_settings(topic: Topic) -> dict[str, str]:
    """What the broker is to have set for a topic, by Kafka's names."""
    return {**topic.config, "max.message.bytes": str(MAX_MESSAGE_BYTES if topic.record else LETTER_BYTES)}


def _add_partitions(client: AdminClient, name: str, count: int) -> None:
    """Have the topic have so many. Raises BusError."""
    for future in client.create_partitions([NewPartitions(name, count)], request_timeout=ADMIN_SECONDS).values():
        try:
            future.result()
        except KafkaException as error:
            raise BusError(f"adding partitions to {name}", error.args[0], f"Alter on topic {name}") from error


def _same(wanted: str, found: str | None) -> bool:
    """Equal as a set of words (`compact,delete`) or as a number (`0.2`, `0.20`)."""
    if found is None:
        return False
    try:
        return float(wanted) == float(found)
    except ValueError:
        return {word.strip() for word in wanted.split(",")} == {word.strip() for word in found.split(",")}


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
        configs[topic] = {key: entries[key].value for key in wanted_settings(topic) if key in entries}
    return configs


def _records(client: AdminClient, name: str, partitions: int) -> int:
    def ends(spec: OffsetSpec) -> int:
        asked = {TopicPartition(name, partition): spec for partition in range(partitions)}
        try:
            answers = client.list_offsets(asked, request_timeout=ADMIN_SECONDS)
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
