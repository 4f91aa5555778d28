"""A topic of one partition of which the newest record of a key counts, followed on a thread.

Keeps true
- It is read from its beginning, and again after trouble with the bus: what was said before this began counts like what
  is said now. Which of both it was is told with each record.
- A broker that is away changes nothing: of what is read anew the newest of each key is told, once all is read.
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
"""Longest wait for a record between two looks at whether to stop."""

RETRY_SECONDS = 1.0
"""Before it is read anew after trouble."""

BATCH = 1_000
"""Records taken at once."""

FOLLOWER_SETTINGS = {"fetch.wait.max.ms": "500"}
"""Whoever follows waits for records that are seldom: a broker wakes it for each, and is asked less often meanwhile."""


class TableFollower:
    """It begins at once; stop it."""

    def __init__(
        self, settings: BusSettings, topic: Topic, name: str, on_record: Callable[[Envelope, bool], None]
    ) -> None:
        """`on_record` is called on the thread, with each record and whether it came since the end was met."""
        self.is_caught_up = Event()
        """What was there has been read."""
        self.failure: RoseError | None = None
        """What time does not mend, while it is so."""
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
                    "reading anew", topic=self._topic.name, client=self._name, reason=str(error)
                )
                self._stopping.wait(RETRY_SECONDS)

    def _follow(self) -> None:
        reader = Reader(self._settings, self._name, report_ends=True)
        newest: dict[str, Envelope] = {}
        """By key, the newest of what was there."""
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
