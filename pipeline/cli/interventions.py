"""`rose grant`, `rose drain` and `rose settle`: an operator writes or deletes grants, and ends trajectories.

Keeps true
- `rose drain` returns only when the executor holds no turns, and fails otherwise, because the operator removes the
  executor's node afterwards.
- `rose settle` only writes requests. The environment worker that owns the group applies them before it applies another
  result, so a trajectory that ends by itself in the meantime still has exactly one outcome.
"""

import re
import sys
import time
from contextlib import closing

import msgspec
from confluent_kafka import OFFSET_END

from rose.pipeline.config.load import load
from rose.pipeline.config.options import Common
from rose.pipeline.replay.records import GroupFound, UnknownTrajectory, find_group
from rose.pipeline.terminal import print_line
from rose.schemas.errors import RoseError, UsageError
from rose.schemas.grants import CapacityGrant, GrantSource, grant_key
from rose.schemas.heartbeats import DRAINED_REASON, MOVING_REASON, ExecutorState, SlackHeartbeat
from rose.schemas.limits import Id
from rose.schemas.progress import GroupState, SettleRequest
from rose.schemas.prompts import trajectory_id
from rose.topics.acl import OPERATOR, connect_as
from rose.topics.catalog import GRANTS, HEARTBEATS, SETTLES
from rose.topics.reader import Reader
from rose.topics.records import Envelope
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer

DRAIN_TIMEOUT_SECONDS = 60.0
"""Default of `--within`: how long a drained executor may go on with the turns that it holds."""

HEARD_SECONDS = 5.0
"""How long to wait for the first heartbeat. A live executor sends several a second, and is GONE after 2 s."""

LATE_SECONDS = 10.0
"""Time beyond `within_seconds` in which an executor may still hold turns: an engine aborts turns between two steps."""


FIELD = re.compile(r"`\$\.(\w+)`")
"""A field of a grant in msgspec's error messages. The command has an option of the same name."""


class DrainTimeout(RoseError):
    """The executor still holds turns, or sends no heartbeats."""


def send_grant(common: Common, worker: str, *, lend: bool, kv_bytes: int, token_budget: int, reason: str) -> None:
    """Write a manual grant for the worker. Raises UsageError, BrokerUnreachable, TopicMissing or BusError."""
    grant = _make_grant(worker, lend=lend, kv_bytes=kv_bytes, token_budget=token_budget, reason=reason)
    _print_grant(_connect(common), worker, grant, GrantSource.BY_HAND)
    sys.stdout.write(f"{worker} is to {'lend' if lend else 'park'}\n")


def release_grant(common: Common, worker: str) -> None:
    """Delete the worker's manual grant. Raises the same errors as `send_grant`."""
    _release(common, worker, GrantSource.BY_HAND)
    sys.stdout.write(f"{worker} follows the control app, where there is one\n")


def drain(common: Common, worker: str, *, within_seconds: float, reason: str) -> None:
    """Stop an executor from accepting turns, and wait until it holds none.

    Turns that have not ended after `within_seconds` are returned to the router. Raises DrainTimeout if the executor
    sends no heartbeats or still holds turns afterwards, and the same errors as `send_grant`.
    """
    grant = _make_grant(worker, lend=False, reason=reason, finish_seconds=within_seconds)
    settings = _connect(common)
    with closing(Reader(settings, "rose-drain")) as reader:
        reader.assign({(HEARTBEATS, cell): OFFSET_END for cell in range(reader.partition_count(HEARTBEATS))})
        _print_grant(settings, worker, grant, GrantSource.DRAIN)
        _await_empty(reader, worker, within_seconds)
    sys.stdout.write(
        f"{worker} is drained: it holds nothing, and takes nothing until `rose drain {worker} --release`\n"
    )


def release_drain(common: Common, worker: str) -> None:
    """Delete the worker's drain grant. Raises the same errors as `send_grant`."""
    _release(common, worker, GrantSource.DRAIN)
    sys.stdout.write(f"{worker} is drained no more\n")


def _await_empty(reader: Reader, worker: str, within_seconds: float) -> None:
    """Read heartbeats until the worker holds no turns. Raises DrainTimeout or BusError."""
    began = time.monotonic()
    newest: SlackHeartbeat | None = None
    while time.monotonic() < began + (HEARD_SECONDS if newest is None else within_seconds + LATE_SECONDS):
        for item in reader.read(500, 0.1):
            if isinstance(item, Envelope) and isinstance(item.record, SlackHeartbeat) and item.record.worker == worker:
                newest = item.record
        if newest is not None and _is_empty(newest):
            return
    if newest is None:
        raise DrainTimeout(
            f"no executor named {worker} sends heartbeats: the drain takes effect when the executor starts; "
            f"`rose drain {worker} --release` takes that back"
        )
    raise DrainTimeout(f"{worker} still holds {len(newest.holds) // 8} turns: its engine does not give them back")


def _is_empty(heartbeat: SlackHeartbeat) -> bool:
    if heartbeat.state is ExecutorState.STOPPING:  # its turns are answered; a moving executor goes on in another cell
        return not heartbeat.paused_reason.startswith(MOVING_REASON)
    return heartbeat.paused_reason.startswith(DRAINED_REASON) and not heartbeat.holds


def _make_grant(worker: str, *, lend: bool, kv_bytes: int = 0, token_budget: int = 0, **terms: object) -> CapacityGrant:
    """Build a grant. Raises UsageError for a field that a grant does not allow."""
    fields = {"worker": worker, "lend": lend, "kv_bytes": kv_bytes, "token_budget": token_budget, **terms}
    try:
        return msgspec.convert({**fields, "granted_at": time.time()}, CapacityGrant)
    except msgspec.ValidationError as error:
        sentence = FIELD.sub(lambda found: f"--{found[1].replace('_', '-')}", str(error))
        raise UsageError(f"no such grant can be made: {sentence}") from None


def _release(common: Common, worker: str, source: GrantSource) -> None:
    try:
        msgspec.convert(worker, Id)
    except msgspec.ValidationError as error:
        raise UsageError(f"that is no worker: {error}") from None
    _print_grant(_connect(common), worker, None, source)


def _connect(common: Common) -> BusSettings:
    settings = load(common).bus()
    connect_as(settings, OPERATOR)
    return settings


def _print_grant(settings: BusSettings, worker: str, grant: CapacityGrant | None, source: GrantSource) -> None:
    with closing(Writer(settings, "rose-grant")) as writer:
        if grant is None:
            writer.tombstone(GRANTS, key=grant_key(worker, source), partition=0)
        else:
            writer.write(GRANTS, grant, key=grant_key(worker, source))
        writer.flush()


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
        f"it, or when it starts; what has ended stays as it is, also where its sample was deleted; `rose why {name}` "
        "tells"
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
    refused = {(letter.partition, letter.offset) for letter in group.dead_letters}
    waiting = [
        found.offset
        for found in group.prompts
        if found.partition == group.home and (found.partition, found.offset) not in refused
    ]
    if not waiting:
        raise UsageError(f"the prompt of group {group.group_id} was refused, or is on its way: `rose why` tells")
    return waiting[0]
