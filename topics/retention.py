"""Deleting what nobody needs any more: the other half of topics that time alone does not delete from.

Keeps true: what is needed stays, and so does what is younger than the age given. The age is told by the stamps of the
records, against the newest of them: a clock of this machine that is ahead deletes nothing too soon.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from rose.topics.admin import ADMIN_SECONDS, connect
from rose.topics.catalog import RETENTION_SECONDS
from rose.topics.errors import BusError
from rose.topics.reader import Reader
from rose.topics.records import Place
from rose.topics.settings import BusSettings


def lowest_committed(
    settings: BusSettings, groups: str, places: Sequence[Place], *, client_id: str
) -> dict[Place, int]:
    """How far every consumer group has read whose name begins like this: the lowest offset of each partition.

    Partitions of which none has committed an offset are left out. Raises BrokerUnreachable, TopicMissing or BusError.
    """
    admin = connect(settings)  # to be held while it is asked
    try:
        listed = admin.list_consumer_groups(request_timeout=ADMIN_SECONDS).result(ADMIN_SECONDS)
    except KafkaException as error:
        raise BusError("listing consumer groups", error.args[0]) from error
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


def delete_before(
    settings: BusSettings, needed: Mapping[Place, int], *, keep_seconds: float = RETENTION_SECONDS, client_id: str
) -> dict[Place, int]:
    """Delete what lies before the offset that is needed of each partition and is older than `keep_seconds`.

    Returns the offset at which each partition begins now, where something was deleted. Raises BrokerUnreachable,
    TopicMissing or BusError.
    """
    places = list(needed)
    admin = connect(settings)
    now = min([time.time(), *_latest_timestamps(admin, settings, places)])
    with closing(Reader(settings, client_id)) as reader:
        aged = reader.offsets_at(places, now - keep_seconds)
        begins = {place: low for place, (low, _) in reader.all_watermarks(places).items()}
    before = {place: min(offset, aged[place]) for place, offset in needed.items()}
    before = {place: offset for place, offset in before.items() if offset > begins[place]}
    if before:
        requests = [TopicPartition(settings.topic(topic), part, offset) for (topic, part), offset in before.items()]
        for partition, deleted in admin.delete_records(requests).items():
            try:
                deleted.result()
            except KafkaException as error:
                right = f"Delete on topic {partition.topic}"
                raise BusError("deleting what nobody needs any more", error.args[0], right) from error
    return before


def _latest_timestamps(admin: AdminClient, settings: BusSettings, places: Sequence[Place]) -> list[float]:
    """A moment after the newest stamp in these partitions, unix seconds; none where no broker tells of one."""
    requests = {TopicPartition(settings.topic(topic), part): OffsetSpec.max_timestamp() for topic, part in places}
    stamps = []
    for answer in admin.list_offsets(requests, request_timeout=ADMIN_SECONDS).values():
        with suppress(KafkaException):  # one that does not know the question
            stamps.append(answer.result().timestamp / 1000)
    return [max(stamps) + 1.0] if stamps and max(stamps) > 0 else []
