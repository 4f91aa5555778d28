"""Brokers as fixtures, and the faults of a broker as expected failures."""

import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from rose.pipeline.local.fork_server import ForkServer
from rose.topics.local_broker import Broker
from tests.support import roles
from tests.support.brokers import EMBEDDED, EXTERNAL, KAFKA, KINDS, AnyBroker, ExternalBroker, clear, start, start_nodes
from tests.support.forked_processes import Forks
from tests.support.jvm_cache import JvmClassArchive
from tests.support.kafka_cluster import Cluster

LONGEST = (
    "chaos/test_lending.py",
    "deploy/test_images.py",
    "integration/test_lender.py",
    "integration/test_lender_ranks.py",
    "upgrade/test_rolling.py",
    "integration/test_least_privilege.py",
)
"""Test files that take more than five minutes each. They run first, so that no long file starts last."""

FORKED = "forked"
FORKS = pytest.StashKey[Forks]()
"""Fork source of the test processes. Only the xdist controller has one."""

SHARED = pytest.StashKey[Broker]()
"""The Apache Kafka node that all test processes share. Only the xdist controller has one. A start of a node costs as
much as ten tests."""

ARCHIVE = pytest.StashKey[JvmClassArchive]()
"""JVM class archive that every Apache Kafka node of the tests reads at its start."""


for name in ("pipeline", "schemas", "topics", "workers"):
    sys.modules[name] = None  # type: ignore[assignment]  # the root is on the path: `rose.topics` is the only name


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        roles.place_of_forks = config.workerinput[FORKED]
    elif config.getoption("tx", None):
        if config.option.markexpr != "not slow" and KAFKA in KINDS and os.environ.get("KAFKA_HOME"):
            config.stash[ARCHIVE] = JvmClassArchive(Path(tempfile.mkdtemp(prefix="rose-tests-classes-")))
        archived = config.stash[ARCHIVE].environment if ARCHIVE in config.stash else {}
        config.stash[FORKS] = Forks(config.args, archived)
        config.option.tx = [config.stash[FORKS].gateway] * len(config.option.tx)
    hypothesis.settings.register_profile("rose", deadline=None)  # benchmarks measure the time
    hypothesis.settings.load_profile("rose")
    config.addinivalue_line(
        "markers", "embedded_fault(reason): what the embedded broker cannot do; passing there is a failure"
    )


def pytest_configure_node(node: Any) -> None:
    """Pass the shared broker and the fork source to a new test process."""
    config: pytest.Config = node.config
    node.workerinput[FORKED] = config.stash[FORKS].place
    if ARCHIVE not in config.stash:
        return
    if SHARED not in config.stash:
        config.stash[ARCHIVE].write()
        os.environ |= config.stash[ARCHIVE].environment
        config.stash[SHARED] = start(KAFKA, Path(tempfile.mkdtemp(prefix="rose-tests-kafka-")))
    node.workerinput[KAFKA] = config.stash[SHARED].bootstrap


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark every long test as slow, so that `-m "not slow"` selects no long test."""
    if item.get_closest_marker("long") is not None:
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)  # pytest has already ordered the items by broker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first."""
    places = {Path(__file__).parent / each: place for place, each in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(LONGEST)))


def pytest_unconfigure(config: pytest.Config) -> None:
    if FORKS in config.stash:
        config.stash[FORKS].close()
    if SHARED in config.stash:
        config.stash[SHARED].stop()
        shutil.rmtree(config.stash[SHARED].data_folder)
    if ARCHIVE in config.stash:
        shutil.rmtree(config.stash[ARCHIVE].folder)


@pytest.fixture(scope="session", params=[pytest.param(k, marks=pytest.mark.slow) if k == KAFKA else k for k in KINDS])
def broker_kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture(autouse=True)
def _known_faults(request: pytest.FixtureRequest) -> None:
    """Expect the failure of a test that is marked with a fault of the broker it runs on."""
    fault = request.node.get_closest_marker("embedded_fault")
    if fault is not None and request.getfixturevalue("broker_kind") == EMBEDDED:
        request.applymarker(pytest.mark.xfail(reason=fault.args[0], strict=True, **fault.kwargs))


@pytest.fixture(scope="session")
def brokers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], AnyBroker]]:
    """Start a broker of each kind at its first use, and stop all brokers at the end."""
    shared: dict[str, str] = getattr(request.config, "workerinput", {})
    with ExitStack() as running:

        @cache
        def broker_of(kind: str) -> AnyBroker:
            if kind == EXTERNAL:
                return ExternalBroker(os.environ["ROSE_BOOTSTRAP"])
            if kind in shared:
                return ExternalBroker(shared[kind])
            return running.enter_context(start(kind, tmp_path_factory.mktemp(kind)))

        yield broker_of


@pytest.fixture(scope="session")
def broker(broker_kind: str, brokers: Callable[[str], AnyBroker]) -> AnyBroker:
    """A broker that all tests of the session share. A test takes a `namespace` and never kills this broker."""
    return brokers(broker_kind)


@pytest.fixture
def own_broker(broker_kind: str, tmp_path: Path) -> Iterator[Broker]:
    """A broker for one test, which the test may kill and restart."""
    with start(broker_kind, tmp_path / "broker") as running:
        yield running


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes of Apache Kafka that the tests of a file share. A test that kills a node restarts the node.

    Mark its tests `slow`, and create topics with `replication_factor=3`.
    """
    with start_nodes(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(scope="session")
def fork_server() -> ForkServer:
    """A fork server for roles. Modules are imported once."""
    return roles.fork_server()


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> Iterator[str]:
    """Prefix of the topics, groups and transactional ids of one test.

    Topics on the shared broker are deleted at the end, because the embedded broker writes all its data once a second.
    """
    broker = request.getfixturevalue("broker") if "broker" in request.fixturenames else None
    namespace = f"t{uuid.uuid4().hex[:12]}."
    yield namespace
    if broker is not None:
        clear(broker, namespace)
