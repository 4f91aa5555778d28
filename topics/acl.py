"""Access control: the rights of each role on the bus, the ACLs that follow, and their check at a role's start.

Keeps true
- What a role does on the bus is declared here only: the ACLs that `rose topics acl` prints and the rights that a role
  checks at its start are both derived from it.
- No role has a right that it does not use: a test compares the rights with what a broker saw the roles do.
- No name lies outside the namespace, so one prefix serves every ACL.
- A missing right is reported at the start, by name. A role that lacks only rights to OPTIONAL_TOPICS starts all the
  same, as after an upgrade from a version without that topic.
- Only a refusal counts as a missing right; what a broker does not answer does not. The right to create topics is
  reported at its first use, because it may be a right to the cluster.

Example:
    acls(EXECUTOR, "team.") -> Read on topic team.rose.weights.chunks.v1, ...
"""

import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AclOperation

from rose.topics.admin import ADMIN_SECONDS, connect
from rose.topics.catalog import (
    CATALOG,
    CHUNKS,
    COMPLETED,
    CONTROL_GROUP,
    DEAD_LETTER_SOURCES,
    DEAD_LETTERS,
    DEAD_LETTERS_TRANSACTIONAL_ID,
    DISPATCHED,
    ENVIRONMENT_GROUP,
    ENVIRONMENT_TRANSACTIONAL_PREFIX,
    EVALUATION_RESULTS,
    EVALUATIONS,
    EVALUATOR_PREFIX,
    GRANTS,
    GROUPS,
    HEARTBEATS,
    JOURNAL,
    LOG_GROUP,
    MANIFESTS,
    OUTCOMES,
    PROGRESS,
    PROMPTS,
    RECORD_TOPICS,
    REQUESTED,
    ROLE_STARTS,
    ROUTER_GROUP,
    SAMPLES,
    SETTLES,
    SNAPSHOTS,
    SUMMARIES,
    TRACKER_PREFIX,
    TRAINER_PREFIX,
    Topic,
)
from rose.topics.errors import RightsMissing
from rose.topics.settings import PREFIX, BusSettings

CLUSTER_NAME = "kafka-cluster"
"""Kafka's name of the only resource of type cluster."""


class Operation(Enum):
    """Operations of Kafka's ACLs. A right to read, write, alter or delete includes the right to describe."""

    READ = "Read"
    WRITE = "Write"
    CREATE = "Create"
    ALTER = "Alter"
    """Used for topics: to add partitions."""
    DELETE = "Delete"
    """Used for topics: to delete records."""
    DESCRIBE = "Describe"
    DESCRIBE_CONFIGS = "DescribeConfigs"


ADMIN_OPERATIONS = (Operation.CREATE, Operation.ALTER, Operation.DESCRIBE_CONFIGS)
"""Operations of an admin on topics, in addition to describing them."""


class Resource(Enum):
    """Types of resources in Kafka's ACLs, by Strimzi's names."""

    TOPIC = "topic"
    GROUP = "group"
    TRANSACTIONAL_ID = "transactionalId"
    CLUSTER = "cluster"

    @property
    def flag(self) -> str:
        """The option of kafka-acls.sh that names a resource of this type."""
        return "--transactional-id" if self is Resource.TRANSACTIONAL_ID else f"--{self.value}"

    @property
    def label(self) -> str:
        """The name in messages."""
        return "transactional id" if self is Resource.TRANSACTIONAL_ID else self.value


@dataclass(frozen=True, slots=True)
class Acl:
    """A right to one operation on one resource, or on all resources with a prefix."""

    operation: Operation
    resource: Resource
    name: str
    """The resource's name on the broker."""
    prefixed: bool = False
    """Whether the right covers all resources whose names begin with `name`."""

    def __str__(self) -> str:
        if self.resource is Resource.CLUSTER:
            return f"{self.operation.value} on the cluster"
        star = "*" if self.prefixed else ""
        return f"{self.operation.value} on {self.resource.label} {self.name}{star}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Role:
    """The use of the bus by one kind of program. Roles are singletons and are compared by identity."""

    name: str
    reads: tuple[Topic, ...] = ()
    writes: tuple[Topic, ...] = ()
    dead_letters: tuple[Topic, ...] = ()
    """Topics to whose dead letter queues the role writes unusable messages."""
    reads_dead_letters: tuple[Topic, ...] = ()
    """Topics whose dead letters the role reads."""
    deletes: tuple[Topic, ...] = ()
    """Topics from which the role deletes records that are not needed any more."""
    groups: Mapping[str, Operation] = field(default_factory=dict)
    """Operations by consumer group: READ to be a member and commit, DESCRIBE to see the committed offsets."""
    group_prefix: str = ""
    """The role is a member of groups whose names begin with this."""
    transactional_id_prefix: str = ""
    """The role writes under transactional ids that begin with this."""
    transactional_id: str = ""
    """The role writes under this transactional id."""
    is_admin: bool = False
    """Whether the role creates and describes every topic, and describes the brokers."""


_LOG_READER = {LOG_GROUP: Operation.DESCRIBE}

ENVIRONMENT = Role(
    name="environment",
    reads=(PROMPTS, REQUESTED, COMPLETED, OUTCOMES, GROUPS, PROGRESS, SNAPSHOTS, SETTLES, EVALUATIONS),
    writes=(PROMPTS, REQUESTED, SAMPLES, GROUPS, PROGRESS, SNAPSHOTS, ROLE_STARTS),
    dead_letters=(PROMPTS, COMPLETED),
    reads_dead_letters=(PROMPTS, COMPLETED),
    deletes=(PROMPTS, REQUESTED, COMPLETED),
    groups={ENVIRONMENT_GROUP: Operation.READ, **_LOG_READER},
    transactional_id_prefix=ENVIRONMENT_TRANSACTIONAL_PREFIX,
)

ROUTER = Role(
    name="router",
    reads=(REQUESTED, DISPATCHED, COMPLETED, HEARTBEATS),
    writes=(DISPATCHED, COMPLETED, SUMMARIES, ROLE_STARTS, JOURNAL),
    dead_letters=(REQUESTED, HEARTBEATS),
    reads_dead_letters=(REQUESTED, HEARTBEATS),
    groups={ROUTER_GROUP: Operation.READ, **_LOG_READER},
)

CONTROL = Role(
    name="control",
    reads=(SUMMARIES, GRANTS),
    writes=(GRANTS, ROLE_STARTS, JOURNAL),
    dead_letters=(SUMMARIES,),
    groups={CONTROL_GROUP: Operation.READ, **_LOG_READER},
)

EXECUTOR = Role(
    name="executor",
    reads=(REQUESTED, DISPATCHED, MANIFESTS, CHUNKS, GRANTS),
    writes=(DISPATCHED, COMPLETED, HEARTBEATS, ROLE_STARTS),
    dead_letters=(DISPATCHED,),
    groups=_LOG_READER,
)
"""A dedicated executor, or a lender whose engine is a guest or an endpoint."""

TRAINER = Role(
    name="trainer",
    reads=(SAMPLES, OUTCOMES, GROUPS, MANIFESTS, EVALUATION_RESULTS),
    writes=(OUTCOMES, MANIFESTS, CHUNKS, ROLE_STARTS),
    dead_letters=(SAMPLES,),
    reads_dead_letters=(SAMPLES,),
    deletes=(SAMPLES, CHUNKS),
    groups=_LOG_READER,
    group_prefix=TRAINER_PREFIX,
    transactional_id_prefix=TRAINER_PREFIX,
)
"""A trainer of any model. Before it deletes samples, it has to see how far the trainers of other models have read."""

EVALUATOR = Role(
    name="evaluator",
    reads=(SAMPLES, OUTCOMES, MANIFESTS, EVALUATIONS, EVALUATION_RESULTS),
    writes=(EVALUATIONS, EVALUATION_RESULTS, OUTCOMES, ROLE_STARTS),
    groups=_LOG_READER,
    group_prefix=EVALUATOR_PREFIX,
    transactional_id_prefix=EVALUATOR_PREFIX,
)
"""`rose evaluator`: evaluates policy versions during training."""

PRODUCER = Role(name="producer", writes=(PROMPTS,))
"""`rose submit`, or any other client that submits prompts."""

VIEW = Role(
    name="view",
    reads=(
        PROMPTS,
        REQUESTED,
        DISPATCHED,
        COMPLETED,
        HEARTBEATS,
        SAMPLES,
        OUTCOMES,
        GROUPS,
        PROGRESS,
        MANIFESTS,
        ROLE_STARTS,
        EVALUATION_RESULTS,
    ),
    reads_dead_letters=DEAD_LETTER_SOURCES,
    groups={
        ENVIRONMENT_GROUP: Operation.DESCRIBE,
        ROUTER_GROUP: Operation.DESCRIBE,
        **_LOG_READER,
    },
)
"""Commands that only read a run: watch, status, why, audit, replay, report, samples, and the list of dead letters."""

TRACKER = Role(
    name="tracker",
    reads=(SAMPLES, OUTCOMES, EVALUATION_RESULTS),
    reads_dead_letters=(SAMPLES,),
    groups=_LOG_READER,
    group_prefix=TRACKER_PREFIX,
)
"""`rose track`: reads the steps of a run, and commits how far it has come."""

REPLAY = Role(
    name="replay",
    reads=(REQUESTED, DISPATCHED, COMPLETED, HEARTBEATS, SUMMARIES, GRANTS, JOURNAL),
    groups=_LOG_READER,
)
"""`rose replay` of a stretch of time: repeats the decisions of routers and control apps."""

DEAD_LETTERED = tuple(
    {topic: None for role in (ENVIRONMENT, ROUTER, CONTROL, EXECUTOR, TRAINER) for topic in role.dead_letters}
)
"""Topics that have dead letters."""

OPERATOR = Role(
    name="operator",
    reads=(PROMPTS, GROUPS, HEARTBEATS),
    writes=(*DEAD_LETTERED, GRANTS, SETTLES),
    dead_letters=DEAD_LETTERED,
    reads_dead_letters=DEAD_LETTERED,
    groups=_LOG_READER,
    transactional_id=DEAD_LETTERS_TRANSACTIONAL_ID,
)
"""Commands that change a run: grants, drains, settle requests, and dead letters that are sent back to their topics."""

ADMIN = Role(name="admin", is_admin=True)
"""`rose topics create`, `check` and `describe`."""

ROLES: Mapping[str, Role] = {
    role.name: role
    for role in (
        ENVIRONMENT,
        ROUTER,
        CONTROL,
        EXECUTOR,
        TRAINER,
        EVALUATOR,
        PRODUCER,
        VIEW,
        TRACKER,
        REPLAY,
        OPERATOR,
        ADMIN,
    )
}

_DEAD_LETTERS_OF = dict(zip(RECORD_TOPICS, DEAD_LETTERS, strict=True))


def topic_rights(role: Role) -> dict[Topic, set[Operation]]:
    """The role's operations on each topic that it uses, including dead letter queues."""
    rights: defaultdict[Topic, set[Operation]] = defaultdict(set)
    uses: tuple[tuple[Operation, Iterable[Topic]], ...] = (
        (Operation.READ, role.reads),
        (Operation.READ, (_DEAD_LETTERS_OF[topic] for topic in role.reads_dead_letters)),
        (Operation.WRITE, role.writes),
        (Operation.WRITE, (_DEAD_LETTERS_OF[topic] for topic in role.dead_letters)),
        (Operation.DELETE, role.deletes),
    )
    for operation, topics in uses:
        for topic in topics:
            rights[topic].add(operation)
    if role.is_admin:
        for topic in CATALOG:
            rights[topic] |= {*ADMIN_OPERATIONS}
    return dict(rights)


def acls(role: Role, namespace: str = "") -> list[Acl]:
    """The rights that the role needs, and no others, in a stable order."""
    own = f"{namespace}{PREFIX}"
    if role.is_admin:
        return [
            *(Acl(operation, Resource.TOPIC, own, prefixed=True) for operation in ADMIN_OPERATIONS),
            Acl(Operation.DESCRIBE_CONFIGS, Resource.CLUSTER, CLUSTER_NAME),
        ]
    found = [
        Acl(operation, Resource.TOPIC, f"{namespace}{topic.name}")
        for topic, operations in topic_rights(role).items()
        for operation in Operation
        if operation in operations
    ]
    found += [Acl(operation, Resource.GROUP, f"{own}{group}") for group, operation in role.groups.items()]
    if role.group_prefix:
        found.append(Acl(Operation.READ, Resource.GROUP, f"{own}{role.group_prefix}", prefixed=True))
    if role.transactional_id_prefix:
        found.append(
            Acl(Operation.WRITE, Resource.TRANSACTIONAL_ID, f"{own}{role.transactional_id_prefix}", prefixed=True)
        )
    if role.transactional_id:
        found.append(Acl(Operation.WRITE, Resource.TRANSACTIONAL_ID, f"{own}{role.transactional_id}"))
    return found


def kafka_acls(role: Role, namespace: str, principal: str) -> Iterator[str]:
    """Lines of options for kafka-acls.sh. Resources of one type with the same operations share a line."""
    alike: defaultdict[tuple[Resource, bool, tuple[Operation, ...]], list[str]] = defaultdict(list)
    for (resource, name, prefixed), operations in _operations_by_resource(acls(role, namespace)).items():
        alike[resource, prefixed, operations].append(name)
    for (resource, prefixed, operations), names in alike.items():
        words = ["--add", "--allow-principal", principal]
        for operation in operations:
            words += ["--operation", operation.value]
        if prefixed:
            words += ["--resource-pattern-type", "prefixed"]
        if resource is Resource.CLUSTER:
            words.append(resource.flag)
        else:
            for name in names:
                words += [resource.flag, name]
        yield shlex.join(words)


def strimzi_user(role: Role, namespace: str, *, cluster: str, name: str) -> str:
    """A Strimzi KafkaUser with the role's rights and SCRAM-SHA-512 authentication, as YAML.

    `cluster`: name of the Kafka resource. `name`: name of the user.
    """
    lines = [
        "apiVersion: kafka.strimzi.io/v1",
        "kind: KafkaUser",
        "metadata:",
        f"  name: {name}",
        "  labels:",
        f"    strimzi.io/cluster: {cluster}",
        "spec:",
        "  authentication:",
        "    type: scram-sha-512",
        "  authorization:",
        "    type: simple",
        "    acls:",
    ]
    for (resource, on, prefixed), operations in _operations_by_resource(acls(role, namespace)).items():
        lines += ["      - resource:", f"          type: {resource.value}"]
        if resource is not Resource.CLUSTER:
            lines += [f"          name: {on}", f"          patternType: {'prefix' if prefixed else 'literal'}"]
        lines.append(f"        operations: [{', '.join(operation.value for operation in operations)}]")
    return "\n".join(lines) + "\n"


def _operations_by_resource(found: Iterable[Acl]) -> dict[tuple[Resource, str, bool], tuple[Operation, ...]]:
    """Operations by resource type, name and whether the name is a prefix."""
    operations: dict[tuple[Resource, str, bool], tuple[Operation, ...]] = {}
    for acl in found:
        place = acl.resource, acl.name, acl.prefixed
        operations[place] = (*operations.get(place, ()), acl.operation)
    return operations


_OPERATIONS = {AclOperation[each.name]: each for each in Operation if each is not Operation.CREATE}

VISIBLE_OPERATIONS = (Operation.READ, Operation.WRITE, Operation.ALTER, Operation.DELETE, Operation.DESCRIBE)
"""A client with one of these rights sees the topic. For a hidden topic the broker does not report other rights."""

OPTIONAL_TOPICS = (ROLE_STARTS, JOURNAL, EVALUATION_RESULTS)
"""Topics that the work of a run without evaluations does not depend on. A role that cannot write to one of the first
two logs that (`pipeline/cli/roles.py`, `pipeline/journal.py`); evaluations report a missing right at its first use."""


def connect_as(settings: BusSettings, role: Role) -> None:
    """Check that a broker answers and that this client has the role's rights to topics.

    A missing right to a group or transactional id is reported at its first use. Raises BrokerUnreachable,
    AuthenticationFailed, RightsMissing, or UsageError for invalid settings.
    """
    client = connect(settings)
    if settings.embedded:
        return
    rights = {
        topic: needed for topic, needed in topic_rights(role).items() if role.is_admin or topic not in OPTIONAL_TOPICS
    }
    needed_by_topic = {settings.topic(topic): needed - {Operation.CREATE} for topic, needed in rights.items()}
    request = TopicCollection(list(needed_by_topic))
    answers = client.describe_topics(request, include_authorized_operations=True, request_timeout=ADMIN_SECONDS)
    missing: list[str] = []
    for name, answer in answers.items():
        try:
            operations = answer.result().authorized_operations
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_AUTHORIZATION_FAILED:
                continue  # a missing topic is reported at its first use
            operations = [
                operations for operations, operation in _OPERATIONS.items() if operation not in VISIBLE_OPERATIONS
            ]
        if operations is not None:
            allowed = {_OPERATIONS[operation] for operation in operations if operation in _OPERATIONS}
            lacking = (operation for operation in Operation if operation in needed_by_topic[name] - allowed)
            missing += [str(Acl(operation, Resource.TOPIC, name)) for operation in lacking]
    if missing:
        raise RightsMissing(role.name, missing)


def check_group_rights(settings: BusSettings, role: Role, group: str) -> None:
    """Check that this client has the role's right to its consumer group `group`.

    For clients that do not report a missing right at the first use. Raises BrokerUnreachable, AuthenticationFailed,
    RightsMissing, or UsageError for invalid settings.
    """
    client, name, right = connect(settings), settings.name(group), role.groups[group]
    if settings.embedded:
        return
    request = client.describe_consumer_groups([name], include_authorized_operations=True, request_timeout=ADMIN_SECONDS)
    try:
        operations = request[name].result().authorized_operations
    except KafkaException as error:
        if error.args[0].code() != KafkaError.GROUP_AUTHORIZATION_FAILED:
            return
        operations = []
    if operations is not None and right not in [_OPERATIONS.get(operation) for operation in operations]:
        raise RightsMissing(role.name, [str(Acl(right, Resource.GROUP, name))])
