"""What a broker would lose or forget too soon, beyond the settings of its topics.

Keeps true: it is told in sentences, and nothing is changed. What a broker does not answer is not held against it; that
it refuses to is told.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource

from topics.admin import ADMIN_SECONDS, reach
from topics.asking import metadata_of
from topics.catalog import CATALOG, DAY, MINUTE, OUTCOMES_KEPT_SECONDS
from topics.errors import REFUSED_RIGHTS
from topics.settings import TRANSACTION_MILLISECONDS, BusSettings

SAFE_REPLICAS = 3
"""From so many copies on, a partition should go on and lose nothing without one of them."""


def weaknesses(settings: BusSettings, *, replication_factor: int = 1) -> list[str]:
    """What to know of this broker, a sentence each; empty when there is nothing.

    `replication_factor`: what the topics should have. Raises BrokerUnreachable or BusError.
    """
    client = reach(settings)
    there = metadata_of(client)
    broker = ConfigResource(ConfigResource.Type.BROKER, str(next(iter(there.brokers), 0)))
    refused: list[str] = []
    told = list(_forgets(_settings(client, [broker], refused).get(broker.name, {})))
    copies = {
        name: min(len(each.replicas) for each in there.topics[name].partitions.values())
        for name in map(settings.topic, CATALOG)
        if name in there.topics and there.topics[name].partitions
    }
    configs = _settings(client, [ConfigResource(ConfigResource.Type.TOPIC, name) for name in copies], refused)
    alike: dict[str, list[str]] = {}
    for name, number in copies.items():
        insync = configs.get(name, {}).get("min.insync.replicas", "")
        for weakness in _copies(number, int(insync) if insync.isdigit() else None, replication_factor):
            alike.setdefault(weakness, []).append(name)
    told += [f"{_who(names)}: {weakness}" for weakness, names in alike.items()]
    return told + [f"this client has no right to {right}, so what is said there is not known" for right in refused]


def _forgets(broker: Mapping[str, str]) -> Iterator[str]:
    kept = broker.get("offsets.retention.minutes", "")
    wanted = round(OUTCOMES_KEPT_SECONDS * 1000 / MINUTE)
    if kept.isdigit() and int(kept) < wanted:
        days = int(kept) * MINUTE / DAY
        yield (
            f"offsets.retention.minutes is {kept}: a run that stands still for longer than {days:g} days forgets how "
            f"far it has read, and meets its own prompts as strangers; {wanted} is as long as outcomes are kept"
        )
    longest = broker.get("transaction.max.timeout.ms", "")
    if longest.isdigit() and int(longest) < TRANSACTION_MILLISECONDS:
        yield f"transaction.max.timeout.ms is {longest}: environment workers ask for {TRANSACTION_MILLISECONDS}"


def _copies(copies: int, insync: int | None, wanted: int) -> Iterator[str]:
    if copies < wanted:
        yield f"partitions have {copies} of the {wanted} copies that topics.replication_factor asks for"
    if insync is not None and insync > copies:
        yield f"min.insync.replicas is {insync} and partitions have {copies} copies, so nothing can be written"
    elif insync == 1 and copies >= SAFE_REPLICAS:
        yield "min.insync.replicas is 1, so what one broker alone has acknowledged is lost with it: set 2"


def _who(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more topics"


def _settings(
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
            if (kind := REFUSED_RIGHTS.get(error.args[0].code())) is not None:
                refused.append(f"DescribeConfigs on {kind}" + (f" {resource.name}" if kind == "topic" else ""))
    return found
