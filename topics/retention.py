"""Deletes records that are not needed any more, from topics whose records time alone does not delete.

Keeps true: needed records stay, and so do records younger than a given age. The age is the difference of a record's
timestamp to the newest timestamp, so a clock of this machine that is ahead deletes nothing too soon.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from rose.topics.admin import ADMIN_SECONDS, connect
from rose.topics.errors import BusError
from rose.topics.reader import Reader
from rose.topics.records import Place
from rose.topics.settings import BusSettings


def lowest_committed(
    settings: BusSettings, groups: str, places: Sequence[Place], *, client_id: str
) -> dict[Place, int]:
    """The lowest committed offset of each partition, over all consumer groups whose names begin with `groups`.

    Partitions without a committed offset are left out. Raises BrokerUnreachable, TopicMissing or BusError.
    """
    admin = connect(settings)  # kept in a variable, because the client must live until its request is answered
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
            try:
                deleted.result()
            except KafkaException as error:
                right = f"Delete on topic {partition.topic}"
                raise BusError("deleting what nobody needs any more", error.args[0], right) from error
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
