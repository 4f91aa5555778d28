"""`rose grant`: one lender is told to lend, or to park."""

import sys
import time
from contextlib import closing

import msgspec

from pipeline.command.config import load
from pipeline.command.options import Common
from schemas.capacity import CapacityGrant
from schemas.errors import UsageError
from topics.access import OPERATOR
from topics.catalog import GRANTS
from topics.permission import reach_as
from topics.writer import Writer


def send_grant(common: Common, worker: str, *, lend: bool, kv_bytes: int, token_budget: int, reason: str) -> None:
    """Write the worker's newest grant. Raises UsageError, BrokerUnreachable, TopicMissing or BusError."""
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
    settings = load(common).bus()
    reach_as(settings, OPERATOR)
    with closing(Writer(settings, "rose-grant")) as writer:
        writer.write(GRANTS, grant, key=worker)
        writer.flush()
    sys.stdout.write(f"{worker} is to {'lend' if lend else 'park'}\n")
