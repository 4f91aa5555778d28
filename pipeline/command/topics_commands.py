"""`rose topics`: the topics of the catalog, and what others read of them.

Keeps true, as `main.py` does: a command imports what it needs when it runs.
"""

from typing import Annotated

import typer

from pipeline.command.documentation import documented
from pipeline.command.options import Common, with_common

topics = typer.Typer(help="Create, describe and check the topics; their contracts and ACLs.", no_args_is_help=True)


@topics.command("create")
@with_common
def topics_create(common: Common) -> None:
    """Create the topics that are not there yet, and inboxes that the one of dispatches lacks."""
    from pipeline.command.client import create

    create(common)


@topics.command("describe")
@with_common
def topics_describe(common: Common) -> None:
    """The topics as the broker has them."""
    from pipeline.command.client import describe

    describe(common)


@topics.command("check")
@with_common
def topics_check(common: Common) -> None:
    """Compare the broker with the catalog. Exit status 1 if they differ."""
    from pipeline.command.client import check

    check(common)


@topics.command("asyncapi")
@with_common
def topics_asyncapi(common: Common) -> None:
    """AsyncAPI of all topics and records, for this namespace and these partitions."""
    from pipeline.command.contracts import print_asyncapi

    print_asyncapi(common)


@topics.command("prompt-schema")
@documented
def topics_prompt_schema() -> None:
    """JSON Schema of a prompt as JSON."""
    from pipeline.command.contracts import print_prompt_schema

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
    from pipeline.command.acl import print_acls

    print_acls(common, role, principal, strimzi)
