"""Base of all records.

Keeps true, from 0.2.0 on
- Fields are only ever added, with defaults. Unknown fields are ignored, except in a prompt. No bound becomes narrower:
  `tests/golden/` has the bytes and the contract of every release.
- A bound or enumeration becomes wider in two releases: the first reads the new values, the next one writes them.
"""

from typing import ClassVar

import msgspec

from rose.schemas.limits import MAX_RECORD_BYTES, RECORD_OVERHEAD_BYTES


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A typed, immutable record: one MessagePack map of field names to values on the wire."""

    SCHEMA: ClassVar[str]
    """`<record>/<number>`, as the header `rose-schema` says it. Readers look at the name; the number tells people how
    often it has grown.
    """

    MAX_BYTES: ClassVar[int] = MAX_RECORD_BYTES + RECORD_OVERHEAD_BYTES
    """Most bytes of the encoded record, with what a newer writer has added to it."""
