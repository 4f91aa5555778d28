"""What readers and writers do without a broker: they wait no longer than they were told, and can be let go."""

import gc
import weakref

import pytest
import structlog
from confluent_kafka import KafkaError

from topics.catalog import HEARTBEATS, PROMPTS
from topics.errors import BusError
from topics.reader import Reader
from topics.settings import BusSettings, _said
from topics.writer import Writer

NOBODY = BusSettings("127.0.0.1:9")


def test_a_question_for_offsets_whose_time_is_over_waits_no_more() -> None:
    reader = Reader(NOBODY, "test", group="test")
    with pytest.raises(BusError):
        reader.committed([(PROMPTS, 0)], seconds=-1.0)
    reader.close()


def test_a_writer_that_is_closed_is_freed_with_what_it_could_not_store() -> None:
    """One that is not is held by its own reports of delivery, with its threads and connections."""
    writer = Writer(NOBODY, "test")
    for _ in range(10):
        writer.tombstone(HEARTBEATS, key="a", partition=0, on_delivery=lambda partition, offset: None)
    writer.close()
    left = weakref.ref(writer)
    del writer
    gc.collect()
    assert left() is None


@pytest.mark.parametrize(("servers", "told"), [(1, True), (3, False)])
def test_the_first_of_several_servers_that_is_away_is_no_trouble(servers: int, told: bool) -> None:
    """What librdkafka says when the one that a client began with is not there, before it knows of the others."""
    bootstrap = ",".join(f"127.0.0.{number}:9092" for number in range(1, servers + 1))
    heard = BusSettings(bootstrap).client("test")["error_cb"]
    assert callable(heard)
    _said.clear()
    with structlog.testing.capture_logs() as logs:
        heard(KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))
    assert [line["error"] for line in logs] == ["1/1 brokers are down"] * told
