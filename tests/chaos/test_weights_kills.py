"""Publisher and receiver are killed with SIGKILL at random points: every surviving, late or slow receiver ends with the
same bits.

ROSE_CHAOS_SEEDS is the number of seeds (2 by default), ROSE_CHAOS_SEED the first.
"""

import multiprocessing
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rose.topics.admin import create_topics
from rose.topics.catalog import Partitions
from rose.topics.settings import BusSettings
from rose.workers.weights.chunk_stores import AnchorStore
from rose.workers.weights.config import WeightsConfig
from rose.workers.weights.publish import WeightPublisher
from rose.workers.weights.receive import WeightReceiver
from rose.workers.weights.trust import make_trust
from tests.support.brokers import AnyBroker, kafka_first
from tests.support.weights_fixtures import newest_manifest

MODEL = "policy"
LAST = 14
ANCHOR_EVERY = 4
KILLS = 4
WAIT_SECONDS = 90.0
SHAPES = {"embed": (1200, 700), "norm": (64,), "scale": ()}

# Any number that is the same in all processes of pytest-xdist, which must collect the same tests.
FRESH_SEED = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID")).randrange(2**20)
FIRST_SEED = int(os.environ.get("ROSE_CHAOS_SEED", FRESH_SEED))
SEEDS = range(FIRST_SEED, FIRST_SEED + int(os.environ.get("ROSE_CHAOS_SEEDS", "2")))


def tensors_at(seed: int, version: int) -> dict[str, Tensor]:
    """Return the tensors of a version, which any process can compute."""
    generator = torch.Generator().manual_seed(seed)
    start = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: (tensor * (1 + 3e-4 * version)).bfloat16() for name, tensor in start.items()}


def store_in(folder: str, seed: int) -> AnchorStore | None:
    """Return the anchor store; every other seed has one."""
    return AnchorStore(folder) if seed % 2 else None


def publish(settings: BusSettings, folder: str, seed: int, last: int, connection: Connection) -> None:
    """Publish versions from the newest on the log to `last`."""
    publisher = WeightPublisher(settings, MODEL, anchor_every=ANCHOR_EVERY, store=store_in(folder, seed))
    for version in range(publisher.next_version, last + 1):
        publisher.publish(tensors_at(seed, version).items(), version).result()
        connection.send(version)


def receive(settings: BusSettings, folder: str, seed: int, connection: Connection) -> None:
    """Report for every staged version whether it is correct, up to the last."""
    trust = make_trust(settings, MODEL, WeightsConfig())
    receiver = WeightReceiver(settings, trust, shapes=SHAPES, store=store_in(folder, seed))
    receiver.start()
    version = -1
    while version < LAST:
        staged = receiver.staged(WAIT_SECONDS)
        assert staged is not None
        version = staged.version
        exact = all(torch.equal(staged.tensors[name], tensor) for name, tensor in tensors_at(seed, version).items())
        connection.send((version, exact))


class ReceiverProcess:
    """A process that can be killed and restarted."""

    def __init__(self, target: object, *arguments: object) -> None:
        self._target, self._arguments = target, arguments
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "rose.workers.weights.publish", "rose.workers.weights.receive"])
        self.received, connection = context.Pipe(duplex=False)
        self.process: ForkServerProcess = context.Process(target=self._target, args=(*self._arguments, connection))  # type: ignore[arg-type]
        self.process.start()
        connection.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(WAIT_SECONDS)

    def messages(self) -> Iterator[object]:
        """Yield the messages of the process until it ends or is killed."""
        while self.received.poll(WAIT_SECONDS):
            try:
                yield self.received.recv()
            except EOFError:
                return
        raise AssertionError("the process says nothing")


@contextmanager
def children(*found: ReceiverProcess) -> Iterator[None]:
    try:
        yield
    finally:
        for child in found:
            child.kill()


def check_to_the_end(receiver: ReceiverProcess, *received: object) -> None:
    """Check all messages of the process, after those already read."""
    versions = []
    for message in chain(received, receiver.messages()):
        assert isinstance(message, tuple)
        version, exact = message
        assert exact, f"version {version} is not what was published"
        versions.append(version)
    assert versions == sorted(versions)
    assert versions and versions[-1] == LAST


@kafka_first
@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_surviving_receivers_have_the_last_version(
    broker: AnyBroker, namespace: str, tmp_path: Path, seed: int
) -> None:
    print(f"seed {seed}: ROSE_CHAOS_SEED={seed} repeats it")
    moments = random.Random(seed)
    settings = broker.settings(namespace)
    create_topics(settings, Partitions(home=1, slots=1, samples=1, chunks=2))
    arguments = (settings, str(tmp_path), seed)
    # At first only version 1 is published: a receiver of all versions at once would end before the stop.
    beginning, receiver, slow = (
        ReceiverProcess(publish, *arguments, 0),
        ReceiverProcess(receive, *arguments),
        ReceiverProcess(receive, *arguments),
    )
    with children(beginning, receiver, slow):
        first = next(slow.messages())
        os.kill(slow.process.pid or 0, signal.SIGSTOP)
        assert list(beginning.messages()) == [0]
        publisher = ReceiverProcess(publish, *arguments, LAST)
        with children(publisher):
            for _ in range(KILLS):
                victim = moments.choice((publisher, receiver))
                victim.process.join(moments.uniform(0.0, 0.4))
                victim.kill()
                victim.start()
            os.kill(slow.process.pid or 0, signal.SIGCONT)
            for message in publisher.messages():
                assert isinstance(message, int)
            publisher.process.join(WAIT_SECONDS)
            newest = newest_manifest(settings, make_trust(settings, MODEL, WeightsConfig()))
            assert newest is not None and newest.version == LAST
            late = ReceiverProcess(receive, *arguments)
            with children(late):
                check_to_the_end(receiver)
                check_to_the_end(slow, first)
                check_to_the_end(late)
