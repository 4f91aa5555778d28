"""Where nobody is refused anything, a role is told so."""

from rose.topics.acl import ROLES, connect_as
from rose.topics.admin import create_topics
from rose.topics.catalog import Partitions
from tests.support.brokers import AnyBroker


def test_every_role_may_start_on_a_broker_without_acls(broker: AnyBroker, namespace: str) -> None:
    settings = broker.settings(namespace)
    for role in ROLES.values():
        connect_as(settings, role)  # also before there are topics: whoever needs one says that it is missing
    create_topics(settings, Partitions(1, 1, 1, 1))
    for role in ROLES.values():
        connect_as(settings, role)
