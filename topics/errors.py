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


class BusError(RoseError):
    """The broker refused what a client did; `fenced` says that a newer instance has taken this one's place."""

    def __init__(self, doing: str, error: KafkaError) -> None:
        super().__init__(f"{doing} failed: {error.str()}")
        self.code = error.code()
        self.fenced = error.code() in (
            KafkaError._FENCED,
            KafkaError.INVALID_PRODUCER_EPOCH,
            KafkaError.PRODUCER_FENCED,
            KafkaError.FENCED_INSTANCE_ID,
        )
