"""Bounds of records, so that nothing from the wire can take memory before it is checked."""

from typing import Annotated

from msgspec import Meta

MAX_RECORD_BYTES = 900 * 1024
"""Bytes of the largest record, but for the records that hold a whole context. A bigger payload is cut into chunks or
lives in an object store."""

RECORD_OVERHEAD_BYTES = 16 * 1024
"""Room for field names and ids in addition to the largest payload."""

MAX_CONTEXT_TOKENS = 262_144
"""Most tokens of a context: a sample has 9 bytes for each token (id, mask, logprob), and is one record."""

MAX_TURN_TOKENS = 65_536
"""Most sampled tokens of one turn."""

MAX_GROUP_SIZE = 4_096
"""Most trajectories of one prompt."""

MAX_DEFERRALS = 1_000
"""Most times that a group is deferred."""

MAX_CHAIN = 64
"""Most requests of a chain, the anchor included: as many records are read back at most."""

MAX_TURNS = 512
"""Most turns of one trajectory."""

MAX_SPANS = 2_048
"""Most policy-version spans of one trajectory. A turn has one span, and one more for each version change while it
ran."""

MAX_STOP_TOKENS = 16
"""Most stop tokens of a turn."""

MAX_NESTING = 64
"""Most lists and maps within one another in a field that holds values of any type. The bound keeps every check,
encoding and decoding within any stack."""

MAX_INFO_BYTES = 64 * 1024
"""Most bytes of an environment's remarks at the end of a trajectory, encoded."""

MAX_GROUP_ID_CHARACTERS = 120
"""Most characters of a group id; a trajectory's id is `<group id>:<index>`."""

Id = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,128}\Z")]
"""Id of a worker, run or model: readable in kcat, safe in a file name."""

GroupId = Annotated[str, Meta(pattern=rf"^[A-Za-z0-9._:/@#+=,~-]{{1,{MAX_GROUP_ID_CHARACTERS}}}\Z")]
"""Id of a group, in the characters by which data sets name tasks. No file and no URL is named by it."""

TrajectoryId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:/@#+=,~-]{1,128}\Z")]

Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]

Count = Annotated[int, Meta(ge=0, le=2**53)]
Version = Annotated[int, Meta(ge=-1, le=2**53)]
"""A policy version; -1 means that none has been proven yet."""

Moment = Annotated[float, Meta(ge=0, le=253_402_300_799)]
"""Unix seconds, before the year 10,000: a number that every clock and calendar takes."""

MAX_REWARD = 1e12
"""A larger reward, or its square, may be infinite in a training step, which would be lost for all of its groups."""

Reward = Annotated[float, Meta(ge=-MAX_REWARD, le=MAX_REWARD)]

Seconds = Annotated[float, Meta(ge=-1e15, le=1e15)]
"""A span of time, in seconds. The bounds keep sums of spans finite, and NaN is refused."""


def _packed(tokens: int, what: str) -> Meta:
    """Bounds and description of 4 bytes for each of at most `tokens` tokens."""
    return Meta(max_length=4 * tokens, description=what)


_IDS = "Token ids, packed as little-endian uint32."
_LOGPROBS = "Natural logarithms of probabilities, packed as little-endian IEEE 754 float32."

Tokens = Annotated[bytes, _packed(MAX_CONTEXT_TOKENS, _IDS)]
"""The tokens of a context."""

Logprobs = Annotated[bytes, _packed(MAX_CONTEXT_TOKENS, _LOGPROBS)]

TurnTokens = Annotated[bytes, _packed(MAX_TURN_TOKENS, _IDS)]
"""The sampled tokens of one turn."""

TurnLogprobs = Annotated[bytes, _packed(MAX_TURN_TOKENS, _LOGPROBS)]

Mask = Annotated[bytes, Meta(max_length=MAX_CONTEXT_TOKENS, description="One byte a token, 0 or 1.")]

MAX_TEXT_CHARACTERS = 4_096

Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARACTERS)]
"""A reason or note for people."""

Digest = Annotated[
    bytes,
    Meta(
        min_length=16,
        max_length=16,
        description="16 bytes. In records of weights: the first 16 of BLAKE3. Elsewhere: BLAKE2b with a digest of 16 "
        "bytes, which is not the beginning of a longer digest.",
    ),
]
