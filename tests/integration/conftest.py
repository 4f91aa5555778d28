"""Fixtures: the command in a folder of the test, topics with a reader, and the setup of environment workers."""

import dataclasses
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rose.schemas.samples import Sample
from rose.topics.reader import Reader
from rose.topics.settings import BusSettings
from tests.support.brokers import AnyBroker
from tests.support.bus_fixtures import with_topics
from tests.support.environment_worker_fixtures import PARTITIONS, finish, once, submit_all
from tests.support.rose_command import Rose
from tests.support.scripted_executors import ScriptedExecutors, model_folder, worker_process


@pytest.fixture
def rose(broker_kind: str, tmp_path: Path) -> Rose:
    return Rose(broker_kind, tmp_path)


@pytest.fixture
def settings(broker: AnyBroker, namespace: str) -> BusSettings:
    """Settings of a broker with all topics."""
    return with_topics(broker.settings(namespace))


@pytest.fixture
def reader(settings: BusSettings) -> Iterator[Reader]:
    """A reader that reports partition ends."""
    with closing(Reader(settings, "test", group="test", report_ends=True)) as reader:
        yield reader


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a policy that a trainer can train."""
    from tests.support.trainer_fixtures import make_policy  # a slow import that few tests need

    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(model_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture
def executors(broker: AnyBroker, namespace: str) -> Iterator[ScriptedExecutors]:
    """Scripted executors. Their session timeouts are as short as Apache Kafka allows."""
    settings = broker.settings(namespace)
    quick = {**settings.properties, "session.timeout.ms": "6000"}
    running = ScriptedExecutors(dataclasses.replace(settings, properties=quick), PARTITIONS)
    yield running
    running.close()


@pytest.fixture(scope="session")
def undisturbed(broker: AnyBroker, model: str) -> dict[str, Sample]:
    """The samples of the prompts in a run without faults."""
    executors = ScriptedExecutors(broker.settings(f"undisturbed{random.getrandbits(32)}."), PARTITIONS)
    submit_all(executors)
    with worker_process(executors.settings, 0, {"model_folder": model}):
        finish(executors)
    samples = once(executors)
    executors.close()
    return samples
