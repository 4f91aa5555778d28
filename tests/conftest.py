"""Brokers as fixtures, and the faults of a broker as expected failures."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.brokers import EMBEDDED, EXTERNAL, KINDS, AnyBroker, ExternalBroker, start
from topics.embedded import Broker


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "embedded_fault(reason): what the embedded broker cannot do; passing there is a failure"
    )


@pytest.fixture(scope="session", params=KINDS)
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
def broker(broker_kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnyBroker]:
    """A broker shared by all tests of the session: take a `namespace`, never kill it."""
    if broker_kind == EXTERNAL:
        yield ExternalBroker(os.environ["ROSE_BOOTSTRAP"])
    else:
        with start(broker_kind, tmp_path_factory.mktemp(broker_kind)) as running:
            yield running


@pytest.fixture
def own_broker(broker_kind: str, tmp_path: Path) -> Iterator[Broker]:
    """A broker of this test alone, to kill and start again."""
    with start(broker_kind, tmp_path / "broker") as running:
        yield running


@pytest.fixture
def namespace() -> str:
    """What this test puts before its topics, groups and transactional ids."""
    return f"t{uuid.uuid4().hex[:12]}."
