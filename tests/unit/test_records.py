"""Raw messages: their size on the wire."""

from hypothesis import given
from hypothesis import strategies as st

from rose.topics.records import RECORD_FRAMING_BYTES, RawMessage

LENGTHS = st.sampled_from([0, 1, 63, 64, 65, 8191, 8192, 8193]) | st.integers(0, 20_000)


def varint(number: int) -> bytes:
    """Encode a length as Kafka does: zigzag, seven bits a byte."""
    zigzag, found = number << 1, bytearray()
    while zigzag > 0x7F:
        found.append(zigzag & 0x7F | 0x80)
        zigzag >>= 7
    return bytes([*found, zigzag])


def written(raw: RawMessage) -> bytes:
    """Encode a record of a batch, with the largest number and timestamp."""
    assert raw.key is not None and raw.value is not None
    body = b"\0" + b"\xff" * 9 + b"\1" + varint(2**31 - 1)
    body += varint(len(raw.key)) + raw.key + varint(len(raw.value)) + raw.value + varint(len(raw.headers))
    for name, value in raw.headers:
        body += varint(len(name.encode())) + name.encode() + varint(len(value)) + value
    return varint(len(body)) + body


@given(LENGTHS, LENGTHS, st.lists(st.tuples(st.sampled_from(["a", "ü" * 40]), LENGTHS), max_size=30))
def test_message_size_exceeds_the_size_on_the_wire_by_less_than_the_framing(
    key: int, value: int, headers: list[tuple[str, int]]
) -> None:
    raw = RawMessage(bytes(key), bytes(value), tuple((name, bytes(length)) for name, length in headers))
    assert raw.size - RECORD_FRAMING_BYTES < len(written(raw)) <= raw.size
