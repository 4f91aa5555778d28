"""`rose samples`: reads a run's log and prints, shows or exports its finished trajectories."""

import math
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console

from rose.pipeline.cli.replay_decisions import parse_time
from rose.pipeline.clock import format_utc
from rose.pipeline.config.load import Config, load
from rose.pipeline.config.options import Common, is_writable
from rose.pipeline.local.broker import readable_log
from rose.pipeline.samples.advantages import Advantage, GroupAdvantages
from rose.pipeline.samples.attempts import Decode, version_span, view_of
from rose.pipeline.samples.export import FORMATS, RowWriter, export_row, open_writer
from rose.pipeline.samples.log import (
    CLIENT,
    WAITING,
    FinishedGroup,
    FinishedTrajectory,
    SampleFilter,
    read_groups,
    read_trajectories,
)
from rose.pipeline.samples.screen import group_page, print_group
from rose.pipeline.samples.serving_load import ServingLoads
from rose.pipeline.terminal import print_line
from rose.schemas.errors import UsageError
from rose.schemas.heartbeats import SlackHeartbeat
from rose.schemas.prompts import is_evaluation
from rose.schemas.samples import Outcome
from rose.topics.acl import VIEW, connect_as
from rose.topics.catalog import HEARTBEATS
from rose.topics.log_reader import CLOCKS_APART_SECONDS, read_keyed_messages, topic_starts
from rose.topics.reader import Reader
from rose.topics.settings import BusSettings
from rose.workers.environments.turn_format import TurnFormat, TurnFormatError

NAMES = (*(outcome.value for outcome in Outcome), WAITING)
"""Names that `--outcome` takes."""

TRAJECTORY_LINE = "{:<28} {:<12} {:>5} {:>8} {:>7} {:>9} {:>5} {:>7} {:>8}  {}"
TRAJECTORY_TITLES = (
    *("TRAJECTORY", "OUTCOME", "STEP", "REWARD", "SUCCESS"),
    *("VERSIONS", "TURNS", "TOKENS", "SAMPLED", "ENDED"),
)
GROUP_LINE = "{:<28} {:>9} {:>5} {:>8} {:>7} {:>9} {:>6} {:>8}  {}"
GROUP_TITLES = ("GROUP", "MEMBERS", "STEP", "REWARD", "SUCCESS", "VERSIONS", "TURNS", "TOKENS", "OUTCOMES")
"""Columns of the lists. Figures of a group are means over its members."""

YES_OR_NO = {True: "yes", False: "no", None: "-"}


def filter_of(
    group: str | None, outcomes: list[str] | None, step: int | None, since: str | None, until: str | None
) -> SampleFilter:
    """Return the filter that the options describe. Raises UsageError."""
    for name in outcomes or ():
        if name not in NAMES:
            raise UsageError(f"--outcome {name} is no outcome: give one of {', '.join(NAMES)}")
    begin, end = parse_time(since, -math.inf), parse_time(until, math.inf)
    if begin > end:
        raise UsageError("--since is later than --until")
    return SampleFilter(group=group, outcomes=frozenset(outcomes or ()), step=step, since=begin, until=end)


def print_list(common: Common, wanted: SampleFilter, *, groups: bool, limit: int | None) -> None:
    """`rose samples list`: prints a line for each wanted trajectory or group."""
    with readable_log(load(common)) as settings:
        connect_as(settings, VIEW)
        if groups:
            print_line(GROUP_LINE.format(*GROUP_TITLES))
            with closing(read_groups(settings, wanted)) as found:
                for group in islice(found, limit):
                    print_line(GROUP_LINE.format(*_group_cells(group)))
        else:
            print_line(TRAJECTORY_LINE.format(*TRAJECTORY_TITLES))
            with closing(read_trajectories(settings, wanted)) as each:
                for trajectory in islice(each, limit):
                    print_line(TRAJECTORY_LINE.format(*_trajectory_cells(trajectory)))


def _trajectory_cells(found: FinishedTrajectory) -> tuple[str, ...]:
    sample, outcome = found.sample, found.outcome
    return (
        sample.trajectory_id,
        found.ended_as,
        "-" if outcome is None else str(outcome.step),
        "-" if sample.reward is None else f"{sample.reward:g}",
        YES_OR_NO[sample.success],
        version_span(found.versions),
        str(len(sample.turns)),
        str(len(sample.loss_mask)),
        str(found.sampled_tokens),
        format_utc(sample.completed_at),
    )


def _group_cells(group: FinishedGroup) -> tuple[str, ...]:
    samples = [each.sample for each in group.members]
    steps = {each.outcome.step for each in group.members if each.outcome is not None}
    versions = [version for each in group.members if each.versions is not None for version in each.versions]
    counts = Counter(each.ended_as for each in group.members)
    return (
        group.group_id,
        f"{len(samples)} of {group.size}",
        ",".join(map(str, sorted(steps))) or "-",
        _mean([sample.reward for sample in samples if sample.reward is not None], "{:.3f}"),
        _mean([sample.success for sample in samples if sample.success is not None], "{:.0%}"),
        version_span((min(versions), max(versions)) if versions else None),
        _mean([len(sample.turns) for sample in samples], "{:.1f}"),
        _mean([len(sample.loss_mask) for sample in samples], "{:.0f}"),
        ", ".join(f"{counts[name]} {name}" for name in NAMES if counts[name]),
    )


def _mean(values: list[Any], shown: str) -> str:
    return shown.format(sum(values) / len(values)) if values else "-"


def show_attempts(common: Common, group_id: str, page: Path | None) -> None:
    """`rose samples show`: shows the attempts of a group in the terminal, or writes a page. Raises UsageError."""
    _check_target("--html", page)
    config = load(common)
    with readable_log(config) as settings:
        connect_as(settings, VIEW)
        with closing(read_groups(settings, SampleFilter(group=group_id))) as found:
            group = next(found, None)
        if group is None:
            raise UsageError(
                f"the log has no finished trajectory of group {group_id}: `rose samples list --groups` lists the "
                "groups, and `rose why` says where this one is"
            )
        loads = ServingLoads()
        for each in group.members:
            for turn in each.sample.turns:
                loads.add_turn(each.sample.trajectory_id, turn)
        loads.add(_heartbeats(settings, loads.extent))
    advantages = GroupAdvantages(config.settings.trainer).of(group)
    view = view_of(group, advantages, loads, _decoder(config))
    if page is None:
        print_group(view, Console())
    else:
        page.write_text(group_page(view), encoding="utf-8")
        print_line(f"the attempts of group {group_id} are in {page}")


def _heartbeats(settings: BusSettings, extent: tuple[float, float] | None) -> Iterable[SlackHeartbeat]:
    """Yield the heartbeats of this time, by each worker's clock; those that do not decode are left out."""
    if extent is None:
        return
    places = list(topic_starts(settings, [HEARTBEATS], client_id=CLIENT))
    with closing(Reader(settings, CLIENT)) as reader:
        begins = reader.offsets_at(places, extent[0] - CLOCKS_APART_SECONDS)
    behind: set[int] = set()
    for message in read_keyed_messages(settings, begins, client_id=CLIENT):
        if message.timestamp_seconds > extent[1] + CLOCKS_APART_SECONDS:
            behind.add(message.partition)
            if len(behind) == len(places):
                return
        elif (heartbeat := message.decoded(SlackHeartbeat)) is not None:
            yield heartbeat


def _decoder(config: Config) -> Decode | None:
    """Return the decoder of the model folder; None, with a notice, if the folder has no usable tokenizer."""
    try:
        return TurnFormat(config.settings.environment.model_folder).text
    except TurnFormatError as error:
        sys.stderr.write(f"without text: {error}\n")
        return None


def _check_target(option: str, target: Path | None) -> None:
    if target is not None and not is_writable(target):
        raise UsageError(f"{option} {target} cannot be written: name a file, in a folder that may be written")


def export_to(common: Common, target: Path, file_format: str, wanted: SampleFilter, *, limit: int | None) -> None:
    """`rose samples export`: writes the wanted trajectories. Raises UsageError."""
    if file_format not in FORMATS:
        raise UsageError(f"--format {file_format} is no format: give one of {', '.join(FORMATS)}")
    if file_format != "verl":
        _check_target("FILE", target)
    elif not target.parent.is_dir():
        raise UsageError(f"{target.parent} is no folder: make it, or name another place for the samples")
    config = load(common)
    decode = _decoder(config)
    if decode is None and file_format in ("trl", "verl"):
        raise UsageError(f"--format {file_format} has texts, which need the tokenizer of model.folder")
    writer = open_writer(file_format, target)
    try:
        with readable_log(config) as settings:
            connect_as(settings, VIEW)
            advantages = GroupAdvantages(config.settings.trainer)
            done = _write(settings, wanted, writer, advantages, decode, file_format, limit)
        writer.close()
    except BaseException:
        writer.discard()
        raise
    print_line(f"{done.written} trajectories are in {target}")
    if done.left_out:
        print_line(f"left out: {done.left_out} without a reward, a sampled token or an outcome")
    if done.evaluated:
        print_line(f"left out: {done.evaluated} of evaluations (--outcome evaluated exports them)")
    for reason, count in sorted(done.reasons.items()):
        sys.stderr.write(f"{count} without an advantage: {reason}\n")


@dataclass(slots=True)
class _Exported:
    """Numbers of trajectories of an export."""

    written: int = 0
    left_out: int = 0
    evaluated: int = 0
    """Number of trajectories of evaluations that were left out."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Number of trajectories without an advantage, by reason."""


def _write(
    settings: BusSettings,
    wanted: SampleFilter,
    writer: RowWriter,
    advantages: GroupAdvantages,
    decode: Decode | None,
    file_format: str,
    limit: int | None,
) -> _Exported:
    """Write rows; trajectories of evaluations only if they were asked for, since exports are often trained on."""
    done = _Exported()
    with_evaluations = wanted.group is not None or Outcome.EVALUATED.value in wanted.outcomes
    with closing(read_groups(settings, wanted)) as groups:
        for group in groups:
            if is_evaluation(group.group_id) and not with_evaluations:
                done.evaluated += sum(map(wanted.accepts, group.members))
                continue
            known = advantages.of(group)
            for each in filter(wanted.accepts, group.members):
                advantage: Advantage = known[each.sample.trajectory_id]
                row = export_row(file_format, each, advantage, decode)
                if row is None:
                    done.left_out += 1
                    continue
                writer.write(row)
                done.written += 1
                if advantage.reason:
                    done.reasons[advantage.reason] += 1
                if done.written == limit:
                    return done
    return done
