"""`rose replay --serve`: puts the records of a run into a scratch namespace, at their pace or faster."""

import math
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.progress import Progress

from rose.pipeline.cli.replay_decisions import parse_time
from rose.pipeline.config.load import load
from rose.pipeline.config.options import Common
from rose.pipeline.local.broker import readable_log, starts_own_broker
from rose.pipeline.process_setup import stop_on_signals
from rose.pipeline.replay.serving import RecordServer, scratch_settings
from rose.pipeline.terminal import print_line
from rose.schemas.errors import UsageError
from rose.topics.acl import VIEW, connect_as
from rose.topics.catalog import RECORD_TOPICS, Topic

NAME = "rose.{}.v1"
"""Name of a topic around its short name."""


def serve_records(
    common: Common, namespace: str, since: str | None, until: str | None, *, speed: float, topics: str | None
) -> None:
    """Serve the records and show the progress on standard error.

    If the run's own broker was started for this, it goes on until a signal asks the command to stop. Raises UsageError,
    TopicMissing or BusError.
    """
    begin, end, chosen = parse_time(since, 0.0), parse_time(until, math.inf), topics_named(topics)
    config = load(common)
    load(replace(common, namespace=namespace))  # raises UsageError for a name that no namespace can have
    own, stop = starts_own_broker(config), stop_on_signals()
    with readable_log(config) as settings:
        target = scratch_settings(settings, namespace)
        connect_as(settings, VIEW)
        server = RecordServer(settings, target, chosen)
        print_line(f"serves to {namespace} on {settings.bootstrap}")
        with Progress(console=Console(stderr=True)) as progress:
            bar = progress.add_task("records", total=None)
            served = server.serve(
                begin,
                end,
                speed,
                on_progress=lambda count, total: progress.update(bar, completed=count, total=total),
                should_stop=stop.is_set,
            )
        print_line(f"{served} records served")
        if own and not stop.is_set():
            print_line("the run's broker goes on until this command is interrupted")
            stop.wait()


def topics_named(names: str | None) -> Sequence[Topic]:
    """The topics of these names, separated by commas; all for None. Raises UsageError for a name of no topic.

    Example: "turns.requested,rose.slack.heartbeats.v1".
    """
    if names is None:
        return RECORD_TOPICS
    known = {topic.name: topic for topic in RECORD_TOPICS}
    chosen = []
    for name in names.split(","):
        topic = known.get(name.strip()) or known.get(NAME.format(name.strip()))
        if topic is None:
            short = ", ".join(each.removeprefix("rose.").removesuffix(".v1") for each in known)
            raise UsageError(f"--topics: there is no topic {name.strip()}: choose from {short}")
        chosen.append(topic)
    return chosen
