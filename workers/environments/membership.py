"""Membership in the consumer group that assigns homes to environment workers, and how a worker recovers from errors.

Keeps true
- While `rebalanced` is false, `homes` are the homes that the group has assigned. A change of the assignment, or an
  error that the worker meets, sets `rebalanced`; the worker then builds its state again.
- While leaders and coordinators move, or after the worker itself was frozen, the worker recovers from the log.
- While a member of the group does not read both topics (another program), a worker whose partitions of the two topics
  differ owns no homes and waits.
- The worker ends if only a person can correct the cause: another worker of its name, a missing topic, missing rights.
"""

import time
from collections.abc import Callable
from typing import Any

import structlog
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from rose.schemas.errors import RoseError, ThreadRefused
from rose.topics.catalog import COMPLETED, PROMPTS
from rose.topics.errors import BusError, RetryPolicy, TopicMissing
from rose.topics.log_reader import FetchStalled
from rose.topics.queries import WATERMARKS_ATTEMPT_SECONDS, group_members, partition_count
from rose.topics.reader import Reader
from rose.topics.records import Item, Place
from rose.topics.settings import (
    CLIENT_PREFIX,
    DEFAULT_SESSION_MILLISECONDS,
    TRANSACTION_MILLISECONDS,
    BusSettings,
    new_client,
)

HEARTBEAT_MILLISECONDS = "1000"
"""Interval of heartbeats. A worker notices a rebalance within about this time, and when its coordinator dies, at most
this much of its session has passed. librdkafka's default is 3 s."""


EXPLAIN_SECONDS = 10.0
"""Least time between two looks for the reason of an assignment that is not usable."""


class WorkerFenced(RoseError):
    """Another worker has this worker's name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"another environment worker was started as {name!r} and takes its place: use another --name")


class RecoveryAbandoned(Exception):
    """The operation was abandoned because the homes have changed or the worker stops."""


class Membership:
    """One member of the consumer group. Used by one thread."""

    def __init__(self, settings: BusSettings, name: str, group: str, *, on_wait: Callable[[], None]) -> None:
        """`on_wait`: see Reader."""
        session: dict[str, Any] = {
            "session.timeout.ms": settings.properties.get("session.timeout.ms", DEFAULT_SESSION_MILLISECONDS),
            "heartbeat.interval.ms": settings.properties.get("heartbeat.interval.ms", HEARTBEAT_MILLISECONDS),
        }
        self._settings = settings
        self._name = name
        self._group = settings.name(group)
        self.reader = Reader(
            settings, f"{CLIENT_PREFIX}{name}", group=group, member_id=name, on_wait=on_wait, **session
        )
        self.homes: list[int] = []
        self.rebalanced = False
        self._halves_differ = False
        """Whether the last assignment has different partitions of prompts and results, for a reason not yet logged."""
        self._explains_at = 0.0
        """When the reason is looked for; monotonic seconds."""

    def join(self) -> None:
        """Join the group; homes are assigned during `read`."""
        self.reader.subscribe([PROMPTS, COMPLETED], on_assigned=self._on_assigned, on_revoked=self._on_revoked)

    def read(self, limit: int, timeout_seconds: float) -> list[Item]:
        """Return the next items of the homes' prompts and results.

        Raises WorkerFenced, TopicMissing, BusError, or what `_explain_halves` raises.
        """
        try:
            items = self.reader.read(limit, timeout_seconds)
            if self._halves_differ and time.monotonic() >= self._explains_at:
                self._explains_at = time.monotonic() + EXPLAIN_SECONDS
                self._explain_halves()
            return items
        except BusError as error:
            if error.code in (KafkaError.FENCED_INSTANCE_ID, KafkaError._FATAL):
                raise WorkerFenced(self._name) from error
            raise

    def pause(self) -> None:
        """Stop reading until the recovered homes are assigned with their offsets."""
        if self.homes:
            self.reader.assign({})

    def close(self) -> None:
        """Leave the group. If the broker evicts the member, the homes are assigned to others at once."""
        self.reader.close()

    def _on_assigned(self, places: list[Place]) -> dict[Place, int]:
        homes = {topic: sorted(part for other, part in places if other is topic) for topic in (PROMPTS, COMPLETED)}
        self._halves_differ = homes[PROMPTS] != homes[COMPLETED]
        self.homes = [] if self._halves_differ else homes[PROMPTS]
        self.rebalanced = True
        return {}  # reading begins once the homes are recovered

    def _explain_halves(self) -> None:
        """Log a warning that names the clients of other programs in the group, or join again if there are none.

        Without other programs one of the topics was missing at the assignment. Uses a client of its own, because the
        reader's queries poll the group. Raises RoseError if the topics have different numbers of partitions;
        TopicMissing or BusError.
        """
        client = new_client(AdminClient, self._settings.client(f"{CLIENT_PREFIX}{self._name}-admin"))
        if len({partition_count(client, self._settings.topic(topic)) for topic in (PROMPTS, COMPLETED)}) > 1:
            raise RoseError("prompts and results have different numbers of partitions: see `rose topics check`")
        try:
            members = group_members(client, self._group, WATERMARKS_ATTEMPT_SECONDS)
        except KafkaException:
            return
        clients = sorted(each.client_id for each in members if not self._settings.is_worker(each.client_id))
        if clients:
            structlog.get_logger().warning(
                "foreign_group_member", worker=self._name, group=self._group, clients=clients
            )
        else:
            self.reader.join_again()

    def _on_revoked(self, _places: list[Place]) -> None:
        self.homes = []
        self.rebalanced = True


RECOVERABLE = (BusError, TopicMissing, FetchStalled, ThreadRefused)
"""Errors after which a worker may recover its homes from the log."""

FIRST_WAIT_SECONDS = 0.05
LONGEST_WAIT_SECONDS = 2.0

FENCED_TIMES = 6
FENCED_SECONDS = 120.0
"""A worker that is fenced this often within FENCED_SECONDS, without having been frozen, shares its name with a live
worker. A worker that starts and ends under the same name fences another one twice: it repeats its request while the
open transaction that it found is aborted, and a successor may have begun by then. Two live workers fence each other
once in each recovery, which may take a while."""


class RecoveryPolicy:
    """Decides how a worker reacts to an error in RECOVERABLE: recover after a growing wait, or end.

    Remembers recent errors. `now` is monotonic seconds. Pure.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._retry_policy = RetryPolicy(FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS)
        self._fenced_at: list[float] = []

    def on_success(self) -> None:
        """A cycle of the worker succeeded."""
        self._retry_policy.on_success()

    def on_error(self, error: Exception, now: float, began_at: float) -> float:
        """Seconds to wait before the homes are recovered.

        `began_at`: monotonic seconds at the beginning of the last transaction.

        Raises WorkerFenced, or `error` itself if waiting does not help.
        """
        if isinstance(error, BusError) and error.is_fenced and self._has_namesake(error, now, began_at):
            raise WorkerFenced(self._name) from error
        return self._retry_policy.on_error(error, now)

    def _has_namesake(self, error: BusError, now: float, began_at: float) -> bool:
        if error.code == KafkaError.FENCED_INSTANCE_ID:
            return True
        if now - began_at >= TRANSACTION_MILLISECONDS / 1000:  # the broker has timed out the transaction
            return False
        self._fenced_at = [at for at in self._fenced_at if now - at < FENCED_SECONDS] + [now]
        return len(self._fenced_at) >= FENCED_TIMES
