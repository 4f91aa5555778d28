"""A context put together from the requests that have appended to it.

Keeps true: a returned context has the length and the digest of its request; any other case is a `ContextMissing`.
"""

import hashlib
from collections.abc import Mapping
from typing import TypedDict

from rose.schemas.arrays import ITEM_BYTES, count
from rose.schemas.errors import RoseError
from rose.schemas.turns import TurnRequest


class ContextMissing(RoseError):
    """A context cannot be assembled from these requests. A new request with an anchor mends that."""


class ContextFields(TypedDict):
    """Fields of a request that describe its context."""

    appended: bytes
    context_tokens: int
    digest: bytes
    chain: tuple[int, ...]


def context_fields(context: bytes, chain: tuple[int, ...] = (), *, known_tokens: int = 0) -> ContextFields:
    """Return the context fields of a request.

    `context`: the whole context, packed. `chain`: offsets of the requests that the request goes on from. These have
    appended the first `known_tokens` tokens.
    """
    return {
        "appended": context[ITEM_BYTES * known_tokens :],
        "context_tokens": count(context),
        "digest": context_digest(context),
        "chain": chain,
    }


def context_digest(context: bytes) -> bytes:
    """Return the digest of a packed context: 16 bytes of BLAKE2b."""
    return hashlib.blake2b(context, digest_size=16).digest()


def matches_context(request: TurnRequest, context: bytes) -> bool:
    """Whether these packed tokens are the context of the request."""
    return len(context) == ITEM_BYTES * request.context_tokens and context_digest(context) == request.digest


def assemble_context(request: TurnRequest, requests: Mapping[int, TurnRequest]) -> bytes:
    """Return the packed context of a request.

    `requests`: the requests of its chain, by offset. Raises ContextMissing.
    """
    parts = []
    for offset in request.chain:
        link = requests.get(offset)
        if link is None or link.trajectory_id != request.trajectory_id:
            raise ContextMissing(
                f"the request at offset {offset}, which turn {request.turn} goes on from, is not on the log"
            )
        parts.append(link.appended)
    context = b"".join((*parts, request.appended))
    if not matches_context(request, context):
        raise ContextMissing(
            f"the requests that turn {request.turn} goes on from are not its {request.context_tokens} tokens"
        )
    return context
