"""The state of a trajectory's environment, saved where a turn left state (Crab, arXiv 2604.28138)."""

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from schemas.limits import RECORD_BYTES, Count, Digest, Id
from schemas.prompts import Prompt
from schemas.record import Record
from schemas.turns import Partition, Turn


class LogPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Where a trajectory begins in its home partition: all of its later records lie at or after these offsets."""

    requested: Count
    completed: Count


class EnvSnapshot(Record, frozen=True, kw_only=True):
    """The environment as turn `turn` found it. The newest of a trajectory counts; a tombstone says it has ended."""

    SCHEMA: ClassVar[str] = "env-snapshot/1"

    trajectory_id: Id
    index: Count
    """Of the trajectory in its group."""
    prompt: Prompt
    home: Partition
    turn: Turn
    """The turn that was asked for when this was taken; its observation is part of that request's context."""
    digest: Digest
    """Of `state`: no new snapshot is written while it stays the same."""
    state: Annotated[bytes, Meta(max_length=RECORD_BYTES)]
    opened: LogPosition
