"""Who may do what on the bus: what each role reads, writes and deletes, and the ACLs that come of it.

Keeps true
- What a role does on the bus is declared here and nowhere else: the ACLs that are printed and the rights that a role
  asks the broker for at its start are both made from this.
- Nobody may do what it does not do: a test compares this with what a broker saw the roles do.
- No name is outside the namespace, so no ACL needs more than one prefix.

Pure. Example
    acls(EXECUTOR, "team.") -> Read on topic team.rose.weights.chunks.v1, ...
"""

import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from topics.catalog import (
    BEGUN,
    CATALOG,
    CHUNKS,
    COMPLETED,
    CONTROL_GROUP,
    DEAD_LETTERS,
    DISPATCHED,
    ENVIRONMENT_GROUP,
    ENVIRONMENT_WRITERS,
    GRANTS,
    GROUPS,
    HEARTBEATS,
    LETTERED,
    LETTERS_WRITER,
    LOG_GROUP,
    MANIFESTS,
    OUTCOMES,
    PROGRESS,
    PROMPTS,
    RECORD_TOPICS,
    REQUESTED,
    ROUTER_GROUP,
    SAMPLES,
    SETTLES,
    SNAPSHOTS,
    SUMMARIES,
    TRAINER_NAMES,
    Topic,
)
from topics.settings import PREFIX

CLUSTER_NAME = "kafka-cluster"
"""What Kafka calls the one resource of the kind cluster."""


class Operation(Enum):
    """By the names that Kafka's and Strimzi's tools give them. To read, write, alter or delete is to describe too."""

    READ = "Read"
    WRITE = "Write"
    CREATE = "Create"
    ALTER = "Alter"
    """Of a topic: to add partitions."""
    DELETE = "Delete"
    """Of a topic: to delete records."""
    DESCRIBE = "Describe"
    DESCRIBE_CONFIGS = "DescribeConfigs"


MANAGING = (Operation.CREATE, Operation.ALTER, Operation.DESCRIBE_CONFIGS)
"""What an admin does to topics, besides describing them."""


class Resource(Enum):
    """By the names of Strimzi's resources."""

    TOPIC = "topic"
    GROUP = "group"
    TRANSACTIONAL_ID = "transactionalId"
    CLUSTER = "cluster"

    @property
    def flag(self) -> str:
        """Of kafka-acls.sh."""
        return "--transactional-id" if self is Resource.TRANSACTIONAL_ID else f"--{self.value}"

    @property
    def words(self) -> str:
        """For people."""
        return "transactional id" if self is Resource.TRANSACTIONAL_ID else self.value


@dataclass(frozen=True, slots=True)
class Acl:
    """One right to one operation."""

    operation: Operation
    resource: Resource
    name: str
    """On the broker."""
    prefixed: bool = False
    """The right is to all that begins with the name."""

    def __str__(self) -> str:
        if self.resource is Resource.CLUSTER:
            return f"{self.operation.value} on the cluster"
        star = "*" if self.prefixed else ""
        return f"{self.operation.value} on {self.resource.words} {self.name}{star}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Role:
    """What one kind of program does on the bus; there is one object of each, so identity is equality."""

    name: str
    reads: tuple[Topic, ...] = ()
    writes: tuple[Topic, ...] = ()
    buries: tuple[Topic, ...] = ()
    """Writes what lies in them and cannot be used to their dead letters."""
    digs: tuple[Topic, ...] = ()
    """Reads their dead letters."""
    cuts: tuple[Topic, ...] = ()
    """Deletes records that nobody needs any more."""
    groups: Mapping[str, Operation] = field(default_factory=dict)
    """To read as a member is to commit; to describe is to see how far others have read."""
    group_prefix: str = ""
    """Reads as a member of any group that begins like this."""
    writer_prefix: str = ""
    """Writes under transactional ids that begin like this."""
    writer: str = ""
    """Writes under this transactional id."""
    manages: bool = False
    """Creates and describes every topic, and describes the brokers."""


_BY_HAND = {LOG_GROUP: Operation.DESCRIBE}

ENVIRONMENT = Role(
    name="environment",
    reads=(PROMPTS, REQUESTED, COMPLETED, OUTCOMES, GROUPS, PROGRESS, SNAPSHOTS, SETTLES),
    writes=(PROMPTS, REQUESTED, SAMPLES, GROUPS, PROGRESS, SNAPSHOTS, BEGUN),
    buries=(PROMPTS, COMPLETED),
    digs=(PROMPTS, COMPLETED),
    cuts=(PROMPTS, REQUESTED, COMPLETED),
    groups={ENVIRONMENT_GROUP: Operation.READ, **_BY_HAND},
    writer_prefix=ENVIRONMENT_WRITERS,
)

ROUTER = Role(
    name="router",
    reads=(REQUESTED, DISPATCHED, COMPLETED, HEARTBEATS),
    writes=(DISPATCHED, COMPLETED, SUMMARIES, BEGUN),
    buries=(REQUESTED, HEARTBEATS),
    digs=(REQUESTED, HEARTBEATS),
    groups={ROUTER_GROUP: Operation.READ, **_BY_HAND},
)

CONTROL = Role(
    name="control",
    reads=(SUMMARIES, GRANTS),
    writes=(GRANTS, BEGUN),
    buries=(SUMMARIES,),
    groups={CONTROL_GROUP: Operation.READ, **_BY_HAND},
)

EXECUTOR = Role(
    name="executor",
    reads=(REQUESTED, DISPATCHED, MANIFESTS, CHUNKS, GRANTS),
    writes=(DISPATCHED, COMPLETED, HEARTBEATS, BEGUN),
    buries=(DISPATCHED,),
    groups=_BY_HAND,
)
"""Also one that lends, whose engine is a guest or an endpoint elsewhere."""

TRAINER = Role(
    name="trainer",
    reads=(SAMPLES, OUTCOMES, GROUPS, MANIFESTS),
    writes=(OUTCOMES, MANIFESTS, CHUNKS, BEGUN),
    buries=(SAMPLES,),
    digs=(SAMPLES,),
    cuts=(SAMPLES, CHUNKS),
    groups=_BY_HAND,
    group_prefix=TRAINER_NAMES,
    writer_prefix=TRAINER_NAMES,
)
"""Of any model: before it deletes samples, it has to see how far the trainers of other models have read."""

PRODUCER = Role(name="producer", writes=(PROMPTS,))
"""`rose submit`, or any other client that asks for trajectories."""

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
        BEGUN,
    ),
    digs=LETTERED,
    groups={
        ENVIRONMENT_GROUP: Operation.DESCRIBE,
        ROUTER_GROUP: Operation.DESCRIBE,
        **_BY_HAND,
    },
)
"""Looks at a run: watch, status, why, audit, replay, report, and the dead letters."""

BURIED = tuple({topic: None for role in (ENVIRONMENT, ROUTER, CONTROL, EXECUTOR, TRAINER) for topic in role.buries})
"""Topics that have dead letters."""

OPERATOR = Role(
    name="operator",
    reads=(PROMPTS, GROUPS, HEARTBEATS),
    writes=(*BURIED, GRANTS, SETTLES),
    buries=BURIED,
    digs=BURIED,
    groups=_BY_HAND,
    writer=LETTERS_WRITER,
)
"""Steps in: grants, drains, trajectories settled by hand, and dead letters that are sent back to their topics."""

ADMIN = Role(name="admin", manages=True)
"""`rose topics create`, `check` and `describe`."""

ROLES: Mapping[str, Role] = {
    role.name: role for role in (ENVIRONMENT, ROUTER, CONTROL, EXECUTOR, TRAINER, PRODUCER, VIEW, OPERATOR, ADMIN)
}

_LETTERS_OF = dict(zip(RECORD_TOPICS, DEAD_LETTERS, strict=True))


def topic_rights(role: Role) -> dict[Topic, set[Operation]]:
    """What the role does with each topic that it touches, its dead letters among them."""
    rights: defaultdict[Topic, set[Operation]] = defaultdict(set)
    done: tuple[tuple[Operation, Iterable[Topic]], ...] = (
        (Operation.READ, role.reads),
        (Operation.READ, (_LETTERS_OF[topic] for topic in role.digs)),
        (Operation.WRITE, role.writes),
        (Operation.WRITE, (_LETTERS_OF[topic] for topic in role.buries)),
        (Operation.DELETE, role.cuts),
    )
    for operation, topics in done:
        for topic in topics:
            rights[topic].add(operation)
    if role.manages:
        for topic in CATALOG:
            rights[topic] |= {*MANAGING}
    return dict(rights)


def acls(role: Role, namespace: str = "") -> list[Acl]:
    """Every right that the role needs, and no other, in a stable order."""
    own = f"{namespace}{PREFIX}"
    if role.manages:
        return [
            *(Acl(operation, Resource.TOPIC, own, prefixed=True) for operation in MANAGING),
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
    if role.writer_prefix:
        found.append(Acl(Operation.WRITE, Resource.TRANSACTIONAL_ID, f"{own}{role.writer_prefix}", prefixed=True))
    if role.writer:
        found.append(Acl(Operation.WRITE, Resource.TRANSACTIONAL_ID, f"{own}{role.writer}"))
    return found


def kafka_acls(role: Role, namespace: str, principal: str) -> Iterator[str]:
    """Lines of options for kafka-acls.sh: what is done alike to several resources of a kind is one line."""
    alike: defaultdict[tuple[Resource, bool, tuple[Operation, ...]], list[str]] = defaultdict(list)
    for (resource, name, prefixed), operations in _together(acls(role, namespace)).items():
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
    """A KafkaUser of Strimzi with the role's rights, as YAML; it signs in with SCRAM-SHA-512."""
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
    for (resource, on, prefixed), operations in _together(acls(role, namespace)).items():
        lines += ["      - resource:", f"          type: {resource.value}"]
        if resource is not Resource.CLUSTER:
            lines += [f"          name: {on}", f"          patternType: {'prefix' if prefixed else 'literal'}"]
        lines.append(f"        operations: [{', '.join(operation.value for operation in operations)}]")
    return "\n".join(lines) + "\n"


def _together(found: Iterable[Acl]) -> dict[tuple[Resource, str, bool], tuple[Operation, ...]]:
    """By resource, all that may be done to it."""
    operations: dict[tuple[Resource, str, bool], tuple[Operation, ...]] = {}
    for acl in found:
        place = acl.resource, acl.name, acl.prefixed
        operations[place] = (*operations.get(place, ()), acl.operation)
    return operations
