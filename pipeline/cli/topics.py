"""`rose topics`: creates, describes and checks the topics, and prints the ACLs that a role needs."""

import re
import sys

from rich.console import Console
from rich.table import Table

from rose.pipeline.config.load import load
from rose.pipeline.config.options import Common
from rose.pipeline.local.broker import readable_log
from rose.pipeline.process.terminal import print_line
from rose.schemas.errors import RoseError, UsageError
from rose.topics.acl import ADMIN, ROLES, connect_as, kafka_acls, strimzi_user
from rose.topics.admin import create_topics, describe_topics, durability_warnings, find_drift

USER = "User:"
"""Prefix of Kafka's principals, unless a broker has kinds of its own."""

OBJECT_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
"""Names that Kubernetes accepts for an object."""


def print_acls(common: Common, name: str, principal: str | None, cluster: str | None) -> None:
    """Print the options of kafka-acls.sh, one line each, or a KafkaUser if `cluster` is given. Raises UsageError."""
    role, namespace = ROLES.get(name), load(common).settings.broker.namespace
    if role is None:
        raise UsageError(f"there is no role {name}; there are {', '.join(ROLES)}")
    principal = principal or f"{USER}rose-{name}"
    kind, colon, user = principal.partition(":")
    if not (kind and colon and user):
        raise UsageError(f"--principal {principal}: write it as User:NAME, as the broker calls it")
    if cluster is None:
        for line in kafka_acls(role, namespace, principal):
            sys.stdout.write(f"{line}\n")
        return
    for value, flag in ((user, "--principal"), (cluster, "--strimzi")):
        if not OBJECT_NAME.fullmatch(value):
            raise UsageError(f"{flag} {value}: Kubernetes takes a-z 0-9 . - in the name of an object")
    sys.stdout.write(strimzi_user(role, namespace, cluster=cluster, name=user))


class TopicsDrifted(RoseError):
    """The broker's topics differ from the catalog."""


def create_catalog(common: Common) -> None:
    """`rose topics create`: creates the topics and partitions that are missing, and prints what else differs."""
    config = load(common)
    settings = config.bus()
    connect_as(settings, ADMIN)
    created = create_topics(settings, config.partitions, replication_factor=config.settings.topics.replication_factor)
    for name in created:
        print_line(f"created {name}")
    print_line(f"{len(created)} topics created, all topics have their leaders")
    differs = [each for each in find_drift(settings, config.partitions) if each.topic not in created]
    for each in differs:
        print_line(f"not changed: {each}")
    if differs:
        print_line("`rose topics check` says what to do about these topics")


def describe_catalog(common: Common) -> None:
    """`rose topics describe`: prints the topics as the broker has them."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for title in ("topic", "key"):
        table.add_column(title)
    for title in ("partitions", "offsets"):
        table.add_column(title, justify="right")
    table.add_column("settings")
    with readable_log(config := load(common)) as settings:
        connect_as(settings, ADMIN)
        for state in describe_topics(settings):
            values = ", ".join(f"{name} {value}" for name, value in state.config.items())
            name = f"{config.settings.broker.namespace}{state.topic.name}"
            keys = ", ".join((state.topic.key, *state.topic.marker_keys))
            table.add_row(name, keys, str(state.partitions), str(state.records), values)
    Console().print(table, highlight=False, markup=False)  # keys contain brackets


def check_catalog(common: Common) -> None:
    """`rose topics check`: compares the broker with the catalog. Raises TopicsDrifted if they differ."""
    with readable_log(config := load(common)) as settings:
        connect_as(settings, ADMIN)
        found = find_drift(settings, config.partitions)
        weak = durability_warnings(settings, replication_factor=config.settings.topics.replication_factor)
    for each in found:
        print_line(str(each))
    for sentence in weak:
        print_line(f"note: {sentence}")
    if found:
        if any(each.creatable for each in found):
            advice = "run `rose topics create`"
        elif any(each.subject == "partitions" for each in found):
            advice = (
                "say in [topics] how many partitions there are: they are for the life of a topic; delete one that "
                "differs from others of its setting, and run `rose topics create`"
            )
        else:
            first = found[0]
            advice = (
                f"set them, as with kafka-configs.sh --alter --entity-type topics --entity-name {first.topic} "
                f"--add-config {first.subject}=[{first.expected}]"
            )
        raise TopicsDrifted(f"the broker differs from the catalog in {len(found)} things: {advice}")
    print_line("the broker's topics are those of the catalog")
