"""Readers and writers without a broker: bounded waits, and release of their clients."""

import gc
import logging
import socket
import weakref
from collections.abc import Callable
from functools import partial
from threading import Event, current_thread
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from rose.pipeline.config.load import load
from rose.pipeline.config.options import Common
from rose.schemas.errors import RoseError, UsageError
from rose.topics import admin, settings, transactions
from rose.topics.catalog import HEARTBEATS, PROMPTS
from rose.topics.errors import AuthenticationFailed, BrokerUnreachable, BusError, TopicMissing
from rose.topics.queries import PROPAGATION_SECONDS, all_watermarks_of, noop, watermarks_of
from rose.topics.reader import Reader
from rose.topics.settings import BusSettings
from rose.topics.transactions import CallWatchdog
from rose.topics.writer import Writer
from tests.support.waiting import until
from tests.unit.test_health import Clock

NOBODY = BusSettings("127.0.0.1:9")


class LogMessages(logging.Handler):
    """A log handler that collects the messages of a client."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


class RestartedBroker:
    """A broker that lists a topic of one partition whose leader does not know the topic yet."""

    def __init__(self, answers_at: float) -> None:
        self.began, self.answers_at = monotonic(), answers_at

    def get_watermark_offsets(self, partition: TopicPartition, timeout: float) -> tuple[int, int]:
        if monotonic() < self.began + self.answers_at or partition.partition > 0:
            raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
        return 3, 7

    def list_topics(self, topic: str, timeout: float) -> SimpleNamespace:
        return SimpleNamespace(topics={topic: SimpleNamespace(error=None, partitions={0: None})})


def test_listed_topic_is_not_missing_while_its_leader_does_not_know_it() -> None:
    broker = RestartedBroker(answers_at=PROPAGATION_SECONDS + 0.5)
    assert watermarks_of(broker, TopicPartition("there", 0)) == (3, 7)
    with pytest.raises(TopicMissing):
        watermarks_of(broker, TopicPartition("there", 1))


@pytest.mark.parametrize(
    "properties",
    [
        {"acks": "0"},
        {"max.in.flight": "100"},
        {"error_cb": "x"},
        {"stats_cb": "x"},
        {"transaction.timeout.ms": "1"},
        {"no.such.setting": "1"},
    ],
)
def test_settings_invalid_for_a_client_are_refused_in_one_sentence(properties: dict[str, str]) -> None:
    settings = BusSettings(NOBODY.bootstrap, properties=properties)
    with pytest.raises(UsageError, match="refuses its settings"):
        Writer(settings, "test", transactional_id="test")


def test_kafka_property_named_with_underscores_is_refused_with_how_to_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_BROKER__PROPERTIES__SASL_PASSWORD", "hidden")
    with pytest.raises(UsageError) as refused:
        Writer(load(Common(bootstrap_server=NOBODY.bootstrap)).bus(), "test")
    sentence = str(refused.value)
    assert sentence.endswith("""names with dots go into ROSE_BROKER__PROPERTIES='{"sasl.password": "..."}'""")
    assert "hidden" not in sentence


def test_unusable_file_of_a_client_is_named_with_its_setting() -> None:
    properties = {"security.protocol": "ssl", "ssl.ca.location": "/there/is/none", "ssl.key.location": "/other"}
    with pytest.raises(UsageError, match=r"refuses its settings.*\(ssl\.ca\.location=/there/is/none\)$"):
        Writer(BusSettings(NOBODY.bootstrap, properties=properties), "test")


def test_settings_invalid_for_a_reader_are_refused_in_one_sentence() -> None:
    settings = BusSettings(NOBODY.bootstrap, properties={"receive.message.max.bytes": "1000"})
    with pytest.raises(UsageError, match=r"refuses its settings.*receive\.message"):
        Reader(settings, "test")


class Leaders:
    """Leaders of partitions that begin at 3 and end at 7. One of the named partitions gets no answer, or a refusal."""

    def __init__(self, silent: int = -1, refuses: int = -1) -> None:
        self.calls: list[str] = []
        self.silent, self.refuses = silent, refuses

    def get_watermark_offsets(self, partition: TopicPartition, timeout: float) -> tuple[int, int]:
        self.calls.append("one")
        return 3, 7

    def offsets_for_times(self, partitions: list[TopicPartition], timeout: float) -> list[SimpleNamespace]:
        self.calls.append("all")
        found = {-2: 3, -1: 7}
        refusal = KafkaError(KafkaError.NOT_LEADER_FOR_PARTITION)
        return [
            SimpleNamespace(
                offset=each.offset if each.partition == self.silent else found[each.offset],
                error=refusal if each.partition == self.refuses else None,
            )
            for each in partitions
        ]


@pytest.mark.parametrize(
    ("leaders", "partitions", "questions"),
    [
        (Leaders(), 0, []),
        (Leaders(), 1, ["one"]),
        (Leaders(), 3, ["all", "all"]),
        (Leaders(silent=1), 2, ["all", "meanwhile", "one", "meanwhile", "one"]),
        (Leaders(refuses=0), 2, ["all", "meanwhile", "one", "meanwhile", "one"]),
    ],
)
def test_end_offsets_are_queried_in_one_call_and_singly_if_a_leader_is_silent(
    leaders: Leaders, partitions: int, questions: list[str]
) -> None:
    partitions_asked = [TopicPartition("topic", each) for each in range(partitions)]
    assert (
        all_watermarks_of(leaders, partitions_asked, lambda: leaders.calls.append("meanwhile")) == [(3, 7)] * partitions
    )
    assert leaders.calls == questions


@pytest.mark.parametrize(
    ("given", "means"),
    [
        ({"max.partition.fetch.bytes": "1000000"}, "fetch.message.max.bytes = 1000000"),
        ({"queue.buffering.max.ms": "50"}, "queue.buffering.max.ms = 50"),
        ({"compression.codec": "gzip"}, "compression.codec = gzip"),
        ({"delivery.timeout.ms": "5000"}, "message.timeout.ms = 5000"),
    ],
)
def test_user_setting_overrides_the_default_under_any_alias(given: dict[str, str], means: str) -> None:
    log_messages = LogMessages()
    logger = logging.Logger("client", logging.DEBUG)
    logger.addHandler(log_messages)
    settings = BusSettings(NOBODY.bootstrap, properties={**given, "debug": "conf", "log_level": "7"})
    reads = "max.partition.fetch.bytes" in given
    config = settings.consumer("test", "test") if reads else settings.transactional("test", "test")
    client = (Consumer if reads else Producer)({**config, "logger": logger})
    until(lambda: client.poll(0.0) or any(messages.endswith(means) for messages in log_messages.messages))


def test_offset_query_past_its_deadline_does_not_wait() -> None:
    reader = Reader(NOBODY, "test", group="test")
    with pytest.raises(BusError):
        reader.committed([(PROMPTS, 0)], seconds=-1.0)
    reader.close()


def test_closed_writer_is_freed_with_its_unstored_records() -> None:
    """An unclosed writer is held by its own delivery reports, with its threads and connections."""
    writer = Writer(NOBODY, "test")
    for _ in range(10):
        writer.tombstone(HEARTBEATS, key="a", partition=0, on_delivery=lambda partition, offset: None)
    writer.close()
    left = weakref.ref(writer)
    del writer
    gc.collect()
    assert left() is None


def test_closing_a_writer_does_not_wait_for_broker_threads(capfd: pytest.CaptureFixture[str]) -> None:
    """A thread may be blocked by a silent name server, and a wait for the thread would block the whole process."""
    messages = ""

    def is_logged() -> bool:
        nonlocal messages
        messages += capfd.readouterr().err
        return "Purging queues" in messages.rpartition("\n")[0]

    with socket.create_server(("127.0.0.1", 0)) as silent:  # the thread of a refusing server may end before the purge
        nobody = f"127.0.0.1:{silent.getsockname()[1]}"
        writer = Writer(BusSettings(nobody, properties={"debug": "queue", "log_level": "7"}), "test")
        writer.tombstone(HEARTBEATS, key="a", partition=0)
        writer.close()
        until(is_logged)
    assert "Purging queues with flags queue,inflight,non-blocking" in messages


class Client:
    """A librdkafka client with a slow end. Its start as a transactional producer fails."""

    def __init__(self, ended_on: list[str]) -> None:
        self._ended_on = ended_on

    def purge(self) -> None:
        pass

    def init_transactions(self, seconds: float) -> None:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    def send_offsets_to_transaction(self, *_: object) -> None:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    def __len__(self) -> int:
        return 0

    def __del__(self) -> None:
        self._ended_on.append(current_thread().name)


class Slow:
    """An object that is freed with a writer and lets other threads run meanwhile."""

    def __del__(self) -> None:
        Event().wait(0.01)


def drop(writer: Writer) -> None:
    writer.close()


def drop_after_an_error(writer: Writer) -> None:
    """Drop a writer that a handled exception references."""
    reader = SimpleNamespace(right_to_group="", group_metadata=lambda: None, reach_coordinator=noop)
    with pytest.raises(BusError):
        writer.commit({(PROMPTS, 0): 1}, reader)  # type: ignore[arg-type]
    writer.close()


def drop_in_a_cycle(writer: Writer) -> None:
    """Drop a writer in a reference cycle, which a garbage collection frees."""
    writer.close()
    cycle: list[object] = [writer, Slow()]
    cycle.append(cycle)


@pytest.mark.parametrize("dropped", [drop, drop_after_an_error, drop_in_a_cycle])
def test_dropping_a_closed_writer_does_not_wait_for_its_client(
    dropped: Callable[[Writer], None],
) -> None:
    ended_on = list[str]()
    writer = Writer(NOBODY, "test")
    writer._producer = Client(ended_on)
    dropped(writer)
    del writer
    gc.collect()
    until(lambda: bool(ended_on))
    assert ended_on == ["free"]


def test_writer_that_cannot_begin_transactions_does_not_wait_for_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    ended_on = list[str]()
    monkeypatch.setattr("rose.topics.writer.Producer", lambda _: Client(ended_on))
    monkeypatch.setattr("rose.topics.transactions.TRANSACTION_SECONDS", -1.0)
    with pytest.raises(BusError):
        Writer(NOBODY, "test", transactional_id="test")
    until(lambda: bool(ended_on))
    assert ended_on == ["free"]


def test_retriable_transaction_call_takes_its_whole_time_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of time slices measures how long the broker has been silent."""
    clock, takes = Clock(), [0.0, 1.0, 0.25]
    began = clock.now

    def sleep(seconds: float) -> None:
        clock.now += seconds

    def call(seconds: float) -> None:
        if takes:
            sleep(takes.pop())
            raise KafkaException(KafkaError(KafkaError._CONFLICT, "busy", False, True))

    monkeypatch.setattr(transactions, "time", SimpleNamespace(monotonic=clock, sleep=sleep))
    goes_on = transactions.in_time_slices(call)
    assert [goes_on(1.0) for _ in range(4)] == [False, False, False, True]
    assert clock.now == began + 3.0


def test_call_of_a_transaction_that_must_be_aborted_is_not_continued() -> None:
    def call(_seconds: float) -> None:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "abort", False, False, True))

    with pytest.raises(KafkaException):
        transactions.in_time_slices(call)(0.0)


NOT_COORDINATOR = KafkaError(KafkaError.NOT_COORDINATOR, "moved", False, True)


@pytest.mark.parametrize(
    ("refusals", "gone_on_for"),
    [
        ([NOT_COORDINATOR, NOT_COORDINATOR], None),
        ([NOT_COORDINATOR, KafkaError(KafkaError.UNKNOWN_MEMBER_ID)], 0.2),
        ([NOT_COORDINATOR] * 1000, 60.0),
    ],
)
def test_offsets_are_committed_to_the_new_coordinator_after_a_move(
    monkeypatch: pytest.MonkeyPatch, refusals: list[KafkaError], gone_on_for: float | None
) -> None:
    """librdkafka reports some refusals as retriable and does not retry them."""
    clock, left = Clock(), [*refusals]
    began = clock.now

    def sleep(seconds: float) -> None:
        clock.now += seconds

    def send(_places: object, _member: object, seconds: float) -> None:
        assert 0 < seconds <= 60
        if left:
            raise KafkaException(left.pop(0))

    monkeypatch.setattr(transactions, "time", SimpleNamespace(monotonic=clock, sleep=sleep))
    writer = Writer(NOBODY, "test")
    ended_on = list[str]()
    client = Client(ended_on)
    client.send_offsets_to_transaction = send  # type: ignore[method-assign, assignment]
    client.commit_transaction = lambda seconds: None  # type: ignore[attr-defined]
    writer._producer = client
    reader = SimpleNamespace(right_to_group="", group_metadata=lambda: None, reach_coordinator=noop)
    if gone_on_for is None:
        writer.commit({(PROMPTS, 0): 1}, reader)  # type: ignore[arg-type]
        assert not left
    else:
        with pytest.raises(BusError):
            writer.commit({(PROMPTS, 0): 1}, reader)  # type: ignore[arg-type]
        assert clock.now - began == pytest.approx(gone_on_for, abs=0.21)
    writer.close()


def test_offset_commit_is_aborted_only_if_the_coordinator_answers_other_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    never, calls, away_for = Event(), 0, 50

    def reach_coordinator(place: tuple[object, int]) -> None:
        nonlocal calls
        assert place == (PROMPTS, 0)
        calls += 1
        if calls <= away_for:
            raise BusError("reaching the coordinator of a group", KafkaError(KafkaError._TIMED_OUT))

    monkeypatch.setattr("rose.topics.writer.connect", lambda _: None)
    monkeypatch.setattr("rose.topics.writer.CallWatchdog", partial(CallWatchdog, check_seconds=0.001, seconds=0.01))
    writer = Writer(NOBODY, "test")
    client = Client([])
    client.send_offsets_to_transaction = lambda *_: never.wait()  # type: ignore[method-assign, assignment]
    writer._producer = client
    reader = SimpleNamespace(right_to_group="", group_metadata=lambda: None, reach_coordinator=reach_coordinator)
    with pytest.raises(BusError, match="it has not returned"):
        writer.commit({(PROMPTS, 0): 1}, reader)  # type: ignore[arg-type]
    assert calls == away_for + 4, "at one look less than half of them, of which there are ten"
    never.set()
    writer.close()


@pytest.mark.parametrize(
    ("servers", "age", "messages", "is_reported"),
    [
        (["a:1"], 0, "1/1 brokers are down", True),
        (["a:1", "a:1"], 0, "1/1 brokers are down", True),
        (["a:1", "b:1", "c:1"], 0, "1/1 brokers are down", False),  # the other brokers are not known yet
        (["a:1", "b:1", "c:1"], 60, "2/2 brokers are down", True),  # one broker had been away before
        (["localhost:1", "127.0.0.1:1"], 60, "1/1 brokers are down", True),  # the single broker has two names
    ],
)
def test_one_unreachable_bootstrap_server_is_tolerated_and_all_brokers_are_not(
    monkeypatch: pytest.MonkeyPatch, servers: list[str], age: float, messages: str, is_reported: bool
) -> None:
    clock = Clock()
    monkeypatch.setattr(settings, "time", SimpleNamespace(monotonic=clock))
    error_callback = BusSettings(",".join(servers)).client("test")["error_cb"]
    assert callable(error_callback)
    settings._warned_at.clear()
    clock.now += age
    with structlog.testing.capture_logs() as logs:
        error_callback(KafkaError(KafkaError._ALL_BROKERS_DOWN, messages))
    assert [line["reason"] for line in logs] == [messages] * is_reported


DISCONNECTED = KafkaError(KafkaError._TRANSPORT, "host:9/bootstrap: Disconnected")
REFUSED = KafkaError(KafkaError._TRANSPORT, "host:9/bootstrap: Connect failed: Connection refused")
ALL_DOWN = KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down")
UNTRUSTED = KafkaError(KafkaError._SSL, "host:9/bootstrap: SSL handshake failed: certificate verify failed")
UNKNOWN = KafkaError(KafkaError._AUTHENTICATION, "host:9/bootstrap: SASL authentication error: wrong password")
BROKEN_OFF = (
    KafkaError(KafkaError._AUTHENTICATION, "host:9/bootstrap: handshake failed: Local: Broker transport failure"),
    KafkaError(KafkaError._SSL, "host:9/bootstrap: SSL transport error: Broken pipe"),
)


@pytest.mark.parametrize(
    ("messages", "raised", "why"),
    [
        ((DISCONNECTED, ALL_DOWN, UNTRUSTED, DISCONNECTED), AuthenticationFailed, "certificate verify failed"),
        ((UNKNOWN, ALL_DOWN), AuthenticationFailed, "wrong password"),
        ((*BROKEN_OFF, UNKNOWN), AuthenticationFailed, "wrong password"),
        ((REFUSED, ALL_DOWN, *BROKEN_OFF), BrokerUnreachable, "Connection refused"),
        ((), BrokerUnreachable, "transport failure"),
    ],
)
def test_authentication_failure_is_reported_before_any_other_error(
    monkeypatch: pytest.MonkeyPatch, messages: tuple[KafkaError, ...], raised: type[RoseError], why: str
) -> None:
    class Refused:
        def __init__(self, config: dict[str, Any], **_: Any) -> None:
            self.complain = config["error_cb"]

        def list_topics(self, *_: Any, **__: Any) -> Any:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))

        def poll(self, *_: Any, **__: Any) -> int:
            return len([self.complain(error) for error in messages])

    monkeypatch.setattr(admin, "AdminClient", Refused)
    with pytest.raises(raised, match=why):
        admin.connect(NOBODY)


def test_address_with_a_scheme_is_reported_with_the_form_of_an_address() -> None:
    message = str(BrokerUnreachable("SASL_SSL://b:9093", "No brokers configured"))
    assert message.endswith(" (an address is HOST:PORT; its protocol is -X security.protocol=...)")
    assert "HOST:PORT" not in str(BrokerUnreachable("b:9093"))


def test_record_refused_for_its_timestamp_is_reported_with_the_fix() -> None:
    message = str(BusError("storing a record", KafkaError(KafkaError.INVALID_TIMESTAMP)))
    assert "the clock of this host is off" in message
    assert "`rose topics check`" in message


@pytest.mark.parametrize("answers", [True, False])
def test_unreachable_advertised_listeners_are_named_in_the_error(
    monkeypatch: pytest.MonkeyPatch, *, answers: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as there, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound and not listening
        places = [nobody.getsockname(), *([there.getsockname()] if answers else [])]

        class UnreachableBrokers:
            def __init__(self, *_: Any, **__: Any) -> None:
                pass

            def list_topics(self, *_: Any, **__: Any) -> Any:
                nodes = {number: SimpleNamespace(host=host, port=port) for number, (host, port) in enumerate(places)}
                return SimpleNamespace(brokers=nodes)

        monkeypatch.setattr(admin, "AdminClient", UnreachableBrokers)
        if answers:
            admin.connect(NOBODY)
            return
        with pytest.raises(BrokerUnreachable, match=f"its nodes are at 127.0.0.1:{places[0][1]}, where nobody answers"):
            admin.connect(NOBODY)
