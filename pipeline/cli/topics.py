"""`rose topics`: creates, describes and checks the topics, and prints contracts and the ACLs that a role needs.

Keeps true: `rose --help` is fast: a command imports what it needs when it runs.
"""

import re
import sys
from typing import Annotated

import typer

from rose.pipeline.config.options import Common, keep_docstring, with_common
from rose.pipeline.terminal import print_line
from rose.schemas.errors import RoseError, UsageError

USER = "User:"
"""Prefix of Kafka's principals, unless a broker has kinds of its own."""

OBJECT_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
"""Names that Kubernetes accepts for an object."""

topics = typer.Typer(help="Create, describe and check the topics; print contracts and ACLs.", no_args_is_help=True)


class TopicsDrifted(RoseError):
    """The broker's topics differ from the catalog."""


@topics.command("create")
@with_common
def create_catalog(common: Common) -> None:
    """Create missing topics, add missing inboxes, and print what else differs."""
    from rose.pipeline.config.load import load
    from rose.topics.acl import ADMIN, connect_as
    from rose.topics.admin import create_topics, remaining_drift

    config = load(common)
    settings = config.bus()
    connect_as(settings, ADMIN)
    created = create_topics(settings, config.partitions, replication_factor=config.settings.topics.replication_factor)
    for name in created:
        print_line(f"created {name}")
    print_line(f"{len(created)} topics created, all topics have their leaders")
    for line in remaining_drift(settings, config.partitions, created):
        print_line(line)


@topics.command("describe")
@with_common
def describe_catalog(common: Common) -> None:
    """Show the topics as they are on the broker."""
    from rich.console import Console
    from rich.table import Table

    from rose.pipeline.config.load import load
    from rose.pipeline.local.broker import readable_log
    from rose.topics.acl import ADMIN, connect_as
    from rose.topics.admin import describe_topics

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


@topics.command("check")
@with_common
def check_catalog(common: Common) -> None:
    """Compare the broker with the catalog. Exit status 1 if they differ."""
    from rose.pipeline.config.load import load
    from rose.pipeline.local.broker import readable_log
    from rose.topics.acl import ADMIN, connect_as
    from rose.topics.admin import durability_warnings, find_drift

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
                "say in [topics] how many partitions there are: they are for the life of a topic; give one that has "
                "fewer than others of its setting as many (kafka-topics.sh --alter --partitions)"
            )
        else:
            first = found[0]
            advice = (
                f"set them, as with kafka-configs.sh --alter --entity-type topics --entity-name {first.topic} "
                f"--add-config {first.subject}=[{first.expected}]"
            )
        raise TopicsDrifted(f"the broker differs from the catalog in {len(found)} things: {advice}")
    print_line("the broker's topics are those of the catalog")


@topics.command("asyncapi")
@with_common
def print_asyncapi(common: Common) -> None:
    """Print the AsyncAPI document of all topics and records, for this namespace and these partitions."""
    from rose.pipeline.asyncapi import asyncapi, render_document
    from rose.pipeline.config.load import load

    sys.stdout.write(render_document(asyncapi(load(common))))


@topics.command("prompt-schema")
@keep_docstring
def print_prompt_schema() -> None:
    """Print the JSON Schema of a prompt in JSON."""
    from rose.pipeline.asyncapi import prompt_schema, render_document

    sys.stdout.write(render_document(prompt_schema()))


@topics.command("acl")
@with_common
def print_acls(
    common: Common,
    role: Annotated[
        str,
        typer.Option(
            "--role",
            metavar="ROLE",
            help="environment, router, control, executor (also lenders), trainer, evaluator, producer, view, tracker, "
            "replay, operator or admin.",
        ),
    ],
    principal: Annotated[
        str | None,
        typer.Option("--principal", metavar="TYPE:NAME", help="Principal of the ACLs; default: User:rose-ROLE."),
    ] = None,
    strimzi: Annotated[
        str | None,
        typer.Option("--strimzi", metavar="CLUSTER", help="Print a KafkaUser of this Strimzi cluster instead."),
    ] = None,
) -> None:
    """Print the ACLs that a role needs, as options of kafka-acls.sh. Needs no broker."""
    from rose.pipeline.config.load import load
    from rose.topics.acl import ROLES, kafka_acls, strimzi_user

    found, namespace = ROLES.get(role), load(common).settings.broker.namespace
    if found is None:
        raise UsageError(f"there is no role {role}; there are {', '.join(ROLES)}")
    principal = principal or f"{USER}rose-{role}"
    kind, colon, user = principal.partition(":")
    if not (kind and colon and user):
        raise UsageError(f"--principal {principal}: write it as User:NAME, as the broker calls it")
    if strimzi is None:
        for line in kafka_acls(found, namespace, principal):
            sys.stdout.write(f"{line}\n")
        return
    for value, flag in ((user, "--principal"), (strimzi, "--strimzi")):
        if not OBJECT_NAME.fullmatch(value):
            raise UsageError(f"{flag} {value}: Kubernetes takes a-z 0-9 . - in the name of an object")
    sys.stdout.write(strimzi_user(found, namespace, cluster=strimzi, name=user))
