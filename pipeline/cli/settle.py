"""`rose settle`: ends a trajectory, or all trajectories of a group, as a failure of the infrastructure.

Keeps true: the command only writes requests. The environment worker that owns the group applies them before it applies
another result, so a trajectory that ends by itself in the meantime still has exactly one outcome.
"""

import time
from contextlib import closing

import msgspec

from rose.pipeline.config.load import load
from rose.pipeline.config.options import Common
from rose.pipeline.process.terminal import print_line
from rose.pipeline.replay.search import GroupFound, UnknownTrajectory, find_group
from rose.schemas.errors import UsageError
from rose.schemas.progress import GroupState, SettleRequest
from rose.schemas.prompts import trajectory_id
from rose.topics.acl import OPERATOR, connect_as
from rose.topics.catalog import SETTLES
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer


def settle_by_hand(common: Common, name: str, reason: str) -> None:
    """Request the end of a trajectory, or of the trajectories of a group that have not ended.

    `name` is GROUP_ID:INDEX or GROUP_ID. Raises UnknownTrajectory, UsageError for a group that has settled or a reason
    that is too long, or BusError.
    """
    settings = load(common).bus()
    connect_as(settings, OPERATOR)
    group, indexes = _find_trajectories(settings, name)
    offset = _offset_of(group)
    asked_at = time.time()
    try:
        requests = [
            msgspec.convert(
                {
                    "trajectory_id": trajectory_id(group.group_id, index),
                    "group_id": group.group_id,
                    "offset": offset,
                    "reason": reason,
                    "asked_at": asked_at,
                },
                SettleRequest,
            )
            for index in indexes
        ]
    except msgspec.ValidationError as error:
        raise UsageError(f"that cannot be asked for: {error}") from None
    with closing(Writer(settings, "rose-settle")) as writer:
        for request in requests:
            writer.write(SETTLES, request, key=request.trajectory_id)
            writer.poll()
        writer.flush()
    what = f"group {name}" if name == group.group_id else f"trajectory {indexes[0]} of group {group.group_id}"
    print_line(
        f"what of {what} has not ended is to end as infra_failed: its environment worker does that when it hears of "
        f"it, or when it starts; `rose why {name}` tells"
    )


def _find_trajectories(settings: BusSettings, name: str) -> tuple[GroupFound, list[int]]:
    """Return the group and the indexes of the named trajectories. Raises UnknownTrajectory.

    A name that fits both a trajectory and a group means the trajectory: the trajectories of the group can be named one
    by one.
    """
    group_id, _, index = name.rpartition(":")
    if index.isdecimal():
        group = find_group(settings, group_id)
        if indexes := [number for number in range(group.size or 0) if index == str(number)]:
            return group, indexes
    group = find_group(settings, name)
    if group.size is None:
        raise UnknownTrajectory(name)
    return group, list(range(group.size))


def _offset_of(group: GroupFound) -> int:
    """Return the offset of the prompt that opened the group, or will open it. Raises UsageError if there is none."""
    if group.record is not None and group.record.state is GroupState.OPEN:
        return group.record.offset
    if group.record is not None and group.record.state is GroupState.SETTLED:
        raise UsageError(f"every trajectory of group {group.group_id} has its outcome already")
    refused = {(letter.partition, letter.offset) for letter in group.letters}
    waiting = [
        found.offset
        for found in group.prompts
        if found.partition == group.home and (found.partition, found.offset) not in refused
    ]
    if not waiting:
        raise UsageError(f"the prompt of group {group.group_id} was refused, or is on its way: `rose why` tells")
    return waiting[0]
