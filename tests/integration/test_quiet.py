"""A quiet week: the offsets of every group have expired, retention has deleted records, and the run continues.

The roles run on an Apache Kafka node. An administrator's calls simulate the week.
"""

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from rose.pipeline.audit import audit_log
from rose.schemas.prompts import Prompt
from rose.topics.admin import create_topics
from rose.topics.catalog import DISPATCHED, HEARTBEATS, PROMPTS, Partitions, home_partition
from rose.topics.local_broker import Broker
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from tests.support.brokers import KAFKA, flags, start
from tests.support.storm.log_checks import read_log
from tests.support.storm.plan import Role, Worker
from tests.support.storm.roles import Roles

GROUPS, GROUP_SIZE, GROUPS_PER_STEP = 24, 4, 4
PARTITIONS = Partitions(home=2, slots=1, samples=1, chunks=1)
TRAINER = Worker(Role.TRAINER, 0)
"""The trainer is ready once it has made its first step."""
CAST = (TRAINER, *(Worker(role, 0) for role in (Role.ROUTER, Role.EXECUTOR, Role.ENVIRONMENT)))
WAIT_SECONDS = 120.0
CONFIG = f"""
[run]
name = "quiet"
folder = "@FOLDER@"
executors = 1

[topics]
home_partitions = {PARTITIONS.home}
inbox_slots = {PARTITIONS.slots}
sample_partitions = {PARTITIONS.samples}
chunk_partitions = {PARTITIONS.chunks}

[environment]
max_turn_tokens = 16
max_context_tokens = 256
window_groups = 8

[executor]
max_turns = 4
max_model_len = 256
kv_cache_bytes = 16777216

[trainer]
groups_per_step = {GROUPS_PER_STEP}
total_groups = {GROUPS}
minibatches = 1
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def until(roles: Roles, holds: Callable[[], bool]) -> None:
    """Supervise the roles until the condition holds."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "; ".join(f"{worker}: {roles.last_words(worker)}" for worker in CAST)
        roles.tick()
        time.sleep(0.2)


def run(folder: Path, broker: Broker, settings: BusSettings, until_then: Callable[[Roles], bool]) -> None:
    """Start every role, and stop all roles once the condition holds."""
    folder.mkdir()
    arguments = ("--config", str(folder.parent / "quiet.toml"), *flags(settings))
    roles = Roles(folder, arguments, broker, PARTITIONS.slots)
    try:
        for worker in CAST:
            roles.start(worker)
        until(roles, lambda: until_then(roles))
        roles.leave()
    finally:
        roles.close()


def submit(settings: BusSettings, prompts: list[Prompt]) -> None:
    """Submit prompts to their homes, so that none is forwarded."""
    writer = Writer(settings, "test")
    for prompt in prompts:
        home = home_partition(prompt.group_id, PARTITIONS.home)
        writer.write(PROMPTS, prompt, key=prompt.group_id, partition=home)
    writer.flush()


def forget(settings: BusSettings) -> None:
    """Apply the effect of a week without members and records to the broker."""
    admin = AdminClient({"bootstrap.servers": settings.bootstrap})
    deadline = time.monotonic() + WAIT_SECONDS
    for group in admin.list_consumer_groups().result().valid:
        while True:
            try:
                admin.delete_consumer_groups([group.group_id])[group.group_id].result()
                break
            except KafkaException as error:  # a member that left without notice still counts
                assert error.args[0].code() == KafkaError.NON_EMPTY_GROUP and time.monotonic() < deadline
                time.sleep(0.5)
    for topic in (DISPATCHED, HEARTBEATS):
        name = settings.topic(topic)
        known = admin.list_topics(name, timeout=WAIT_SECONDS).topics[name].partitions
        for deleted in admin.delete_records([TopicPartition(name, part, -1) for part in known]).values():
            deleted.result()


@pytest.mark.long
def test_run_continues_after_a_quiet_week(tmp_path: Path, namespace: str) -> None:
    prompts = [
        Prompt(group_id=f"g{number}", group_size=GROUP_SIZE, environment="calculator", seed=number)
        for number in range(GROUPS)
    ]
    (tmp_path / "quiet.toml").write_text(CONFIG.replace("@FOLDER@", str(tmp_path)))
    with start(KAFKA, tmp_path / "broker") as broker:
        settings = broker.settings(namespace)
        create_topics(settings, PARTITIONS)
        submit(settings, prompts)
        run(tmp_path / "before", broker, settings, lambda roles: roles.ready(TRAINER))
        before = read_log(settings)
        assert 0 < len(before.outcomes) < GROUPS * GROUP_SIZE, "the week began in mid-run"
        forget(settings)
        run(tmp_path / "after", broker, settings, lambda roles: roles.complete)
        log, audit = read_log(settings), audit_log(settings)
    requested = {f"g{number}:{index}" for number in range(GROUPS) for index in range(GROUP_SIZE)}
    assert {trajectory: len(ends) for trajectory, ends in log.outcomes.items()} == dict.fromkeys(requested, 1)
    assert "infra_failed" not in {end for ends in log.outcomes.values() for end in ends}
    assert log.samples == Counter(requested)
    assert set(log.requests.values()) == {1}, "no turn was asked for twice"
    assert not log.dead_letters
    assert audit.clean and audit.settled == len(requested)
