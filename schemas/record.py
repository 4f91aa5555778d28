"""What all records share.

Keeps true: evolution is full-transitive. Fields are only ever added, with defaults; unknown fields are ignored; every
version ever shipped has its golden bytes in `tests/golden/`.
"""

from typing import ClassVar

import msgspec

from schemas.limits import RECORD_BYTES, RECORD_OVERHEAD_BYTES


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A typed, immutable record: one MessagePack map of field names to values on the wire."""

    SCHEMA: ClassVar[str]
    """`<record>/<version>`, as the header `rose-schema` says it."""

    MOST_BYTES: ClassVar[int] = RECORD_BYTES + RECORD_OVERHEAD_BYTES
    """Of the record encoded, with what a newer writer has added to it."""
