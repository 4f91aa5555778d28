"""The commands that talk to the log and nothing else: topics, prompts, watch, audit, report."""

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from pipeline.clock import format_utc as moment
from pipeline.command.broker import live_bus, log_of
from pipeline.command.config import load
from pipeline.command.options import Common
from pipeline.command.saying import say
from schemas.errors import RoseError
from topics.acl import ADMIN, PRODUCER, VIEW, connect_as
from topics.admin import create_topics, describe_topics, durability_warnings, find_drift


class LawBroken(RoseError):
    """The audit is not clean."""


class TopicsDrifted(RoseError):
    """The broker's topics are not the catalog's."""


def create(common: Common) -> None:
    """`rose topics create`."""
    config = load(common)
    settings = config.bus()
    connect_as(settings, ADMIN)
    created = create_topics(settings, config.partitions, replication_factor=config.settings.topics.replication_factor)
    for name in created:
        say(f"created {name}")
    say(f"{len(created)} topics created, all topics have their leaders")


def describe(common: Common) -> None:
    """`rose topics describe`."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for title in ("topic", "key"):
        table.add_column(title)
    for title in ("partitions", "offsets"):
        table.add_column(title, justify="right")
    table.add_column("settings")
    with log_of(config := load(common)) as settings:
        connect_as(settings, ADMIN)
        for state in describe_topics(settings):
            told = ", ".join(f"{name} {value}" for name, value in state.config.items())
            name = f"{config.settings.broker.namespace}{state.topic.name}"
            keys = ", ".join((state.topic.key, *state.topic.marker_keys))
            table.add_row(name, keys, str(state.partitions), str(state.records), told)
    Console().print(table, highlight=False, markup=False)  # keys have brackets


def check(common: Common) -> None:
    """`rose topics check`. Raises TopicsDrifted."""
    with log_of(config := load(common)) as settings:
        connect_as(settings, ADMIN)
        found = find_drift(settings, config.partitions)
        weak = durability_warnings(settings, replication_factor=config.settings.topics.replication_factor)
    for each in found:
        say(str(each))
    for sentence in weak:
        say(f"note: {sentence}")
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
    say("the broker's topics are those of the catalog")


def submit_file(common: Common, file: Path, without: Path | None) -> None:
    """`rose submit`. Raises BadPrompts."""
    from pipeline.command.submit import count_homes, read_prompts, send_prompts

    config = load(common)
    prompts = read_prompts(file, config.environments, without=without)
    settings = config.bus()
    connect_as(settings, PRODUCER)
    count_homes(settings)  # a prompt must not be the first to find out that there are none
    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("prompts", total=len(prompts))
        send_prompts(settings, prompts, sent=lambda: progress.advance(task))
    say(f"{len(prompts)} prompts submitted, {sum(prompt.group_size for prompt in prompts)} trajectories")


def watch_run(common: Common) -> None:
    """`rose watch`: until Ctrl-C."""
    from pipeline.command.processes import stop_on_signals
    from pipeline.command.screen import Screen
    from pipeline.command.watching import watch_of

    with live_bus(config := load(common)) as settings:
        connect_as(settings, VIEW)
        stop = stop_on_signals()
        watch = watch_of(config, settings, whole=False)
        try:
            Screen(watch, Console(), title=f"ROSE on {settings.bootstrap}").run(lambda: not stop.is_set())
        finally:
            watch.close()


def audit_run(common: Common) -> None:
    """`rose audit`. Raises LawBroken."""
    from pipeline.accounting.audit import inspect_log

    with log_of(load(common)) as settings:
        connect_as(settings, VIEW)
        found = inspect_log(settings)
    audit, terms = found.audit, found.audit.trajectories()
    if found.since is not None:
        say(f"looked at the log from {moment(found.since)} on")
    right = " + ".join(f"{count} {name.replace('_', ' ')}" for name, count in terms.items() if name != "requested")
    say(f"{terms['requested']} requested = {right}")
    where = audit.in_flight
    if where.total:
        say(
            f"in flight: {where.not_opened} not opened, {where.in_a_turn} in a turn, "
            f"{where.waiting_for_trainer} waiting for the trainer"
        )
    for kind, names in (("lost", audit.lost), ("doubled", audit.doubled), ("unasked", audit.unasked)):
        say(f"{len(names)} {kind}{': ' if names else ''}{', '.join(names[:10])}{', ...' if len(names) > 10 else ''}")
    for topic, count in found.letters.items():
        say(f"{count} dead letters of {topic.name}: see `rose letters list`")
    if not audit.clean:
        raise LawBroken("the conservation law does not hold on this log: see the trajectories above")


def report_run(common: Common) -> None:
    """`rose report`. Raises UsageError when the run was never finished."""
    from pipeline.command.closing import earlier_facts, show_summary, write_report

    config = load(common)
    facts = earlier_facts(config.run_folder)
    with log_of(config) as settings:
        connect_as(settings, VIEW)
        summary = write_report(config, settings, facts)
    show_summary(Console(), summary, config.run_folder)
