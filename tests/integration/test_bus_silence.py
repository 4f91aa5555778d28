"""A broker that is frozen: who asks it something is not silent itself meanwhile, and gives up when it is told to."""

import signal
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from tests.brokers import any_broker
from tests.golden.examples import PROMPT
from tests.integration.bus_kit import with_topics
from topics.broker import Broker
from topics.catalog import PROMPTS
from topics.errors import BusError
from topics.log import read_topics
from topics.reader import Reader
from topics.settings import BusSettings
from topics.writer import Writer

CALLS = 3

pytestmark = pytest.mark.slow


class GivenUp(Exception):
    """Raised by whoever asks."""


@pytest.fixture
def settings(own_broker: Broker) -> Iterator[BusSettings]:
    yield with_topics(own_broker.settings())
    own_broker.send_signal(signal.SIGCONT)


def owner(settings: BusSettings, **more: Callable[[], bool | None]) -> Writer:
    return Writer(settings, "test", transactional_id="test", **more)  # type: ignore[arg-type]


def test_who_takes_a_name_over_is_heard_of_until_the_broker_is_back_and_has_it_then(
    settings: BusSettings, own_broker: Broker
) -> None:
    last, calls = owner(settings), 0
    last.begin()
    last.write(PROMPTS, PROMPT, key="g", partition=0)

    def meanwhile() -> None:
        nonlocal calls
        calls += 1
        if calls == CALLS:
            own_broker.send_signal(signal.SIGCONT)

    own_broker.send_signal(signal.SIGSTOP)
    with closing(owner(settings, meanwhile=meanwhile)) as present:
        assert calls >= CALLS
        present.begin()
        present.write(PROMPTS, PROMPT, key="g", partition=1)
        present.commit()
        with pytest.raises(BusError):
            last.commit()
    last.close()
    assert [envelope.partition for envelope in read_topics(settings, [PROMPTS])] == [1]


@any_broker
def test_who_is_asked_to_leave_takes_no_name_over(settings: BusSettings, own_broker: Broker) -> None:
    own_broker.send_signal(signal.SIGSTOP)
    with pytest.raises(BusError, match="nobody waits for it any more"):
        owner(settings, wanted=lambda: False)


QUESTIONS: list[Callable[[Reader], object]] = [
    lambda reader: reader.committed([(PROMPTS, 0)]),
    lambda reader: reader.watermarks((PROMPTS, 0)),
    lambda reader: reader.partitions(PROMPTS),
]


@any_broker
@pytest.mark.parametrize("ask", QUESTIONS, ids=["committed", "watermarks", "partitions"])
def test_a_question_ends_when_whoever_asks_says_so(
    settings: BusSettings, own_broker: Broker, ask: Callable[[Reader], object]
) -> None:
    def meanwhile() -> None:
        raise GivenUp

    with closing(Reader(settings, "test", group="test", meanwhile=meanwhile)) as reader:
        ask(reader)
        own_broker.send_signal(signal.SIGSTOP)
        with pytest.raises(GivenUp):
            ask(reader)
        own_broker.send_signal(signal.SIGCONT)
        ask(reader)
