"""Which homes a worker owns: its place in the group of environment workers.

Keeps true: whoever holds a `Membership` whose `moved` is false owns `homes`, as far as the group has told it. Who was
told otherwise, or met trouble, sets `moved` and builds everything anew.
"""

from collections.abc import Callable
from typing import Any

from confluent_kafka import KafkaError

from rose.schemas.errors import RoseError
from rose.topics.catalog import COMPLETED, PROMPTS
from rose.topics.errors import BusError
from rose.topics.reader import Reader
from rose.topics.records import Item, Place
from rose.topics.settings import BusSettings

SESSION_MILLISECONDS = "10000"
"""After so long a silence a worker's homes go to the others. Kafka's default of 45 s would stall its trajectories."""

HEARTBEAT_MILLISECONDS = "1000"
"""About so long after the others, at most, a worker hears that homes are shared out anew; and so much of a session is
over, by the worker's own clock, when its coordinator dies. librdkafka's default is 3 s."""


class WorkerFenced(RoseError):
    """Another worker has this worker's name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"another environment worker was started as {name!r} and takes its place: use another --name")


class RecoveryAbandoned(Exception):
    """What was under way has no point any more."""


class Membership:
    """One member of the group. Used by one thread."""

    def __init__(self, settings: BusSettings, name: str, group: str, *, on_wait: Callable[[], None]) -> None:
        """`meanwhile`: see Reader."""
        session: dict[str, Any] = {
            "session.timeout.ms": settings.properties.get("session.timeout.ms", SESSION_MILLISECONDS),
            "heartbeat.interval.ms": settings.properties.get("heartbeat.interval.ms", HEARTBEAT_MILLISECONDS),
        }
        self._name = name
        self.reader = Reader(settings, f"rose-{name}", group=group, member_id=name, on_wait=on_wait, **session)
        self.homes: list[int] = []
        self.rebalanced = False

    def join(self) -> None:
        """Ask for homes; they come while reading."""
        self.reader.subscribe([PROMPTS, COMPLETED], on_assigned=self._on_assigned, on_revoked=self._on_revoked)

    def read(self, limit: int, timeout_seconds: float) -> list[Item]:
        """What the homes' prompts and results hold next. Raises WorkerFenced, TopicMissing or BusError."""
        try:
            return self.reader.read(limit, timeout_seconds)
        except BusError as error:
            if error.code in (KafkaError.FENCED_INSTANCE_ID, KafkaError._FATAL):
                raise WorkerFenced(self._name) from error
            raise

    def pause(self) -> None:
        """Read nothing until the homes are assigned from where they go on."""
        if self.homes:
            self.reader.assign({})

    def close(self) -> None:
        """Leave: where the broker evicts, the homes go to the others at once."""
        self.reader.close()

    def _on_assigned(self, places: list[Place]) -> dict[Place, int]:
        homes = {topic: sorted(part for other, part in places if other is topic) for topic in (PROMPTS, COMPLETED)}
        if homes[PROMPTS] != homes[COMPLETED]:
            raise RoseError("prompts and results have different numbers of partitions: see `rose topics check`")
        self.homes = homes[PROMPTS]
        self.rebalanced = True
        return {}  # reading begins once the homes are recovered

    def _on_revoked(self, _places: list[Place]) -> None:
        self.homes = []
        self.rebalanced = True
