"""Finished samples as an iterable: the trainer's whole input.

Keeps true
- Samples are read by place, not by a group's committed offsets: who keeps `offsets` together with what was made of the
  samples reads each of them once.
- `offsets` names what has been handed out, record by record.

Example (any trainer)
    stream = SampleStream(settings, offsets=checkpoint.offsets, stop=stop)
    for placed in stream:
        learn(placed.sample)
        checkpoint.offsets = dict(stream.offsets)
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from threading import Event

import structlog

from schemas.errors import UsageError
from schemas.samples import Sample
from topics.catalog import SAMPLES
from topics.reader import Reader
from topics.records import Envelope
from topics.settings import BusSettings

BATCH = 256
"""Samples taken from librdkafka at once."""

LOOK_SECONDS = 0.2
"""How long one look for samples lasts; also how soon a stop is noticed."""

log = structlog.get_logger("trainer")


class WrongLog(UsageError):
    """The offsets are not those of this log."""


@dataclass(frozen=True, slots=True)
class PlacedSample:
    sample: Sample
    partition: int
    offset: int


class SampleStream:
    """Every sample from the given offsets on, for ever; ends when `stop` is set."""

    def __init__(
        self,
        settings: BusSettings,
        *,
        stop: Event,
        offsets: Mapping[int, int] | None = None,
        client_id: str = "trainer",
    ) -> None:
        """`offsets`: the next one to read of each partition; one that is not named is read from its beginning.

        Raises TopicMissing, BusError, or WrongLog when a partition ends before its offset.
        """
        self._stop = stop
        self._reader = Reader(settings, client_id, group="trainer")
        self.offsets: dict[int, int] = {}
        """The next offset of each partition after what was handed out."""
        for partition in range(self._reader.partitions(SAMPLES)):
            low, high = self._reader.watermarks((SAMPLES, partition))
            begin = (offsets or {}).get(partition, low)
            if begin > high:
                raise WrongLog(
                    f"the checkpoint has read samples up to offset {begin} of partition {partition}, which ends at "
                    f"{high}: this is not the broker or the namespace of the run, or it has lost records"
                )
            if begin < low:
                log.error("samples deleted before they were read", partition=partition, first=begin, kept_from=low)
            self.offsets[partition] = max(begin, low)
        self._reader.assign({(SAMPLES, partition): offset for partition, offset in self.offsets.items()})

    def __iter__(self) -> Iterator[PlacedSample]:
        """Raises BusError."""
        while not self._stop.is_set():
            for item in self._reader.read(BATCH, LOOK_SECONDS):
                if isinstance(item, Envelope) and isinstance(item.record, Sample):
                    self.offsets[item.partition] = item.offset + 1
                    yield PlacedSample(item.record, item.partition, item.offset)

    def close(self) -> None:
        self._reader.close()
