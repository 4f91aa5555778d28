"""`rose` with a disk or network that flips bytes: chunks of some policy versions differ from their manifests."""

import os
import random
import sys
from typing import Any

import msgspec

from rose.pipeline.cli.main import main
from rose.schemas.weights import WeightChunk
from rose.topics.writer import Writer
from tests.chaos.lending import CORRUPTION_SEED

SHARE = 0.25
"""Share of corrupted versions."""

MOST_BYTES = 8
"""Largest number of flipped bytes per version."""


def corrupt(dice: random.Random) -> None:
    """Corrupt the chunks of some versions that this process writes from now on, after their digests are computed."""
    write, spoilt = Writer.write, {-1: False}

    def write_or_spoil(writer: Writer, topic: Any, record: Any, **more: Any) -> None:
        if isinstance(record, WeightChunk) and record.version not in spoilt:
            spoilt[record.version] = dice.random() < SHARE
            if spoilt[record.version]:
                record = _flipped(record, dice)
                sys.stderr.write(f"spoilt version {record.version}, {record.tensor}\n")
        write(writer, topic, record, **more)

    Writer.write = write_or_spoil  # type: ignore[method-assign, assignment]


def _flipped(chunk: WeightChunk, dice: random.Random) -> WeightChunk:
    payload = bytearray(chunk.payload)
    for _ in range(dice.randint(1, MOST_BYTES)):
        payload[dice.randrange(len(payload))] ^= dice.randint(1, 255)
    return msgspec.structs.replace(chunk, payload=bytes(payload))


if __name__ == "__main__":
    corrupt(random.Random(f"{os.environ[CORRUPTION_SEED]} {os.getpid()}"))
    main()
