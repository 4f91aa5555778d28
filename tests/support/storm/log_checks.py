"""The log of a storm, read by an independent reader and by kcat, and checks of the conservation law.

Keeps true: the checks use only the topic names of ROSE. The audit of ROSE is compared as one more source.
"""

import re
import struct
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgpack
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

from rose.pipeline.audit import audit_log
from rose.topics.catalog import COMPLETED, DISPATCHED, OUTCOMES, PROMPTS, REQUESTED, SAMPLES
from rose.topics.dead_letters import OFFSET, PARTITION, TOPIC
from rose.topics.settings import BusSettings
from tests.support.storm.lines import LineKind
from tests.support.storm.plan import Plan, Role

WAIT_SECONDS = 60.0
"""A reader that gets no record and no partition end for so long cannot read the log."""
READ_SECONDS = 0.2
"""Time in which a reader collects records."""
MARK = re.compile(rb"mark-\d+\.")


@dataclass(frozen=True, slots=True)
class LoggedRecord:
    """One committed record."""

    topic: str
    partition: int
    offset: int
    at: float
    """Unix seconds, as stamped by its producer."""
    key: bytes | None
    value: bytes | None
    headers: Mapping[str, bytes]

    @property
    def record(self) -> dict[str, Any]:
        """The value, decoded as a map."""
        found: dict[str, Any] = msgpack.unpackb(self.value, strict_map_key=False)
        return found

    @property
    def mark(self) -> str:
        """Mark of the line that the record came from; empty if it came from none."""
        return mark_of(self.value)


def mark_of(value: bytes | None) -> str:
    found = MARK.search(value or b"")
    return found[0].decode() if found else ""


def consumer_of(settings: BusSettings) -> Consumer:
    """Return a consumer of committed records in its own consumer group."""
    return Consumer(
        {
            "bootstrap.servers": settings.bootstrap,
            "group.id": f"{settings.namespace}storm",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "receive.message.max.bytes": 512 * 2**20,
            "log_level": 0,
        }
    )


def begin(consumer: Consumer, topics: list[str]) -> set[tuple[str, int]]:
    """Assign these topics from their first record; return their partitions."""
    known = consumer.list_topics(timeout=WAIT_SECONDS).topics
    places = {(topic, partition) for topic in topics for partition in known[topic].partitions}
    consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for topic, partition in places])
    return places


def found_in(message: Any) -> LoggedRecord:
    headers = {name: value for name, value in message.headers() or () if isinstance(value, bytes)}
    at = message.timestamp()[1] / 1000
    return LoggedRecord(
        message.topic(), message.partition(), message.offset(), at, message.key(), message.value(), headers
    )


def read_all(settings: BusSettings, topics: list[str]) -> Iterator[LoggedRecord]:
    """Yield every committed record of these topics up to their current end. Raises TimeoutError."""
    consumer = consumer_of(settings)
    try:
        left = begin(consumer, topics)
        deadline = time.monotonic() + WAIT_SECONDS
        while left:
            messages = consumer.consume(500, READ_SECONDS)
            if messages:
                deadline = time.monotonic() + WAIT_SECONDS
            elif time.monotonic() > deadline:
                raise TimeoutError(f"nothing was read of {left} in {WAIT_SECONDS:.0f} s")
            for message in messages:
                error = message.error()
                if error is None:
                    yield found_in(message)
                elif error.code() == KafkaError._PARTITION_EOF:
                    left.discard((message.topic(), message.partition()))
    finally:
        consumer.close()


def read_by_kcat(settings: BusSettings, topic: str) -> list[tuple[bytes, bytes]]:
    """Yield key and value of every committed record, as kcat reads them."""
    command = ["kcat", "-C", "-b", settings.bootstrap, "-t", topic, "-e", "-q"]
    command += ["-X", "isolation.level=read_committed", "-X", "receive.message.max.bytes=536870912", "-f", "%k\n%R%s"]
    read = subprocess.run(command, capture_output=True, timeout=WAIT_SECONDS, check=True).stdout
    records = []
    while read:
        key, _, rest = read.partition(b"\n")
        (size,) = struct.unpack_from(">i", rest)
        value = rest[4 : 4 + max(0, size)]
        records.append((key, value))
        read = rest[4 + len(value) :]
    return records


Turn: TypeAlias = tuple[str, int]
"""A trajectory and one of its turns."""


@dataclass(slots=True)
class Log:
    """Counts of the records that the conservation law relates."""

    outcomes: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Outcomes of every trajectory."""
    lines: dict[tuple[str, int, int], str] = field(default_factory=dict)
    """The mark of every prompt, by topic, partition and offset."""
    dead_letters: list[tuple[tuple[str, int, int], str]] = field(default_factory=list)
    """The location that each dead-lettered prompt names, and its mark."""
    other_letters: Counter[str] = field(default_factory=Counter)
    """Dead letters of other topics."""
    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    withdrawn: set[tuple[str, int]] = field(default_factory=set)
    """Turns whose requests were withdrawn."""
    held: set[tuple[str, int]] = field(default_factory=set)
    """Turns that were on hold, and were requested again."""
    dispatches: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Number of dispatches of each turn."""
    results: int = 0
    samples: Counter[str] = field(default_factory=Counter)
    sample_turns: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """The turns in the samples of each trajectory."""
    sampled_at: dict[str, float] = field(default_factory=dict)
    """Time at which each trajectory ended."""
    applied_at: list[float] = field(default_factory=list)
    """Times at which turns were applied: the next turn was requested, or the sample written."""
    produced_at: dict[str, float] = field(default_factory=dict)
    """Time of the first line with each mark."""

    faults: int = 0
    """Largest number of failed attempts at one turn; a silence counts as a failure."""
    waits: dict[Role, float] = field(default_factory=dict)
    """Longest time that a turn waited for its dispatch, and a result for its application, in seconds."""

    @property
    def turns(self) -> int:
        """Number of applied turns."""
        return sum(map(len, self.sample_turns.values()))


def read_log(settings: BusSettings, *, blocked: Container[str] = ()) -> Log:
    """Read the whole log. `blocked` are the trajectories that wait for their environments and for no worker."""
    log = Log()
    attempts: dict[Turn, set[int]] = defaultdict(set)
    asked_at: dict[Turn, float] = {}
    sent_at: dict[Turn, float] = {}
    answered_at: dict[Turn, float] = {}
    name = settings.topic
    topics = (PROMPTS, REQUESTED, DISPATCHED, COMPLETED, SAMPLES, OUTCOMES)
    for found in read_all(settings, [name(topic) for topic in topics]):
        if found.topic == name(PROMPTS):
            log.lines[found.topic, found.partition, found.offset] = found.mark
            log.produced_at.setdefault(found.mark, found.at)
        elif found.value is None:
            continue  # a tombstone has no turn
        elif found.topic == name(REQUESTED):
            turn = found.record["trajectory_id"], found.record["turn"]
            if found.record.get("withdrawn") or found.record.get("hold"):
                (log.withdrawn if found.record["withdrawn"] else log.held).add(turn)
                continue
            log.requests[turn] += 1
            asked_at.setdefault(turn, found.at)
            if turn[1] > 0:
                log.applied_at.append(found.at)
        elif found.topic == name(DISPATCHED):
            if found.record.get("withdrawn"):
                continue
            request = found.record["request"]
            turn = request["trajectory_id"], request["turn"]
            attempts[turn].add(found.record["attempt"])
            sent_at.setdefault(turn, found.at)
            log.faults = max(log.faults, found.record.get("failures", 0))
        elif found.topic == name(COMPLETED):
            log.results += 1
            if found.record["outcome"] == "completed":
                answered_at.setdefault((found.record["trajectory_id"], found.record["turn"]), found.at)
        elif found.topic == name(SAMPLES):
            trajectory = found.record["trajectory_id"]
            log.samples[trajectory] += 1
            log.sample_turns[trajectory] += [turn[0] for turn in found.record["turns"]]
            log.sampled_at[trajectory] = found.at
            log.applied_at.append(found.at)
        else:
            log.outcomes[found.record["trajectory_id"]].append(found.record["outcome"])
    applied_at = {(name, turn): asked_at.get((name, turn + 1), log.sampled_at.get(name)) for name, turn in answered_at}
    applied_at = {turn: at for turn, at in applied_at.items() if turn[0] not in blocked}
    log.waits = {
        Role.ROUTER: max((at - asked_at[turn] for turn, at in sent_at.items()), default=0.0),
        Role.ENVIRONMENT: max((at - answered_at[turn] for turn, at in applied_at.items() if at), default=0.0),
    }
    log.dispatches = Counter({turn: len(numbers) for turn, numbers in attempts.items()})
    dead_letters = [f"{name(topic)}.dlq" for topic in topics]
    for found in read_all(settings, dead_letters):
        if found.topic != dead_letters[0]:
            log.other_letters[found.topic] += 1
            continue
        place = (found.headers[TOPIC].decode(), int(found.headers[PARTITION]), int(found.headers[OFFSET]))
        log.dead_letters.append((place, found.mark))
    return log


def breaches(plan: Plan, log: Log, settings: BusSettings) -> list[str]:
    """Return every violation of the conservation law, one sentence each."""
    return [*_of_outcomes(plan, log), *of_turns(log), *_of_letters(plan, log), *_of_others(plan, log, settings)]


def _of_outcomes(plan: Plan, log: Log) -> Iterator[str]:
    requested = plan.trajectories
    for trajectory in sorted(requested - log.outcomes.keys()):
        yield f"{trajectory} has no outcome"
    for trajectory, ends in sorted(log.outcomes.items()):
        if trajectory not in requested:
            yield f"{trajectory} has an outcome ({', '.join(ends)}), and nobody asked for it"
        if len(ends) > 1:
            yield f"{trajectory} has {len(ends)} outcomes: {', '.join(ends)}"
        blocked = trajectory in plan.blocked
        if blocked != ("infra_failed" in ends):
            yield f"{trajectory} ended as {', '.join(ends)}, and its environment {'blocked' if blocked else 'was well'}"


def of_turns(log: Log) -> Iterator[str]:
    """Check that each turn was requested once, and is in its sample once unless its request was withdrawn."""
    for (trajectory, turn), many in sorted(log.requests.items()):
        if many > 1 and (trajectory, turn) not in log.held:
            yield f"turn {turn} of {trajectory} was asked for {many} times"
    for trajectory, many in sorted(log.samples.items()):
        if many > 1:
            yield f"{trajectory} has {many} samples"
    requested: dict[str, list[int]] = defaultdict(list)
    for trajectory, turn in sorted(log.requests.keys() - log.withdrawn):
        requested[trajectory].append(turn)
    for trajectory, turns in sorted(log.sample_turns.items()):
        if turns != requested[trajectory]:
            yield f"turns {turns} are in the sample of {trajectory}, and {requested[trajectory]} were asked for"


def _of_letters(plan: Plan, log: Log) -> Iterator[str]:
    many = Counter(mark for _, mark in log.dead_letters)
    for line in plan.lines:
        if line.mark not in log.produced_at:
            yield f"kcat did not bring {line.mark} to the log"
        elif line.sort is LineKind.BAD and many[line.mark] != 1:
            yield f"bad line {line.mark} is a dead letter {many[line.mark]} times: {line.value[:80]!r}"
    groups: dict[str, list[str]] = defaultdict(list)
    for line in plan.lines:
        if line.sort is not LineKind.BAD:
            groups[line.group_id].append(line.mark)
    for group_id, marks in groups.items():
        dead_letters = [many[mark] for mark in marks]
        if sorted(dead_letters) != [0, *[1] * (len(marks) - 1)]:
            yield f"of {len(marks)} prompts of {group_id} one opens; they are dead letters {dead_letters} times"
    for place, times in Counter(place for place, _ in log.dead_letters).items():
        if times > 1:
            yield f"what lies at {place} is a dead letter {times} times"
    for place, mark in log.dead_letters:
        if log.lines.get(place) != mark:
            yield f"the dead letter of {mark or 'nobody'} names {place}, where {log.lines.get(place, 'nothing')} lies"
    for topic, times in log.other_letters.items():
        yield f"{times} dead letters in {topic}: nobody wrote there but ROSE"


def _of_others(plan: Plan, log: Log, settings: BusSettings) -> Iterator[str]:
    """Compare with ROSE's audit and kcat."""
    audit = audit_log(settings)
    if not audit.clean or audit.requested != len(plan.trajectories) or audit.settled != audit.requested:
        yield (
            f"rose audit: {audit.requested} requested, {audit.settled} settled, {len(audit.lost)} lost, "
            f"{len(audit.doubled)} doubled, {len(audit.unasked)} unasked"
        )
    outcomes = Counter(key.decode() for key, _ in read_by_kcat(settings, settings.topic(OUTCOMES)))
    if outcomes != Counter({trajectory: len(ends) for trajectory, ends in log.outcomes.items()}):
        yield f"kcat counts {sum(outcomes.values())} outcomes of {len(outcomes)} trajectories, and that is not the log"
    dead = f"{settings.namespace}{PROMPTS.dead_letters}"
    dead_letters = Counter(mark_of(value) for _, value in read_by_kcat(settings, dead))
    if dead_letters != Counter(mark for _, mark in log.dead_letters):
        yield f"kcat counts {sum(dead_letters.values())} dead prompts, and that is not the log"
