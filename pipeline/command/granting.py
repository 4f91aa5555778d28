"""`rose grant`: one lender is told to lend, or to park, whatever the control app says; and to follow that again."""

import sys
import time
from contextlib import closing

import msgspec

from pipeline.command.config import load
from pipeline.command.options import Common
from schemas.capacity import CapacityGrant, key_by_hand
from schemas.errors import UsageError
from schemas.limits import Id
from topics.access import OPERATOR
from topics.catalog import GRANTS
from topics.permission import reach_as
from topics.writer import Writer


def send_grant(common: Common, worker: str, *, lend: bool, kv_bytes: int, token_budget: int, reason: str) -> None:
    """Write the worker's newest grant by hand. Raises UsageError, BrokerUnreachable, TopicMissing or BusError."""
    said = {
        "worker": worker,
        "lend": lend,
        "kv_bytes": kv_bytes,
        "token_budget": token_budget,
        "granted_at": time.time(),
        "reason": reason,
    }
    try:
        grant = msgspec.convert(said, CapacityGrant)
    except msgspec.ValidationError as error:
        raise UsageError(f"no such grant can be made: {error}") from None
    with _writer(common) as writer:
        writer.write(GRANTS, grant, key=key_by_hand(worker))
        writer.flush()
    sys.stdout.write(f"{worker} is to {'lend' if lend else 'park'}\n")


def release_grant(common: Common, worker: str) -> None:
    """Delete the worker's grant by hand. Raises as `send_grant`."""
    try:
        msgspec.convert(worker, Id)
    except msgspec.ValidationError as error:
        raise UsageError(f"that is no worker: {error}") from None
    with _writer(common) as writer:
        writer.tombstone(GRANTS, key=key_by_hand(worker), partition=0)
        writer.flush()
    sys.stdout.write(f"{worker} follows the control app, where there is one\n")


def _writer(common: Common) -> closing[Writer]:
    settings = load(common).bus()
    reach_as(settings, OPERATOR)
    return closing(Writer(settings, "rose-grant"))
