"""What this client may do, as the broker says: asked for when a role starts.

Keeps true
- A right that is missing is told at the start, by name, also if it would be needed only on a bad day. A role of which
  nothing is missing but a right to UNNEEDED begins all the same, as after an upgrade from a version without that topic.
- What a broker does not say is not held against it: only a refusal is one. To create is told of by its first use: it
  may be a right to the cluster, which a topic does not speak of.
"""

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AclOperation

from topics.access import Acl, Operation, Resource, Role, topic_rights
from topics.admin import ADMIN_SECONDS, reach
from topics.catalog import BEGUN
from topics.errors import RightsMissing
from topics.settings import BusSettings

_SAID = {
    AclOperation.READ: Operation.READ,
    AclOperation.WRITE: Operation.WRITE,
    AclOperation.ALTER: Operation.ALTER,
    AclOperation.DELETE: Operation.DELETE,
    AclOperation.DESCRIBE: Operation.DESCRIBE,
    AclOperation.DESCRIBE_CONFIGS: Operation.DESCRIBE_CONFIGS,
}

SHOWING = (Operation.READ, Operation.WRITE, Operation.ALTER, Operation.DELETE, Operation.DESCRIBE)
"""Who may do one of these sees that a topic is there. Of one that is hidden it is not known what else is allowed."""

UNNEEDED = BEGUN
"""No role's work depends on it. Who cannot write to it says so in its log (`topics/telling.py`)."""


def reach_as(settings: BusSettings, role: Role) -> None:
    """See that a broker answers and lets this client do what the role does with its topics.

    Rights to groups and transactional ids are told of by the first use. Raises BrokerUnreachable, RightsMissing, or
    UsageError for settings that are none.
    """
    client = reach(settings)
    if settings.embedded:
        return
    rights = {topic: needed for topic, needed in topic_rights(role).items() if role.manages or topic is not UNNEEDED}
    wanted = {settings.topic(topic): needed - {Operation.CREATE} for topic, needed in rights.items()}
    asked = TopicCollection(list(wanted))
    answers = client.describe_topics(asked, include_authorized_operations=True, request_timeout=ADMIN_SECONDS)
    missing: list[str] = []
    for name, answer in answers.items():
        try:
            said = answer.result().authorized_operations
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_AUTHORIZATION_FAILED:
                continue  # a topic that is not there is told of by whoever needs it
            said = [said for said, operation in _SAID.items() if operation not in SHOWING]
        if said is not None:
            may = {_SAID[operation] for operation in said if operation in _SAID}
            lacks = (operation for operation in Operation if operation in wanted[name] - may)
            missing += [str(Acl(operation, Resource.TOPIC, name)) for operation in lacks]
    if missing:
        raise RightsMissing(role.name, missing)


def check_group(settings: BusSettings, role: Role, group: str) -> None:
    """See that this client may do what the role does with its consumer group `group`, for who cannot tell by first use.

    Raises BrokerUnreachable, RightsMissing, or UsageError for settings that are none.
    """
    client, name, right = reach(settings), settings.name(group), role.groups[group]
    if settings.embedded:
        return
    asked = client.describe_consumer_groups([name], include_authorized_operations=True, request_timeout=ADMIN_SECONDS)
    try:
        said = asked[name].result().authorized_operations
    except KafkaException as error:
        if error.args[0].code() != KafkaError.GROUP_AUTHORIZATION_FAILED:
            return
        said = []
    if said is not None and right not in [_SAID.get(operation) for operation in said]:
        raise RightsMissing(role.name, [str(Acl(right, Resource.GROUP, name))])
