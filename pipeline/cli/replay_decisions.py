"""`rose replay --from --to`: repeats the decisions of routers and control apps, and compares them with the log."""

import math
import sys
from contextlib import closing
from datetime import UTC, datetime

import typer

from rose.pipeline.config.load import load
from rose.pipeline.config.options import Common
from rose.pipeline.journal import MICROSECONDS
from rose.pipeline.local.broker import readable_log
from rose.pipeline.replay.decisions import replay_core
from rose.pipeline.replay.differences import describe_replays
from rose.pipeline.replay.recorded_cores import KafkaLog, read_recorded_cores, unjournaled_decisions
from rose.pipeline.terminal import print_line
from rose.schemas.errors import RoseError, UsageError
from rose.topics.acl import REPLAY, connect_as

EXPLAINED = 3
"""Differing turns of each core whose costs on all executors are printed."""


def compare_decisions(common: Common, since: str | None, until: str | None) -> None:
    """Print what came of the replay. Raises typer.Exit with status 1 if a decision differs, or RoseError."""
    begin, end = parse_time(since, -math.inf), parse_time(until, math.inf)
    if begin > end:
        raise UsageError("--from is later than --to")
    config = load(common)
    with readable_log(config) as settings:
        connect_as(settings, REPLAY)
        cores = read_recorded_cores(settings)
        with closing(KafkaLog(settings)) as log:
            replays = [
                replay_core(core, log, since=begin, until=end, explained=EXPLAINED)
                for core in cores
                if core.began_at / MICROSECONDS <= end and core.ended_at >= begin
            ]
        unjournaled = unjournaled_decisions(settings, cores, begin, end)
    if not replays:
        raise RoseError(
            "the log has no journal of that time: journals are kept as long as heartbeats, "
            f"{config.retention.heartbeats:.0f} s (topics.heartbeats_retention_seconds)"
        )
    for line in describe_replays(replays, unjournaled):
        print_line(line)
    sys.stdout.flush()
    if any(replay.differences for replay in replays):
        raise typer.Exit(1)


def parse_time(text: str | None, default: float) -> float:
    """Return the time in unix seconds: ISO 8601, UTC without an offset, or unix seconds. Raises UsageError."""
    if text is None:
        return default
    try:
        if math.isfinite(seconds := float(text)):
            return seconds
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"{text} is no time: write it as 2026-01-31T12:00:00, in UTC, or in unix seconds") from None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
