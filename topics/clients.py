"""Creates librdkafka clients, and reports settings of the user that librdkafka refuses."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from confluent_kafka import KafkaException

from rose.schemas.errors import UsageError

Client = TypeVar("Client")


def new_client(kind: Callable[..., Client], config: Mapping[str, object], **more: Any) -> Client:
    """A client of this class with this configuration. Raises UsageError for settings that librdkafka refuses."""
    try:
        return kind(dict(config), **more)
    except KafkaException as error:
        raise UsageError(f"the Kafka client refuses its settings: {error.args[0].str()}") from None
    except (TypeError, ValueError) as error:
        raise UsageError(f"the Kafka client refuses its settings: {error}") from None
