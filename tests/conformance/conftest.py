"""The broker namespace of one conformance test."""

import pytest

from tests.conformance import bus_driver
from tests.conformance.bus_driver import Cluster
from tests.support.brokers import EMBEDDED, AnyBroker


@pytest.fixture
def cluster(broker: AnyBroker, namespace: str) -> Cluster:
    return Cluster(broker.bootstrap, namespace)


@pytest.fixture(autouse=True)
def _known_faults_are_not_waited_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("embedded_fault") and request.getfixturevalue("broker_kind") == EMBEDDED:
        monkeypatch.setattr(bus_driver, "WAIT_SECONDS", bus_driver.FAULT_SECONDS)
