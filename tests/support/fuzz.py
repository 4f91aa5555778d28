"""Messages of a fuzzer: everything that a client with write access to one topic may write.

Keeps true: a seed gives the same messages. Each message is damaged, odd, forged or valid.
"""

import random
import socket
import struct
from collections.abc import Callable
from typing import Any
from urllib.request import urlopen

import msgspec

from rose.schemas.record import Record
from rose.schemas.turns import FENCING_KEY
from rose.schemas.weights import SIGNATURE_HEADER
from rose.schemas.wire import SCHEMA_HEADER, TRACE_HEADER, encode
from rose.topics.catalog import PROMPTS, Topic
from rose.topics.dead_letters import ORIGIN, SENT_BACK
from rose.topics.records import RawMessage
from tests.golden.examples import EXAMPLES

NUMBERS = [-1, 0, 1, 2, 7, 255, 4096, 65_535, 65_536, 2**31 - 1, 2**31, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1]
FLOATS = [0.0, -0.0, -1.0, 0.5, 1e-320, 1e-9, 1e12, 1e308, -1e308, float("nan"), float("inf"), float("-inf")]
TEXTS = ["", "g-1", "g-2", "g-1:3", "g-1:0", "g-1:4096", "executor-0", FENCING_KEY, "\x1b[2J", "ä" * 40, "x" * 5_000]
DEEP = (2, 40, 200, 900)
"""Depths of nested values. The largest is about the depth of a stack."""

LARGE_BYTES = 16 << 10
"""A message of this size is changed no further: each change may multiply a message by 2,048."""

BOMBS = tuple(byte * (16 << 20) for byte in (b"\0", b"\x91", b"{"))
"""Large values that compress to a thousandth of their size. The broker limits the compressed size."""


class FuzzGenerator:
    """A generator of messages; `message` returns the next."""

    def __init__(self, seed: int, *, examples: tuple[Record, ...] = EXAMPLES) -> None:
        self.draw = random.Random(seed)
        self._plain: dict[type[Record], list[Any]] = {}
        for example in examples:
            self._plain.setdefault(type(example), []).append(msgspec.msgpack.decode(encode(example)))

    def message(self, topic: Topic) -> RawMessage:
        """The next message for this topic."""
        return RawMessage(self.key(), self.value(topic), self.headers(topic))

    def value(self, topic: Topic) -> bytes | None:
        ways: list[tuple[int, Callable[[Topic], bytes | None]]] = [
            (8, self._odd),
            (4, self._damaged),
            (2, self._good),
            (2, lambda _: self.draw.randbytes(self.draw.choice([0, 1, 7, 60, 300]))),
            (2, lambda _: None),
            (1, self._of_another),
            (1, lambda _: self.draw.choice([b"\x91", b"[", b'{"a":', b"\x81\xa1a"]) * self.draw.randint(1, 20_000)),
            (1, lambda _: b"\xdd\xff\xff\xff\xff" + self.draw.randbytes(9)),
        ]
        (way,) = self.draw.choices([way for _, way in ways], [weight for weight, _ in ways])
        return way(topic)

    def key(self) -> bytes | None:
        kind = self.draw.randrange(6)
        if kind < 4:
            return self.draw.choice(TEXTS).encode()
        return self.draw.choice([None, b"", self.draw.randbytes(9), b"\xff" * 3, b"k" * 30_000])

    def headers(self, topic: Topic) -> tuple[tuple[str, bytes], ...]:
        """Return no headers, ROSE headers, or arbitrary headers under ROSE names and other names."""
        if self.draw.random() < 0.5:
            return ()
        assert topic.record is not None
        own = (SCHEMA_HEADER, topic.record.SCHEMA.encode())
        names = [SCHEMA_HEADER, TRACE_HEADER, SIGNATURE_HEADER, *ORIGIN, SENT_BACK, "key", "", "ä" * 9]
        odd = [
            (self.draw.choice(names), self.draw.choice([b"", b"9" * 30, self.draw.randbytes(64), b"00-" + b"f" * 52]))
            for _ in range(self.draw.choice([1, 1, 2, 60]))
        ]
        return (own, *(pair for pair in odd if pair[0] != SCHEMA_HEADER or self.draw.random() < 0.1))

    def bomb(self) -> RawMessage:
        """Return one of BOMBS, which the caller sends compressed."""
        return RawMessage(b"bomb", self.draw.choice(BOMBS))

    def _plain_of(self, topic: Topic) -> Any:
        assert topic.record is not None
        return msgspec.msgpack.decode(msgspec.msgpack.encode(self.draw.choice(self._plain[topic.record])))

    def _good(self, topic: Topic) -> bytes:
        return self._written(topic, self._plain_of(topic))

    def _damaged(self, topic: Topic) -> bytes:
        """Return a valid message with some bytes changed, removed or inserted."""
        wire = bytearray(self._good(topic))
        for _ in range(self.draw.choice([1, 1, 2, 8])):
            at = self.draw.randrange(len(wire))
            kind = self.draw.randrange(8)
            if kind == 0:
                del wire[at:]
            elif kind == 1:
                wire[at:at] = self.draw.randbytes(3)
            else:
                wire[at] = self.draw.randrange(256)
            if not wire:
                break
        return bytes(wire)

    def _odd(self, topic: Topic) -> bytes:
        """Return a valid message with some odd values at any depth."""
        plain = self._plain_of(topic)
        wire = b""
        for _ in range(self.draw.choice([1, 1, 2, 4])):
            self._change(plain)
            wire = self._written(topic, plain)
            if len(wire) > LARGE_BYTES:
                break
        return wire

    def _change(self, plain: Any) -> None:
        within = plain
        while True:
            keys = list(within) if isinstance(within, dict) else list(range(len(within)))
            if not keys:
                return
            key = self.draw.choice(keys)
            inner = within[key]
            if isinstance(inner, dict | list) and inner and self.draw.random() < 0.8:
                within = inner
                continue
            if isinstance(within, dict) and self.draw.random() < 0.05:
                del within[key]
            elif isinstance(within, dict) and self.draw.random() < 0.05:
                within["of_the_future"] = self._nested()
            else:
                within[key] = self._like(inner)
            return

    def _like(self, value: Any) -> Any:
        """Return an odd value, mostly of the same kind, so that it may be accepted."""
        draw = self.draw
        if draw.random() < 0.1:
            return draw.choice([None, True, [], {}, "x", b"x", 1, self._nested()])
        match value:
            case bool():
                return not value
            case int():
                return draw.choice([*NUMBERS, value + draw.randint(-2, 2)])
            case float():
                return draw.choice([*FLOATS, float(draw.randint(-9, 9))])
            case str():
                return draw.choice([*TEXTS, value + draw.choice(["x", "\n", ":0", " "])])
            case bytes():
                return draw.choice(
                    [
                        b"",
                        value[:-1],
                        value + b"\xff" * draw.randint(1, 9),
                        draw.randbytes(len(value)),
                        b"\xff" * len(value),
                        struct.pack("<f", float("nan")) * (len(value) // 4),
                        value * 50,
                    ]
                )
            case list():
                return draw.choice([[], value * 2, value[::-1], value * 600, value * 2_048, [*value[:1], None]])
            case dict():
                many = draw.choice([0, 1, 8, 9])
                return {
                    f"{draw.choice(TEXTS)[:9]}{n}": draw.choice([1.5, 1.5, -1.5, "x", self._nested()])
                    for n in range(many)
                }
        return draw.choice([*NUMBERS, *FLOATS, *TEXTS])

    def _nested(self) -> Any:
        found: Any = self.draw.choice([0, "x", b"x", None])
        for _ in range(self.draw.choice(DEEP)):
            found = [found] if self.draw.random() < 0.5 else {"n": found}
        return found

    def _of_another(self, topic: Topic) -> bytes:
        record = self.draw.choice(list(self._plain))
        return msgspec.msgpack.encode(self.draw.choice(self._plain[record]))

    def _written(self, topic: Topic, plain: Any) -> bytes:
        if topic is PROMPTS and self.draw.random() < 0.5:
            try:
                return msgspec.json.encode(plain)
            except (TypeError, ValueError, RecursionError, OverflowError):
                pass
        try:
            return msgspec.msgpack.encode(plain)
        except (TypeError, ValueError, RecursionError, OverflowError):
            return b"\xc1"


def send_garbage(port: int, seed: int, count: int) -> None:
    """Send many invalid requests to a metrics server, and then a valid request that is answered."""
    draw = random.Random(seed)
    beginnings = [b"", b"GET ", b"GET /metrics HTTP/1.1\r\n", b"POST / HTTP/9.9\r\nContent-Length: 99999999999\r\n\r\n"]
    beginnings += [b"GET /" + b"a" * 70_000, b"\x16\x03\x01\x02\x00", b"GET /metrics?name[]=%ff HTTP/1.0\r\n\r\n"]
    for _ in range(count):
        with socket.create_connection(("127.0.0.1", port), 10) as line:
            try:
                line.sendall(draw.choice(beginnings) + draw.randbytes(draw.choice([0, 3, 200, 5_000])))
            except OSError:  # the server may close the connection
                continue
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert answer.status == 200 and b"rose_" in answer.read()
