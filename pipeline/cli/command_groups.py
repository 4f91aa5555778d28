"""The subcommands of `rose dlq` and `rose topics`, and their options."""

from pathlib import Path
from typing import Annotated

import typer

from rose.pipeline.config.options import Common, keep_docstring, with_common

dlq = typer.Typer(help="List dead letters, show one, send one back.", no_args_is_help=True)
topics = typer.Typer(help="Create, describe and check the topics; print contracts and ACLs.", no_args_is_help=True)

Place = Annotated[str, typer.Argument(metavar="PLACE", help="TOPIC/PARTITION/OFFSET, as in `rose dlq list`.")]


@dlq.command("list")
@with_common
def dlq_list(
    common: Common,
    topic: Annotated[
        str | None, typer.Option("--topic", metavar="TOPIC", help="Only dead letters of this topic.")
    ] = None,
) -> None:
    """List the dead letters, one a line: position, time, reason and key."""
    from rose.pipeline.cli.dead_letters import list_dead_letters

    list_dead_letters(common, topic)


@dlq.command("show")
@with_common
def dlq_show(common: Common, place: Place) -> None:
    """Show one dead letter with its headers and its content."""
    from rose.pipeline.cli.dead_letters import show_dead_letter

    show_dead_letter(common, place)


@dlq.command("retry")
@with_common
def dlq_retry(
    common: Common,
    place: Place,
    edit: Annotated[
        Path | None, typer.Option("--edit", metavar="FILE", help="Send the content of this file instead.")
    ] = None,
    field: Annotated[
        list[str] | None, typer.Option("--field", metavar="FIELD=VALUE", help="Set a field of the record. Repeatable.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Send it even if it was sent back before.")] = False,
) -> None:
    """Send a dead letter back to its topic, corrected or unchanged."""
    from rose.pipeline.cli.dead_letters import retry_dead_letter

    retry_dead_letter(common, place, edit, field, again=again)


@topics.command("create")
@with_common
def topics_create(common: Common) -> None:
    """Create missing topics, and add missing inboxes."""
    from rose.pipeline.cli.topics import create_catalog

    create_catalog(common)


@topics.command("describe")
@with_common
def topics_describe(common: Common) -> None:
    """Show the topics as they are on the broker."""
    from rose.pipeline.cli.topics import describe_catalog

    describe_catalog(common)


@topics.command("check")
@with_common
def topics_check(common: Common) -> None:
    """Compare the broker with the catalog. Exit status 1 if they differ."""
    from rose.pipeline.cli.topics import check_catalog

    check_catalog(common)


@topics.command("asyncapi")
@with_common
def topics_asyncapi(common: Common) -> None:
    """Print the AsyncAPI document of all topics and records, for this namespace and these partitions."""
    from rose.pipeline.asyncapi import print_asyncapi

    print_asyncapi(common)


@topics.command("prompt-schema")
@keep_docstring
def topics_prompt_schema() -> None:
    """Print the JSON Schema of a prompt in JSON."""
    from rose.pipeline.asyncapi import print_prompt_schema

    print_prompt_schema()


@topics.command("acl")
@with_common
def topics_acl(
    common: Common,
    role: Annotated[
        str,
        typer.Option(
            "--role",
            metavar="ROLE",
            help="environment, router, control, executor (also lenders), trainer, producer, view, operator or admin.",
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
    from rose.pipeline.cli.topics import print_acls

    print_acls(common, role, principal, strimzi)
