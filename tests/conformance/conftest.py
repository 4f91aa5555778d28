"""The corner of the broker that one conformance test works in."""

import pytest

from tests.brokers import AnyBroker
from tests.conformance.kit import Cluster


@pytest.fixture
def cluster(broker: AnyBroker, namespace: str) -> Cluster:
    return Cluster(broker.bootstrap, namespace)
