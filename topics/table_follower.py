"""A follower: a thread that keeps up with a compacted topic of one partition.

Keeps true
- The topic is read from its beginning, and again from the beginning after an error of the bus. Each record is reported
  with whether it came after the end was reached.
- Of the records before the end only the newest record of each key is reported, once the reader has reached the end. So
  a broker that was away changes nothing.
"""

from collections.abc import Callable
from operator import attrgetter
from threading import Event, Thread

import structlog
from confluent_kafka import OFFSET_BEGINNING

from rose.schemas.errors import RoseError
from rose.topics.catalog import Topic
from rose.topics.errors import is_permanent
from rose.topics.reader import Reader
from rose.topics.records import EndOfPartition, Envelope
from rose.topics.settings import BusSettings

READ_SECONDS = 0.2
"""Longest wait for a record between two checks whether to stop."""

RETRY_SECONDS = 1.0
"""Pause before the topic is read again after an error."""

BATCH = 1_000
"""Records taken at once."""

FOLLOWER_SETTINGS = {"fetch.wait.max.ms": "500"}
"""Longer fetches, because records are rare. A new record ends a fetch at once."""


class TableFollower:
    """Follows a topic from construction to `stop`."""

    def __init__(
        self, settings: BusSettings, topic: Topic, name: str, on_record: Callable[[Envelope, bool], None]
    ) -> None:
        """Follow a topic on a thread.

        `on_record` is called on that thread, with each record and whether it came after the end was reached.
        """
        self.is_caught_up = Event()
        """Set once the end of the topic was reached."""
        self.failure: RoseError | None = None
        """The permanent error that keeps the follower from reading; None if there is none."""
        self._settings = settings if settings.embedded else settings.with_defaults(FOLLOWER_SETTINGS)
        self._topic = topic
        self._name = name
        self._on_record = on_record
        self._stopping = Event()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._follow()
            except RoseError as error:
                self.failure = error if is_permanent(error) else None
                structlog.get_logger("bus").warning(
                    "reader_restarting", topic=self._topic.name, client=self._name, reason=str(error)
                )
                self._stopping.wait(RETRY_SECONDS)

    def _follow(self) -> None:
        reader = Reader(self._settings, self._name, report_ends=True)
        newest: dict[str, Envelope] = {}
        """The newest record by key, until the end is reached."""
        seen = False
        try:
            reader.assign({(self._topic, 0): OFFSET_BEGINNING})
            while not self._stopping.is_set():
                for item in reader.read(BATCH, READ_SECONDS):
                    if isinstance(item, EndOfPartition):
                        seen, self.failure = True, None
                        for each in sorted(newest.values(), key=attrgetter("offset")):
                            self._on_record(each, False)
                        newest.clear()
                        self.is_caught_up.set()
                    elif isinstance(item, Envelope) and seen:
                        self._on_record(item, True)
                    elif isinstance(item, Envelope):
                        newest[item.key] = item
        finally:
            reader.close()
