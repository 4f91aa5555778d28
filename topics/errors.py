"""What can go wrong between a program and the broker, said for a person."""

from confluent_kafka import KafkaError

from schemas.errors import RoseError


class BrokerUnreachable(RoseError):
    """No broker answers at the address given."""

    def __init__(self, bootstrap: str, detail: str = "") -> None:
        super().__init__(
            f"no Kafka broker answers at {bootstrap}{f' ({detail})' if detail else ''}: "
            "start it or correct --bootstrap-server"
        )


class TopicMissing(RoseError):
    """A topic of the catalog is not on the broker."""

    def __init__(self, name: str) -> None:
        super().__init__(f"topic {name} is not on the broker: run `rose topics create`")


LASTING = (
    KafkaError._AUTHENTICATION,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    KafkaError.UNSUPPORTED_VERSION,
)
"""Time mends none of these."""

BROKER_AWAY = (
    KafkaError._TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._DESTROY_BROKER,
    KafkaError.REQUEST_TIMED_OUT,
)
"""What is said of a broker that does not answer. librdkafka goes on by itself, but calls none of these retriable in
all places: the second to last is what it says of one that the others have left out of the metadata meanwhile.
"""


class BusError(RoseError):
    """The broker refused what a client did.

    `fenced`: a newer instance has taken this one's place. `lasting`: only a person can mend it.
    """

    def __init__(self, doing: str, error: KafkaError) -> None:
        super().__init__(f"{doing} failed: {error.str()}")
        self.code = error.code()
        self.lasting = error.code() in LASTING
        self.fenced = error.code() in (
            KafkaError._FENCED,
            KafkaError.INVALID_PRODUCER_EPOCH,
            KafkaError.PRODUCER_FENCED,
            KafkaError.FENCED_INSTANCE_ID,
        )
