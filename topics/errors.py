"""Errors between a program and the broker, with messages for a person, and whether a loop goes on after an error.

Keeps true
- While leaders and coordinators move, a loop goes on after a wait (`backoff`).
- A loop ends if only a person can remove the cause: missing rights, another process with the same name, or a topic
  that has never been there or has been missing for MISSING_SECONDS since the loop last worked.

Pure: times are monotonic seconds. A single query of the broker is repeated by `topics/queries.py`, a transaction by
`topics/transactions.py`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from confluent_kafka import KafkaError, KafkaException

from rose.schemas.errors import RoseError
from rose.topics.backoff import Backoff

NAMED_NODES = 3
"""Most node addresses that a message lists."""


class BrokerUnreachable(RoseError):
    """No broker answers at the address given."""

    def __init__(
        self, bootstrap: str, detail: str = "", *, advice: str = "start it or correct --bootstrap-server"
    ) -> None:
        if "://" in bootstrap:
            advice += " (an address is HOST:PORT; its protocol is -X security.protocol=...)"
        super().__init__(f"no Kafka broker answers at {bootstrap}{f' ({detail})' if detail else ''}: {advice}")


class AdvertisedElsewhere(BrokerUnreachable):
    """A broker answers, but none of the addresses that it advertises for its nodes does."""

    def __init__(self, bootstrap: str, nodes: Sequence[str]) -> None:
        named = ", ".join(nodes[:NAMED_NODES]) + (", ..." if len(nodes) > NAMED_NODES else "")
        RoseError.__init__(
            self,
            f"the Kafka broker at {bootstrap} answers, and says that its nodes are at {named}, where nobody answers "
            "from here: let its advertised.listeners be addresses that this machine reaches, or use a listener that has"
            " such ones",
        )


class AuthenticationFailed(RoseError):
    """The broker refuses the client's credentials, or the client does not trust the broker."""

    def __init__(self, bootstrap: str, detail: str) -> None:
        super().__init__(
            f"the broker at {bootstrap} and this client do not trust each other ({detail}): correct sasl.* and ssl.* "
            "of -X or --command-config"
        )


class RightsMissing(RoseError):
    """This client lacks rights that its role needs."""

    def __init__(self, role: str, missing: Sequence[str]) -> None:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        super().__init__(f"this client has no right to {missing[0]}{more}: {_advice(role)}")


class TopicMissing(RoseError):
    """A topic of the catalog is not on the broker."""

    def __init__(self, name: str) -> None:
        super().__init__(f"topic {name} is not on the broker: run `rose topics create`")


class PartitionMissing(TopicMissing):
    """A topic has fewer partitions than a topic with the same partitioning."""

    def __init__(self, name: str, partition: int, has: int, larger: tuple[str, int] | None = None) -> None:
        """`larger`: the topic with the same partitioning that has most partitions, and their number."""
        other = f", and topic {larger[0]} has {larger[1]}" if larger else ""
        RoseError.__init__(
            self,
            f"topic {name} has no partition {partition}, but {has} in all{other}: `rose topics check` tells which "
            "topics differ from [topics]; give those of one setting as many as the largest of them (kafka-topics.sh "
            "--alter --partitions), and say that number in [topics]",
        )


AUTHORIZATION_CODES = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "topic",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "group",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "transactional id",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "cluster",
}
"""Error codes of a broker for a missing right, with the kind of resource that the right concerns."""

PERMANENT_CODES = (
    KafkaError._AUTHENTICATION,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    *AUTHORIZATION_CODES,
    KafkaError.UNSUPPORTED_VERSION,
    KafkaError.INVALID_SESSION_TIMEOUT,
    KafkaError.INVALID_TRANSACTION_TIMEOUT,
)
"""Errors that do not end by themselves."""

TOO_LARGE_CODES = (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE)
"""Errors for a message that is larger than its topic or client accepts."""

REJECTED_RECORD_CODES = (*TOO_LARGE_CODES, KafkaError.INVALID_RECORD, KafkaError.POLICY_VIOLATION)
"""Errors for a record that the broker would refuse again."""

FENCED_CODES = (
    KafkaError._FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.PRODUCER_FENCED,
    KafkaError.FENCED_INSTANCE_ID,
)
"""Errors of a client whose place a newer instance has taken."""

UNKNOWN_PARTITION_CODES = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION)
"""Errors of client and broker for a topic or partition that does not exist."""

UNAVAILABLE_CODES = (
    KafkaError._TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._DESTROY_BROKER,
    KafkaError.REQUEST_TIMED_OUT,
)
"""Errors of a broker that does not answer. librdkafka reconnects by itself, but does not always mark these errors as
retriable. `_DESTROY_BROKER` is its error for a broker that is no longer in the metadata of the other brokers.
"""

TRANSIENT_CODES = (
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.OFFSET_NOT_AVAILABLE,
    *UNAVAILABLE_CODES,
)
"""Errors in the first seconds of a group, and while a coordinator or a leader moves to another broker."""


def is_transient(error: KafkaError) -> bool:
    """Whether the error ends by itself, so that the call can be repeated. librdkafka marks only some as retriable."""
    return error.retriable() or error.code() in TRANSIENT_CODES


class BusError(RoseError):
    """The broker refused an action of a client.

    `is_fenced`: a newer instance has taken this client's place. `is_permanent`: the error does not end by itself.
    `outcome_unknown`: the action may have been done nevertheless.
    """

    def __init__(self, action: str, error: KafkaError, *rights: str) -> None:
        """`rights`: rights that the action needs, e.g. "Read on topic rose.prompts.submitted.v1".

        The message lists them if the broker refused one.
        """
        message = error.str()
        if (refused := AUTHORIZATION_CODES.get(error.code())) is not None:
            needed = " or ".join(right for right in rights if f"on {refused} " in right) or f"some right to a {refused}"
            message = f"this client has no right to {needed}: {_advice('ROLE')}"
        elif error.code() == KafkaError.INVALID_TIMESTAMP:
            message += ": the clock of this host is off, and the topic takes it for the time: run `rose topics check`"
        elif error.code() in TOO_LARGE_CODES:
            message += (
                ": the topic, or -X message.max.bytes, takes only smaller messages: leave message.max.bytes unset, and "
                "run `rose topics check`"
            )
        super().__init__(f"{action} failed: {message}")
        self.code = error.code()
        self.is_permanent = error.code() in PERMANENT_CODES
        self.outcome_unknown = error.code() == KafkaError._TIMED_OUT
        self.is_fenced = error.code() in FENCED_CODES


@contextmanager
def bus_errors(action: str, *rights: str) -> Iterator[None]:
    """Raise an error of the client in this block as BusError; `action` and `rights` as there."""
    try:
        yield
    except KafkaException as error:
        raise BusError(action, error.args[0], *rights) from error


def is_permanent(error: Exception) -> bool:
    """Whether the error does not end by itself, so that a person has to act."""
    return isinstance(error, TopicMissing | RightsMissing) or (isinstance(error, BusError) and error.is_permanent)


CALM_SECONDS = 10.0
"""An error that comes so long after the wait for the last error begins a new row of errors."""

MISSING_SECONDS = 30.0
"""A topic that was there may be missing from the metadata for so long while its leaders move."""


class RetryPolicy:
    """The errors in a row of one loop that works with the broker."""

    def __init__(self, first_seconds: float, longest_seconds: float) -> None:
        """`first_seconds`: the wait after the first error; it doubles up to `longest_seconds`."""
        self._backoff = Backoff(first_seconds, longest_seconds, reset_seconds=CALM_SECONDS)
        self._has_worked = False
        self._missing_since: float | None = None
        """Time of the first TopicMissing since the loop last worked."""

    def on_success(self) -> None:
        """The loop has done its work once."""
        self._has_worked, self._missing_since = True, None

    def on_error(self, error: Exception, now: float) -> float:
        """Return the seconds to wait before the loop goes on. Raises `error` if waiting does not help."""
        wait = self._backoff.failed(now)
        if isinstance(error, TopicMissing):
            self._missing_since = now if self._missing_since is None else self._missing_since
            if not self._has_worked or now - self._missing_since > MISSING_SECONDS:
                raise error
        if isinstance(error, BusError) and (error.is_permanent or error.code == KafkaError.FENCED_INSTANCE_ID):
            raise error
        return wait


def _advice(role: str) -> str:
    return f"`rose topics acl --role {role}` prints the ACLs that a role needs"
