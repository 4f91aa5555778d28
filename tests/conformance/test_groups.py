"""Consumer groups as the environment workers use them: static members, range assignor, two topics side by side."""

import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from tests.conformance.bus_driver import Cluster, owned, poll_all, until

PARTITIONS = 4
GONE = (KafkaError._FATAL, KafkaError.FENCED_INSTANCE_ID)
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def sides(cluster: Cluster) -> list[str]:
    """Two topics with the same number of partitions, like prompts and results."""
    return [cluster.topic("prompts", PARTITIONS), cluster.topic("results", PARTITIONS)]


def member(cluster: Cluster, sides: list[str], name: str | None = None, **more: object) -> Consumer:
    static = {} if name is None else {"group_instance_id": cluster.namespace + name}
    consumer = cluster.consumer("homes", **static, **more)
    consumer.subscribe(sides)
    return consumer


def together(cluster: Cluster, sides: list[str], *names: str | None) -> list[Consumer]:
    """Return members that joined one after another, each after the previous rebalance, and that share all partitions.

    The embedded broker forgets a second member that joins just as it stops waiting for one (`rose.topics.reader`).
    """
    members: list[Consumer] = []
    for name in names:
        members.append(member(cluster, sides, name))
        until(lambda: settled(members, sides) and all(owned(each, sides[0]) for each in members), what="a share each")
    return members


def settled(members: list[Consumer], sides: list[str]) -> bool:
    """Whether every partition of both topics belongs to one of the members."""
    poll_all(members)
    shares = [owned(consumer, topic) for topic in sides for consumer in members]
    return sorted(part for share in shares for part in share) == sorted(list(range(PARTITIONS)) * 2)


@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
def test_each_member_has_the_same_partitions_of_both_topics(cluster: Cluster, sides: list[str], static: bool) -> None:
    members = together(cluster, sides, *(f"worker-{index}" if static else None for index in range(2)))
    for each in members:
        assert owned(each, sides[0]) == owned(each, sides[1])
        assert len(owned(each, sides[0])) == PARTITIONS // 2
    for each in members:
        each.close()


def test_joining_member_gets_its_share_and_a_leaving_member_returns_it(cluster: Cluster, sides: list[str]) -> None:
    stays = member(cluster, sides)
    until(lambda: settled([stays], sides), what="all partitions at the only member")
    comes = member(cluster, sides)
    until(lambda: settled([stays, comes], sides) and bool(owned(comes, sides[0])), what="a share for the newcomer")
    comes.close()
    until(lambda: settled([stays], sides), what="all partitions back")
    stays.close()


def test_static_member_returns_to_its_partitions_without_a_rebalance(cluster: Cluster, sides: list[str]) -> None:
    other, returning = together(cluster, sides, "worker-0", "worker-1")
    before = {topic: (owned(other, topic), owned(returning, topic)) for topic in sides}
    lost: list[TopicPartition] = []
    other.unsubscribe()
    other.close()
    other = cluster.consumer("homes", group_instance_id=cluster.namespace + "worker-0")
    other.subscribe(sides, on_revoke=lambda _, places: lost.extend(places))
    until(lambda: settled([other, returning], sides), what="the first member's return")
    returning.close()
    returning = member(cluster, sides, "worker-1")
    until(lambda: settled([other, returning], sides), what="the second member's return")
    assert {topic: (owned(other, topic), owned(returning, topic)) for topic in sides} == before
    assert lost == []
    other.close()
    returning.close()


def test_second_member_with_the_same_name_fences_the_first(cluster: Cluster, sides: list[str]) -> None:
    first = member(cluster, sides, "worker-0")
    until(lambda: settled([first], sides), what="all partitions at the first")
    second = member(cluster, sides, "worker-0")
    until(lambda: settled([second], sides), what="all partitions at the second")

    def is_reported() -> bool:
        try:
            message = first.poll(0.1)
        except KafkaException as raised:
            return bool(raised.args[0].code() == KafkaError._FATAL)
        return message is not None and message.error() is not None and message.error().code() in GONE

    until(is_reported, what="the first to learn that it was replaced")
    second.close()
    first.close()


def test_group_continues_from_its_committed_offsets(cluster: Cluster, sides: list[str]) -> None:
    cluster.send(sides[0], [b"%d" % index for index in range(6)], partition=1)
    first = member(cluster, sides)
    until(lambda: settled([first], sides), what="an assignment")
    first.commit(offsets=[TopicPartition(sides[0], 1, 4)], asynchronous=False)
    first.close()
    second = member(cluster, sides)
    seen: list[bytes] = []

    def all_seen() -> bool:
        seen.extend(message.value() for message in poll_all([second]))
        return len(seen) >= 2

    until(all_seen, what="the rest")
    assert seen == [b"4", b"5"]
    second.close()


KILLED_MEMBER = """
import sys
from tests.conformance.bus_driver import Cluster, owned, poll_all
bootstrap, namespace, name, *sides = sys.argv[1:]
static = {"group_instance_id": namespace + name} if name else {}
consumer = Cluster(bootstrap, namespace).consumer("homes", session_timeout_ms=6000, **static)
consumer.subscribe(sides)
while True:
    poll_all([consumer])
    if owned(consumer, sides[0]):
        print("has its share", flush=True)
"""


@contextmanager
def killed_in_the_end(cluster: Cluster, sides: list[str], name: str) -> Iterator[Callable[[], bool]]:
    """Run another member in its own process; yield a function that tells whether the member has partitions."""
    command = [sys.executable, "-c", KILLED_MEMBER, cluster.bootstrap, cluster.namespace, name, *sides]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        output = process.stdout
        try:
            yield lambda: bool(select.select([output], [], [], 0)[0]) and bool(output.readline())
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["worker-1", ""], ids=["static", "dynamic"])
@pytest.mark.embedded_fault(
    "never evicts a dead group member: its partitions stay unread until a member of the same name comes back",
    raises=AssertionError,
)
def test_partitions_of_a_killed_member_go_to_live_members(cluster: Cluster, sides: list[str], name: str) -> None:
    [stays] = together(cluster, sides, "worker-0" if name else None)
    with killed_in_the_end(cluster, sides, name) as has_share:
        until(lambda: shared(stays, sides) and has_share(), what="a share for the member that will die")
    until(lambda: settled([stays], sides), what="the dead member's partitions")
    stays.close()


@pytest.mark.slow
def test_killed_static_member_is_replaced_under_its_name(cluster: Cluster, sides: list[str]) -> None:
    """The test follows an environment worker after a crash: it returns at once on any broker, without waiting for an
    eviction."""
    [stays] = together(cluster, sides, "worker-0")
    with killed_in_the_end(cluster, sides, "worker-1") as has_share:
        until(lambda: shared(stays, sides) and has_share(), what="a share for the member that will die")
    returns = member(cluster, sides, "worker-1", session_timeout_ms=6000)
    until(lambda: settled([stays, returns], sides) and bool(owned(returns, sides[0])), what="the member's return")
    stays.close()
    returns.close()


def shared(stays: Consumer, sides: list[str]) -> bool:
    """Whether another member has half of the partitions."""
    poll_all([stays])
    return len(owned(stays, sides[0])) == PARTITIONS // 2
