"""`rose replay` and `rose why`: the state and history of one trajectory or group, from the log."""

import sys
from collections.abc import Sequence
from contextlib import closing
from typing import TextIO

from rose.pipeline.config.load import load
from rose.pipeline.config.options import Common
from rose.pipeline.local.broker import readable_log
from rose.pipeline.replay.description import describe_trajectory
from rose.pipeline.replay.records import (
    GroupFound,
    TrajectoryFound,
    UnknownTrajectory,
    find_group,
    find_trajectory,
    fold_trajectory,
)
from rose.pipeline.replay.steps import Step, step_after, trajectory_steps
from rose.pipeline.replay.why import GroupFacts, PromptAt, why_group, why_trajectory
from rose.pipeline.terminal import CLEAR, print_line, read_commands
from rose.schemas.limits import MAX_GROUP_SIZE
from rose.topics.acl import VIEW, connect_as
from rose.topics.catalog import ENVIRONMENT_GROUP, PROMPTS, Topic, home_partition
from rose.topics.reader import Reader
from rose.topics.records import Place
from rose.topics.settings import BusSettings
from rose.workers.environments.turn_format import TurnFormat, TurnFormatError


def print_replay(common: Common, trajectory: str, *, stepwise: bool) -> None:
    """`rose replay`: prints the trajectory turn by turn, or walks through it. Raises UnknownTrajectory."""
    config = load(common)
    with readable_log(config) as settings:
        connect_as(settings, VIEW)
        group = _group_of(settings, trajectory)
        if group is None or group.size is None:
            raise UnknownTrajectory(trajectory)
        found = find_trajectory(settings, group, trajectory).records
    decode = None
    try:
        decode = TurnFormat(config.settings.environment.model_folder).action_text
    except TurnFormatError as error:
        sys.stderr.write(f"without text: {error}\n")
    history = fold_trajectory(trajectory, found)
    if stepwise:
        walk(trajectory_steps(history, decode), sys.stdin, is_terminal=sys.stdin.isatty() and sys.stdout.isatty())
        return
    for line in describe_trajectory(history, decode):
        print_line(line)


def walk(steps: Sequence[Step], commands: TextIO, *, is_terminal: bool) -> None:
    """Show one step, and another one for each command, until the commands end. `is_terminal`: clears the screen."""
    at = 0
    read = read_commands(commands)
    while True:
        if is_terminal:
            sys.stdout.write(CLEAR)
        print_line(f"{at + 1} of {len(steps)}: {steps[at].title}")
        for line in steps[at].lines:
            print_line(line)
        if is_terminal:
            print_line("\nright or n: next, left or p: previous, q: quit")
        sys.stdout.flush()
        at_next = None
        while at_next is None:
            command = next(read, "q")
            if command == "q":
                return
            at_next = step_after(at, len(steps), command)
        at = at_next


def print_why(common: Common, name: str) -> None:
    """`rose why`: prints the state of a trajectory or a group. Raises UnknownTrajectory if the name is neither."""
    with readable_log(load(common)) as settings:
        connect_as(settings, VIEW)
        lines = []
        if _is_known(group := find_group(settings, name)):
            facts = _group_facts(settings, group, find_trajectory(settings, group, name))
            lines.append(f"group {name} {why_group(facts)}")
        if (of := _group_of(settings, name)) is not None:
            found = find_trajectory(settings, of, name)
            facts = _group_facts(settings, of, found)
            lines.append(f"{name}: {why_trajectory(facts, found.records)}")
    if not lines:
        raise UnknownTrajectory(name)
    for line in lines:
        print_line(line.replace("\n", "\\n"))  # the message of an environment's error may have several lines


def _group_of(settings: BusSettings, name: str) -> GroupFound | None:
    """Return the group that has a trajectory of this name; None if there is none."""
    group_id, _, index = name.rpartition(":")
    if not index.isdecimal():
        return None
    group = find_group(settings, group_id)
    has = any(index == str(number) for number in range(MAX_GROUP_SIZE if group.size is None else group.size))
    return group if has and _is_known(group) else None


def _is_known(group: GroupFound) -> bool:
    return group.size is not None or bool(group.dead_letters)


def _group_facts(settings: BusSettings, group: GroupFound, found: TrajectoryFound) -> GroupFacts:
    prompts: list[PromptAt] = []
    refused = {(letter.partition, letter.offset): letter.reason for letter in group.dead_letters}
    with closing(Reader(settings, "rose-why", group=ENVIRONMENT_GROUP)) as reader:
        homes = reader.partition_count(PROMPTS)
        places: list[Place] = [(PROMPTS, prompt.partition) for prompt in group.prompts]
        read = reader.committed(places) if places else {}
    home = home_partition(group.group_id, homes)
    for prompt in group.prompts:
        place = prompt.partition, prompt.offset
        prompts.append(
            PromptAt(
                place=_place(PROMPTS, *place),
                home=home,
                at_home=prompt.partition == home,
                refused=refused.pop(place, None),
                before=max(0, prompt.offset - (read[PROMPTS, prompt.partition] or 0)),
            )
        )
    for (partition, offset), reason in refused.items():  # the prompt is no longer on the log, or was never decoded
        at_home = partition == home
        prompts.append(PromptAt(place=_place(PROMPTS, partition, offset), home=home, at_home=at_home, refused=reason))
    return GroupFacts(
        group_id=group.group_id,
        group=group.record,
        prompts=tuple(prompts),
        open_at_home=group.open_at_home,
        size=group.size or 0,
        live=frozenset(found.live),
        sampled=frozenset(found.sampled),
        settled=tuple(found.settled),
    )


def _place(topic: Topic, partition: int, offset: int) -> str:
    return f"{topic.name}/{partition}/{offset}"
