"""Every role may start on a broker without ACLs."""

from rose.topics.acl import ROLES, connect_as
from rose.topics.admin import create_topics
from rose.topics.catalog import Partitions
from tests.support.brokers import AnyBroker


def test_every_role_may_start_on_a_broker_without_acls(broker: AnyBroker, namespace: str) -> None:
    settings = broker.settings(namespace)
    for role in ROLES.values():
        connect_as(settings, role)  # before the topics exist, because a role that needs a topic reports it as missing
    create_topics(settings, Partitions(1, 1, 1, 1))
    for role in ROLES.values():
        connect_as(settings, role)
