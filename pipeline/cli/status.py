"""`rose status`: the state of a run on one screen.

Keeps true
- The command reads until every executor of the last minute has sent a new heartbeat, or for longer than a heartbeat is
  valid.
- If something that could move does not move, the command reads on until it is known whether it is stalled.
- The exit status is 1 exactly when a finding is UNWELL; missing information counts as UNWELL.
"""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rose.pipeline.config.load import load
from rose.pipeline.config.options import Common
from rose.pipeline.local.broker import readable_log
from rose.pipeline.monitor.broker_probe import BrokerSnapshot
from rose.pipeline.monitor.diagnosis import STALLED_SECONDS, Finding, Severity, diagnose
from rose.pipeline.monitor.facts import Facts
from rose.pipeline.monitor.follower import RunFollower, follow_run
from rose.pipeline.monitor.screen import executor_table, finding_lines, work_line
from rose.pipeline.terminal import WaitNotice
from rose.schemas.errors import RoseError
from rose.schemas.heartbeats import TTL_SECONDS
from rose.topics.acl import VIEW, connect_as
from rose.topics.errors import BrokerUnreachable
from rose.topics.settings import BusSettings

LOOK_SECONDS = TTL_SECONDS + 0.5
"""Time after which an executor without a new heartbeat is silent: longer than a heartbeat is valid."""

LONGEST_SECONDS = 20.0
"""Maximum time to read the present state of the log, and maximum time of one look."""

READ_SECONDS = 0.1
"""Longest wait for records between two checks of the clock."""


class RunUnhealthy(RoseError):
    """At least one finding is UNWELL."""


def show_status(common: Common, *, as_json: bool, waits: WaitNotice | None = None) -> None:
    """Read the run and print its state. Raises RunUnhealthy, BrokerUnreachable, TopicMissing or BusError."""
    waits = waits or WaitNotice()
    waits.show("waits for the broker to answer")
    config = load(common)
    with readable_log(config) as bus:
        connect_as(bus, VIEW)
        waits.show("reads which groups are open")
        watch = follow_run(config, bus, whole=False, on_wait=deadline_after(LONGEST_SECONDS, bus))
        try:
            _look(watch, waits)
            facts, snapshot, versions = watch.facts(), watch.snapshot, watch.run_state.versions
            untold = unknown_parts(
                answered=snapshot is not None, caught_up=watch.caught_up, broker_error=watch.broker_error
            )
        finally:
            waits.show("")
            watch.close()
    findings = [*untold, *diagnose(facts)]
    if as_json:
        report = msgspec.json.encode(_plain(facts, findings, snapshot, versions))
        sys.stdout.write(f"{msgspec.json.format(report, indent=2).decode()}\n")
    else:
        title = f"ROSE on {bus.bootstrap}{f', {bus.namespace}*' if bus.namespace else ''}"
        _print(facts, findings, snapshot, versions, title=title)
    unwell = [finding.sentence for finding in findings if finding.severity is Severity.UNWELL]
    if unwell:
        more = f"; and {len(unwell) - 1} more to mend" if len(unwell) > 1 else ""
        raise RunUnhealthy(f"unwell: {unwell[0]}{more}")


def unknown_parts(*, answered: bool, caught_up: bool, broker_error: str | None) -> Iterator[Finding]:
    """Yield a finding for each part of the state that could not be read."""
    if not answered:
        why = f" ({broker_error})" if broker_error else ""
        sentence = f"the broker does not list the members and offsets of the consumer groups{why}"
        yield Finding(Severity.UNWELL, "broker", sentence)
    if not caught_up:
        sentence = f"the log was not read to its end within {LONGEST_SECONDS:.0f} s: the findings may be outdated"
        yield Finding(Severity.NOTE, "broker", sentence)


def deadline_after(seconds: float, bus: BusSettings) -> Callable[[], None]:
    """Return a check that raises BrokerUnreachable when it is called later than `seconds` from now."""
    deadline = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() > deadline:
            raise BrokerUnreachable(bus.bootstrap, f"it answers, but did not deliver its log within {seconds:.0f} s")

    return check


def _look(watch: RunFollower, waits: WaitNotice) -> None:
    """Read until the state is known, for at most LONGEST_SECONDS."""
    began, waited_for = time.monotonic(), ""
    while (looked := time.monotonic() - began) <= LONGEST_SECONDS:
        lacks = _missing_facts(watch, looked)
        if not lacks:
            return
        if lacks != waited_for:
            waits.show(lacks)
            waited_for = lacks
        watch.poll(READ_SECONDS)


def _missing_facts(watch: RunFollower, looked: float) -> str | None:
    """Return what the look still waits for; None if it has seen enough."""
    if not watch.caught_up:
        return "reads the log to its end"
    if looked < LOOK_SECONDS and not watch.run_state.heard_from_all:
        return f"listens to the executors for {LOOK_SECONDS:g} s"
    if watch.snapshot is None:
        return "waits for the broker to list the members of the consumer groups"
    left = STALLED_SECONDS + READ_SECONDS - min(looked, watch.known_seconds)
    if left > 0 and _unhealthy(watch.facts()) != _unhealthy(watch.facts(later=left)):
        return f"reads for {STALLED_SECONDS:g} s in all: some work that could go on stands still"
    return None


def _unhealthy(facts: Facts) -> list[str]:
    """Return the subjects of all findings that are UNWELL."""
    return [finding.who for finding in diagnose(facts) if finding.severity is Severity.UNWELL]


def _print(
    facts: Facts, findings: list[Finding], snapshot: BrokerSnapshot | None, versions: int, *, title: str
) -> None:
    console = Console()
    console.print(Text(title, "bold"))
    console.print(executor_table(facts.executors))
    console.print()
    console.print(work_line(facts))
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", min_width=12)
    table.add_column()
    newest = f", the newest is {facts.newest_version}" if versions else ""
    table.add_row("versions", f"{versions} of this run on the log{newest}")
    if snapshot is not None:
        owned = f", {snapshot.homes_owned} of {snapshot.homes} homes owned"
        table.add_row("environments", f"{snapshot.environment_workers} workers{owned}")
        table.add_row("routers", str(snapshot.routers))
        lag = ", ".join(f"{count} in {topic.name}" for topic, count in snapshot.lag.items())
        table.add_row("behind by", f"{lag} (offsets)")
    console.print(table, highlight=False)
    console.print()
    for line in finding_lines(findings):
        console.print(line, highlight=False, soft_wrap=True)


def _plain(facts: Facts, findings: list[Finding], snapshot: BrokerSnapshot | None, versions: int) -> dict[str, Any]:
    report: dict[str, Any] = msgspec.to_builtins(facts)
    report["versions"] = versions
    report["lag"] = {topic.name: count for topic, count in snapshot.lag.items()} if snapshot is not None else {}
    report["findings"] = msgspec.to_builtins(findings)
    report["well"] = all(finding.severity is not Severity.UNWELL for finding in findings)
    return report
