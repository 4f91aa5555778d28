"""Fixtures for environment workers on a broker: prompts, their undisturbed samples, and views of the topics."""

from typing import Any

from confluent_kafka import ConsumerGroupState, Producer
from confluent_kafka.admin import AdminClient

from rose.schemas.arrays import unpack_tokens
from rose.schemas.progress import Group
from rose.schemas.prompts import Prompt
from rose.schemas.samples import Sample
from rose.topics.admin import connect
from rose.topics.catalog import ENVIRONMENT_GROUP, PROMPTS, Partitions, Topic
from rose.topics.catalog import GROUPS as GROUPS_TOPIC
from rose.topics.dead_letters import DeadLetter, read_dead_letters
from rose.topics.log_reader import read_whole_topics
from rose.topics.settings import BusSettings
from tests.support.scripted_executors import END, ScriptedExecutors, essence

PARTITIONS = Partitions(home=4, slots=1, samples=2, chunks=1)
GROUPS, SIZE = 12, 4


def prompt_of(number: int, **fields: Any) -> Prompt:
    known = {"group_id": f"g{number}", "group_size": SIZE, "environment": "calculator", "seed": number, "max_turns": 10}
    return Prompt(**{**known, **fields})


def submit_all(executors: ScriptedExecutors) -> None:
    for number in range(GROUPS):
        executors.submit(prompt_of(number))


def finish(executors: ScriptedExecutors, count: int = GROUPS * SIZE) -> None:
    executors.pump_until(lambda: len(executors.samples) >= count, what=f"{count} samples")


def once(executors: ScriptedExecutors) -> dict[str, Sample]:
    """Return the essence of every sample. Assert that each trajectory has one sample and that the records of a turn
    follow its end."""
    executors.pump(0.5)
    for name, samples in executors.samples.items():
        tokens = unpack_tokens(samples[0].tokens)
        for turn in samples[0].turns:
            ended = tokens[turn.end - 1] == END
            assert ended or tokens[turn.end : turn.end + 1] in ([END], []), f"turn {turn.turn} of {name} has no end"
    assert {name: len(samples) for name, samples in executors.samples.items() if len(samples) != 1} == {}
    return {name: essence(samples[0]) for name, samples in executors.samples.items()}


def settle_all(executors: ScriptedExecutors) -> None:
    """Settle every present and future sample."""
    executors.settles = True
    for samples in list(executors.samples.values()):
        executors.settle(samples[0])


def produce(
    settings: BusSettings, *values: bytes, topic: Topic = PROMPTS, partition: int = 0, key: bytes | None = None
) -> None:
    """Produce messages into a partition as any producer may."""
    producer = Producer(settings.producer("stranger"))
    for value in values:
        producer.produce(settings.topic(topic), value=value, key=key, partition=partition)
    assert producer.flush(30.0) == 0


def homes_of_members(settings: BusSettings) -> list[set[int]]:
    """Return the prompt partitions of every member of a settled consumer group."""
    client: AdminClient = connect(settings)
    name = settings.name(ENVIRONMENT_GROUP)
    group = client.describe_consumer_groups([name])[name].result()
    if group.state != ConsumerGroupState.STABLE:
        return []
    topic = settings.topic(PROMPTS)
    return [
        {place.partition for place in member.assignment.topic_partitions if place.topic == topic}
        for member in group.members
    ]


def dead_letters(settings: BusSettings) -> list[DeadLetter]:
    """Return the dead-lettered prompts, sorted by partition and offset."""
    return sorted(
        read_dead_letters(settings, PROMPTS), key=lambda dead_letter: (dead_letter.partition, dead_letter.offset)
    )


def groups(settings: BusSettings) -> dict[str, Group]:
    """Return the newest record of every group."""
    found: dict[str, Group] = {}
    for envelope in read_whole_topics(settings, [GROUPS_TOPIC]):
        assert isinstance(envelope.record, Group)
        found[envelope.key] = envelope.record
    return found
