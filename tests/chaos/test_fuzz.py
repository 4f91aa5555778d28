"""A client with write access to one topic ends no process and publishes no accepted weights, with any message.

20,000 messages: odd, damaged, forged, huge and empty, to every topic and partition, under any headers, in every
compression, derived from the log of this run. The seed is printed.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from rose.pipeline.health_server import MOST_LINES
from rose.pipeline.local.fork_server import ForkedProcess, ForkServer
from rose.schemas.errors import RecordError
from rose.schemas.prompts import Prompt
from rose.schemas.record import Record
from rose.schemas.samples import SampleOutcome
from rose.schemas.wire import decode
from rose.topics.admin import create_topics
from rose.topics.catalog import (
    CHUNKS,
    COMPLETED,
    DISPATCHED,
    MANIFESTS,
    OUTCOMES,
    PROMPTS,
    RECORD_TOPICS,
    REQUESTED,
    SAMPLES,
    Partitions,
    Topic,
    home_partition,
    inbox_slot,
)
from rose.topics.dead_letters import DeadLetterIndex
from rose.topics.local_broker import free_ports
from rose.topics.log_reader import read_whole_topics
from rose.topics.reader import Reader
from rose.topics.records import Envelope, RawMessage
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from rose.workers.weights.trust import Trust, make_keys, public_key, run_id
from tests.golden.examples import EXAMPLES
from tests.support.brokers import EMBEDDED, KAFKA, flags, start
from tests.support.fuzz import FuzzGenerator, send_garbage
from tests.support.lender_server_fixtures import MODEL

SEED = int(os.environ.get("ROSE_STRANGERS_SEED", "1"))
MESSAGES, ROUNDS, BOMBS = 20_000, 20, 20
PARTITIONS = Partitions(home=2, slots=2, samples=1, chunks=1)
NAMESPACE = "strangers."
EXECUTOR = next(name for name in "abcdefgh" if inbox_slot(name, PARTITIONS.slots) == 0)
"""Name of the executor in the first inbox. The other inbox has no executor."""

GARBAGE = 300
"""Number of invalid requests to the metrics of each role."""

SILENT = 3 * MOST_LINES
"""Number of silent connections to each role."""

START_SECONDS, CALM_SECONDS, LEAVE_SECONDS = 600.0, 600.0, 60.0
"""A forged heartbeat counts for at most a minute, so a request ends within some minutes."""

SEEN = 20
"""Number of genuine records per topic that the fuzzer derives messages from."""

LOOK_SECONDS = 0.5
"""Duration of one poll."""

Place = tuple[Topic, int, int]
"""Topic, partition and offset."""
Places = dict[Place, RawMessage]


class Run:
    """The roles of a run, started as users start them."""

    def __init__(self, settings: BusSettings, folder: Path, fork_server: ForkServer) -> None:
        self.settings, self.folder, self.fork_server = settings, folder, fork_server
        key = folder / "key"
        self.public = make_keys(key)
        self.ports = dict(zip(("router", "trainer", "environment", "executor"), free_ports(4), strict=True))
        settings_of_roles = {
            "run.folder": folder / "runs",
            "run.name": "fuzzed",
            "model.folder": MODEL,
            "weights.signing_key": key,
            "weights.trusted_key": self.public,
            "trainer.groups_per_step": 1,
            "environment.window_groups": 256,
            "executor.name": EXECUTOR,
            "environment.max_context_tokens": 256,
            "executor.max_model_len": 256,
            "executor.kv_cache_bytes": 64 << 20,
            **{f"metrics.{role}": port for role, port in self.ports.items()},
        }
        self.arguments = (
            *flags(settings),
            *(word for name, value in settings_of_roles.items() for word in ("--set", f"{name}={value}")),
        )
        self.roles: dict[str, ForkedProcess] = {}
        self._groups = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run all roles; stop them at the end and assert exit status 0."""
        for role in self.ports:
            self.roles[role] = self.fork_server.start(
                (role, *self.arguments), name=role, log=self.folder / f"{role}.log"
            )
        try:
            yield
            for process in self.roles.values():
                process.send_signal(signal.SIGTERM)
            assert {role: process.wait(LEAVE_SECONDS) for role, process in self.roles.items()} == dict.fromkeys(
                self.roles, 0
            ), self.words()
        finally:
            for process in self.roles.values():
                process.send_signal(signal.SIGKILL)

    def words(self) -> str:
        return "\n".join(f"{role}:\n{self.log(role)[-3_000:]}" for role in self.ports)

    def log(self, role: str) -> str:
        return (self.folder / f"{role}.log").read_text(errors="replace")

    def check(self) -> None:
        """Assert that no role has ended or printed a traceback."""
        ended = {role: process.poll() for role, process in self.roles.items() if process.poll() is not None}
        assert not ended, f"{ended}\n{self.words()}"
        assert not [role for role in self.ports if "Traceback" in self.log(role)], self.words()

    def finish_a_group(self, seconds: float) -> None:
        """Submit a genuine prompt and wait for its end."""
        self._groups += 1
        prompt = Prompt(group_id=f"true-{self._groups}", group_size=2, environment="calculator", seed=self._groups)
        awaited = {f"{prompt.group_id}:{index}" for index in range(prompt.group_size)}
        with closing(Reader(self.settings, "earnest", group="earnest")) as reader:
            reader.assign({(OUTCOMES, 0): reader.watermarks((OUTCOMES, 0))[1]})
            with closing(Writer(self.settings, "earnest")) as writer:
                home = home_partition(prompt.group_id, PARTITIONS.home)
                writer.write(PROMPTS, prompt, key=prompt.group_id, partition=home)
                writer.flush()
            deadline = time.monotonic() + seconds
            while awaited:
                self.check()
                assert time.monotonic() < deadline, f"{awaited} have not ended\n{self.words()}"
                for item in reader.read(500, LOOK_SECONDS):
                    if isinstance(item, Envelope) and isinstance(item.record, SampleOutcome):
                        awaited.discard(item.record.trajectory_id)

    def dead_letter(self, expected: set[Place], seconds: float) -> None:
        """Wait until the messages at these offsets are dead-lettered."""
        found, deadline = DeadLetterIndex(self.settings, *(place[0] for place in expected)), time.monotonic() + seconds
        while left := [place for place in expected if place[1:] not in found.places(place[0])]:
            self.check()
            assert time.monotonic() < deadline, f"{len(left)} of {len(expected)} are no dead letters: {left[:5]}"
            found.read()

    def look(self, *arguments: str) -> None:
        """Run a command that reads the log. It must accept every message without a traceback."""
        command = [sys.executable, "-P", "-m", "rose.pipeline.cli.main", *arguments, *self.arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
        assert "Traceback" not in done.stderr and done.returncode in (0, 1), (arguments, done.stderr[-3_000:])


def spoiled(places: Places) -> Iterator[Place]:
    """Return the offsets that readers must dead-letter: undecodable messages of topics whose readers own them."""
    for (topic, partition, offset), raw in places.items():
        assert topic.record is not None
        if topic not in (PROMPTS, REQUESTED, COMPLETED, SAMPLES, DISPATCHED):
            continue  # an undecodable newest record is skipped, and heartbeats have no owning reader
        if topic is DISPATCHED and partition > 0:
            continue
        if raw.value is None:
            if topic in (PROMPTS, COMPLETED, SAMPLES):
                yield topic, partition, offset
            continue
        try:
            decode(topic.record, raw.value, raw.headers)
        except RecordError:
            yield topic, partition, offset


class FuzzedTopics:
    """Fuzzed writes to all topics, and the offsets that the broker has stored."""

    def __init__(self, settings: BusSettings, fuzz: FuzzGenerator) -> None:
        self.stored: Places = {}
        self.refused: Counter[str] = Counter()
        self._settings, self._fuzz = settings, fuzz
        plain = {**settings.client("stranger"), "message.max.bytes": 64 << 20}  # the broker refuses what is too large
        kinds = ("none", "lz4", "gzip", "zstd", "snappy")
        self._producers = [Producer({**plain, "compression.type": kind}) for kind in kinds]

    def write(self, count: int, bombs: int) -> None:
        draw = self._fuzz.draw
        for number in range(count):
            topic = draw.choice(RECORD_TOPICS)
            raw = self._fuzz.bomb() if number < bombs else self._fuzz.message(topic)
            self._produce(draw.choice(self._producers), topic, raw)
        for producer in self._producers:
            assert producer.flush(60) == 0

    def _produce(self, producer: Producer, topic: Topic, raw: RawMessage) -> None:
        def stored(error: KafkaError | None, message: Message) -> None:
            if error is None:
                self.stored[topic, int(message.partition() or 0), int(message.offset() or 0)] = raw
            else:
                self.refused[error.name()] += 1

        partition = self._fuzz.draw.randrange(PARTITIONS.count_of(topic.partition_setting))
        name, headers = self._settings.topic(topic), list(raw.headers)
        try:
            producer.produce(name, raw.value, raw.key, partition=partition, headers=headers, on_delivery=stored)
        except KafkaException as error:  # raised by the client itself; no other client would send the message
            if error.args[0].code() != KafkaError.MSG_SIZE_TOO_LARGE:
                raise
            self.refused["before it was sent"] += 1
        producer.poll(0)


def versions_served(log: str) -> set[int]:
    lines = [line for line in log.splitlines() if "event=version_activated" in line]
    return {
        int(word.removeprefix("version=")) for line in lines for word in line.split() if word.startswith("version=")
    }


def genuine_versions(run: Run) -> set[int]:
    """Return the versions of the manifests that the trainer has signed."""
    trust = Trust("policy", run_id(NAMESPACE, "fuzzed"), public_key(run.public))
    found = (trust.verified(each) for each in read_whole_topics(run.settings, [MANIFESTS]))
    return {manifest.version for manifest in found if manifest is not None}


def seen(settings: BusSettings) -> Iterator[Record]:
    """Return the newest records of every topic except the large chunks, which the fuzzer may have seen."""
    for topic in RECORD_TOPICS:
        if topic is not CHUNKS:
            found = [each.record for each in read_whole_topics(settings, [topic]) if each.record is not None]
            yield from found[-SEEN:]


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_fuzzed_records_end_no_process_and_forge_no_weights(tmp_path: Path) -> None:
    print(f"ROSE_STRANGERS_SEED={SEED}")
    kind = KAFKA if os.environ.get("KAFKA_HOME") else EMBEDDED
    with start(kind, tmp_path / "broker") as broker, ForkServer(tmp_path) as fork_server:
        settings = broker.settings(NAMESPACE)
        create_topics(settings, PARTITIONS)
        run = Run(settings, tmp_path, fork_server)
        with run.running():
            run.finish_a_group(START_SECONDS)
            fuzzed = FuzzedTopics(settings, FuzzGenerator(SEED, examples=(*EXAMPLES, *seen(settings))))
            while len(fuzzed.stored) < MESSAGES:
                fuzzed.write(MESSAGES // ROUNDS, BOMBS // ROUNDS)
                run.check()
            print(f"{len(fuzzed.stored)} messages of strangers are on the log; refused: {dict(fuzzed.refused)}")
            expected = set(spoiled(fuzzed.stored))
            run.dead_letter(expected, CALM_SECONDS)
            silent = [socket.create_connection(("127.0.0.1", port), 60) for port in [*run.ports.values()] * SILENT]
            for number, port in enumerate(run.ports.values()):
                send_garbage(port, SEED + number, GARBAGE)
            for line in silent:
                assert line.recv(1) == b"", "who says nothing is let go of"
                line.close()
            run.finish_a_group(CALM_SECONDS)
            for command in (
                ("audit",),
                ("status", "--json"),
                ("dlq", "list"),
                ("why", "true-1"),
                ("replay", "true-1:0"),
            ):
                run.look(*command)
            assert versions_served(run.log("executor")) <= genuine_versions(run)
        with run.running():  # the restart reads all fuzzed messages back
            run.finish_a_group(CALM_SECONDS)
        assert versions_served(run.log("executor")) <= genuine_versions(run)
        activated = run.log("executor").count("event=version_activated")
        print(f"{len(expected)} of them are dead letters, {activated} versions activated")
