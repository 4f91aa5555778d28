"""The command groups `rose topics` and `rose dlq`: what their commands take.

Keeps true, as `main.py` does: a command imports what it needs when it runs.
"""

from pathlib import Path
from typing import Annotated

import typer

from rose.pipeline.config.field_docs import keep_docstring
from rose.pipeline.config.options import Common, with_common

dlq = typer.Typer(help="Dead letters: list and show them, send mended ones back.", no_args_is_help=True)

Place = Annotated[str, typer.Argument(metavar="PLACE", help="TOPIC/PARTITION/OFFSET, as `rose dlq list` has it.")]


@dlq.command("list")
@with_common
def dlq_list(
    common: Common,
    topic: Annotated[str | None, typer.Option("--topic", metavar="TOPIC", help="Of this topic alone.")] = None,
) -> None:
    """Every dead letter in a line: its place, when, why, its key."""
    from rose.pipeline.cli.dead_letters import list_dead_letters

    list_dead_letters(common, topic)


@dlq.command("show")
@with_common
def dlq_show(common: Common, place: Place) -> None:
    """One dead letter whole: headers, and what it holds."""
    from rose.pipeline.cli.dead_letters import show_dead_letter

    show_dead_letter(common, place)


@dlq.command("retry")
@with_common
def dlq_retry(
    common: Common,
    place: Place,
    edit: Annotated[
        Path | None, typer.Option("--edit", metavar="FILE", help="Send what is in this file instead.")
    ] = None,
    field: Annotated[
        list[str] | None, typer.Option("--field", metavar="FIELD=VALUE", help="Set a field of it. Repeatable.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Even if it was sent back before.")] = False,
) -> None:
    """Send a dead letter back to its topic, mended or as it came."""
    from rose.pipeline.cli.dead_letters import retry_dead_letter

    retry_dead_letter(common, place, edit, field, again=again)


topics = typer.Typer(help="Create, describe and check the topics; their contracts and ACLs.", no_args_is_help=True)


@topics.command("create")
@with_common
def topics_create(common: Common) -> None:
    """Create the topics that are not there yet, and inboxes that the one of dispatches lacks."""
    from rose.pipeline.cli.topics import create_catalog

    create_catalog(common)


@topics.command("describe")
@with_common
def topics_describe(common: Common) -> None:
    """The topics as the broker has them."""
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
    """AsyncAPI of all topics and records, for this namespace and these partitions."""
    from rose.pipeline.asyncapi import print_asyncapi

    print_asyncapi(common)


@topics.command("prompt-schema")
@keep_docstring
def topics_prompt_schema() -> None:
    """JSON Schema of a prompt as JSON."""
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
            help="environment, router, control, executor (so is a lender), trainer, producer, view, operator or admin.",
        ),
    ],
    principal: Annotated[
        str | None, typer.Option("--principal", metavar="TYPE:NAME", help="Whose; left out, User:rose-ROLE.")
    ] = None,
    strimzi: Annotated[
        str | None, typer.Option("--strimzi", metavar="CLUSTER", help="A KafkaUser of this Strimzi cluster instead.")
    ] = None,
) -> None:
    """The ACLs that a role needs, and no more: lines of options for kafka-acls.sh. Needs no broker."""
    from rose.pipeline.cli.topics import print_acls

    print_acls(common, role, principal, strimzi)
