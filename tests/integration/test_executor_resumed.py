"""A stopping executor hands its turns back, and another executor finishes them: a router and two engines."""

import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from rose.pipeline.local.fork_server import ForkedProcess, ForkServer
from rose.schemas.arrays import count, pack_tokens, unpack_logprobs, unpack_tokens
from rose.schemas.heartbeats import ExecutorState, SlackHeartbeat
from rose.schemas.prompts import Sampling
from rose.schemas.sampled_tokens import VersionSpan
from rose.schemas.turns import TurnDispatch, TurnOutcome, TurnRequest, TurnResult, context_fields
from rose.topics.admin import create_topics
from rose.topics.catalog import COMPLETED, DISPATCHED, HEARTBEATS, REQUESTED, Partitions
from rose.topics.reader import Reader
from rose.topics.records import Envelope
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from rose.workers.weights.manifests import sign_manifest
from rose.workers.weights.publish import WeightPublisher
from tests.support.brokers import AnyBroker, any_broker
from tests.support.executor_fixtures import start_executor
from tests.support.policy_folders import new_policy, tensors_of
from tests.support.router_process_fixtures import router_process

pytestmark = pytest.mark.slow

WAIT_SECONDS = 240.0
TURNS, CONTEXT_TOKENS, MOST_TOKENS = 4, 40, 600


@contextmanager
def executor(fork_server: ForkServer, settings: BusSettings, folder: Path, slot: int) -> Iterator[ForkedProcess]:
    executor = start_executor(fork_server, settings, folder, slot=slot, most_tokens=1024, kv_cache_bytes=32 << 20)
    try:
        yield executor
    finally:
        executor.send_signal(signal.SIGKILL)
        executor.wait()


class Log:
    """The records read from the topics so far, and the environment worker's side of the log."""

    def __init__(self, settings: BusSettings) -> None:
        self.writer = Writer(settings, "test")
        self.reader = Reader(settings, "test", group="test")
        self.reader.assign({(COMPLETED, 0): 0, (HEARTBEATS, 0): 0, (DISPATCHED, 0): 0, (DISPATCHED, 1): 0})
        self.results: list[TurnResult] = []
        self.dispatches: list[TurnDispatch] = []
        self.heartbeats: dict[int, SlackHeartbeat] = {}
        """The newest heartbeat of each slot."""

    def of(self, outcome: TurnOutcome) -> dict[str, TurnResult]:
        """Return the results by trajectory; there is one per trajectory."""
        found = [each for each in self.results if each.outcome is outcome]
        assert len({each.trajectory_id for each in found}) == len(found)
        return {each.trajectory_id: each for each in found}

    def until(self, met: Callable[[], bool]) -> None:
        """Read until the condition holds."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not met():
            assert time.monotonic() < deadline, (self.heartbeats, len(self.results), len(self.dispatches))
            for item in self.reader.read(100, 0.1):
                match item.record if isinstance(item, Envelope) else None:
                    case TurnResult() as result:
                        self.results.append(result)
                    case TurnDispatch() as dispatch:
                        self.dispatches.append(dispatch)
                    case SlackHeartbeat() as beat:
                        self.heartbeats[beat.slot] = beat

    def ready(self) -> bool:
        return [self.heartbeats[slot].state for slot in sorted(self.heartbeats)] == [ExecutorState.READY] * 2

    def ask(self, group: str) -> None:
        """Request one turn in each of TURNS groups. The sampled tokens depend only on the group number."""
        for number in range(TURNS):
            request = TurnRequest(
                trajectory_id=f"{group}{number}:0",
                group_id=f"{group}{number}",
                home=0,
                environment="calculator",
                turn=0,
                **context_fields(pack_tokens([1 + (number + place) % 40 for place in range(CONTEXT_TOKENS)])),
                sampling=Sampling(max_tokens=MOST_TOKENS, seed=number),
                requested_at=time.time(),
                patience_seconds=600.0,
            )
            self.writer.write(REQUESTED, request, key=request.trajectory_id, partition=0)
        self.writer.flush()


@any_broker
@pytest.mark.timeout(900)  # vLLM starts twice
def test_turns_of_a_stopping_executor_end_identically_on_another(
    broker: AnyBroker, namespace: str, fork_server: ForkServer, tmp_path: Path
) -> None:
    settings = broker.settings(namespace)
    create_topics(settings, Partitions(home=1, slots=2, samples=1, chunks=2))
    model = new_policy(0, tied=True)
    log = Log(settings)
    publisher = WeightPublisher(settings, "policy")
    manifest = publisher.put(publisher.snapshot(tensors_of(model).items()), 0, step=0, published_at=time.time())
    sign_manifest(manifest, None).write(log.writer)
    log.writer.flush()
    with (
        executor(fork_server, settings, tmp_path, 0) as first,
        executor(fork_server, settings, tmp_path, 1) as second,
        router_process(settings),
    ):
        log.until(log.ready)
        log.ask("whole")
        log.until(lambda: len(log.of(TurnOutcome.COMPLETED)) == TURNS)
        log.until(lambda: not any(beat.holds for beat in log.heartbeats.values()))
        log.ask("broken")
        log.until(lambda: any(samples(beat) for beat in log.heartbeats.values()))
        slot = next(slot for slot, beat in log.heartbeats.items() if samples(beat))
        stopping = (first, second)[slot]
        stopping.send_signal(signal.SIGTERM)
        log.until(lambda: len(log.of(TurnOutcome.COMPLETED)) == 2 * TURNS)
        assert stopping.wait(WAIT_SECONDS) == 0
    check(log, f"executor-{slot}", f"executor-{1 - slot}")


def samples(beat: SlackHeartbeat) -> bool:
    """Whether a turn of the executor has KV, which the engine reports after the step that samples its first token."""
    return bool(beat.holds) and beat.kv_bytes_free < beat.kv_bytes_total


def check(log: Log, stopped: str, other: str) -> None:
    """Check the log: one COMPLETED result per turn, and no token sampled twice."""
    done, parts = log.of(TurnOutcome.COMPLETED), log.of(TurnOutcome.PREEMPTED)
    resumed_names = [name for name, part in parts.items() if part.tokens]
    assert resumed_names, "the executor stopped between the turns"
    for number in range(TURNS):
        whole, broken = done[f"whole{number}:0"], done[f"broken{number}:0"]
        assert broken.tokens == whole.tokens and count(whole.tokens) == MOST_TOKENS
        assert np.abs(unpack_logprobs(broken.logprobs) - unpack_logprobs(whole.logprobs)).max() < 1e-4
        assert broken.spans == (VersionSpan(0, MOST_TOKENS, 0),)
    assert not any(each.failures for each in log.dispatches)
    for name in resumed_names:
        part, end = parts[name], done[name]
        assert (part.worker, end.worker, end.attempt) == (stopped, other, 1)
        assert 0 < count(part.tokens) < MOST_TOKENS
        first, second = [each for each in log.dispatches if each.request.trajectory_id == name]
        assert (first.partial, second.partial) == (None, part.part)
        assert end.context_tokens == CONTEXT_TOKENS + count(part.tokens), "the rest alone was sampled"
        assert unpack_tokens(end.tokens)[: count(part.tokens)] == unpack_tokens(part.tokens)
        assert end.device_seconds["dedicated"] > part.device_seconds["dedicated"] > 0
    workers: dict[str, list[str]] = defaultdict(list)
    for each in log.dispatches:
        workers[each.request.trajectory_id].append(each.worker)
    # at once, or after the dispatch was unread in the inbox of the stopped executor
    for name in done.keys() - parts.keys():
        assert len(workers[name]) == 1 or workers[name] == [stopped, other], name
