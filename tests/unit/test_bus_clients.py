"""What readers and writers do without a broker: they wait no longer than they were told, and can be let go."""

import gc
import weakref
from threading import Event, current_thread
from types import SimpleNamespace

import pytest
import structlog
from confluent_kafka import KafkaError

from tests.unit.test_health import Clock
from tests.waiting import until
from topics import settings
from topics.catalog import HEARTBEATS, PROMPTS
from topics.errors import BusError
from topics.reader import Reader
from topics.settings import BusSettings
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


class Client:
    """Of librdkafka, whose end takes for ever."""

    def __init__(self, ends: Event, ended_on: list[str]) -> None:
        self._ends, self._ended_on = ends, ended_on

    def purge(self, *, blocking: bool) -> None:
        assert not blocking, "it waits for brokers that may be gone"

    def __len__(self) -> int:
        return 0

    def __del__(self) -> None:
        self._ended_on.append(current_thread().name)
        self._ends.wait()


def test_whoever_drops_a_writer_that_was_closed_does_not_wait_for_the_end_of_its_client() -> None:
    ends, ended_on = Event(), list[str]()
    writer = Writer(NOBODY, "test")
    writer._producer = Client(ends, ended_on)
    writer.close()
    del writer
    until(lambda: bool(ended_on))
    assert ended_on == ["free"]
    ends.set()


@pytest.mark.parametrize(
    ("servers", "age", "said", "told"),
    [
        (["a:1"], 0, "1/1 brokers are down", True),
        (["a:1", "a:1"], 0, "1/1 brokers are down", True),
        (["a:1", "b:1", "c:1"], 0, "1/1 brokers are down", False),  # it does not know of the others yet
        (["a:1", "b:1", "c:1"], 60, "2/2 brokers are down", True),  # one had been away before
        (["localhost:1", "127.0.0.1:1"], 60, "1/1 brokers are down", True),  # the lone one has two names
    ],
)
def test_the_first_of_several_servers_that_is_away_is_no_trouble_and_all_that_are_known_later_is(
    monkeypatch: pytest.MonkeyPatch, servers: list[str], age: float, said: str, told: bool
) -> None:
    clock = Clock()
    monkeypatch.setattr(settings, "time", SimpleNamespace(monotonic=clock))
    heard = BusSettings(",".join(servers)).client("test")["error_cb"]
    assert callable(heard)
    settings._said.clear()
    clock.now += age
    with structlog.testing.capture_logs() as logs:
        heard(KafkaError(KafkaError._ALL_BROKERS_DOWN, said))
    assert [line["error"] for line in logs] == [said] * told
