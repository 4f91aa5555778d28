"""The executor on a real broker with a real engine: turns in, results out, and weight swaps between."""

import os
import select
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rose.pipeline.config.options import Common
from rose.pipeline.health_server import ProcessUnhealthy, print_health
from rose.pipeline.local.fork_server import ForkedProcess, ForkServer
from rose.schemas.arrays import unpack_logprobs, unpack_tokens
from rose.schemas.heartbeats import ExecutorState
from rose.schemas.sampled_tokens import VersionSpan
from rose.schemas.turns import FENCING_KEY, Refusal, TurnOutcome, TurnResult
from rose.topics.admin import create_topics
from rose.topics.catalog import DISPATCHED, Partitions
from rose.topics.dead_letters import read_dead_letters
from rose.topics.local_broker import Broker, free_ports
from rose.topics.log_reader import read_whole_topics
from rose.topics.records import RawMessage
from rose.topics.settings import BusSettings
from tests.support.brokers import EMBEDDED, AnyBroker, any_broker, kafka_first
from tests.support.executor_fixtures import SLOT, WAIT_SECONDS, Router, engine_of, start_executor
from tests.support.policy_folders import logprobs_of, new_policy
from tests.support.waiting import until

pytestmark = pytest.mark.slow

FREEZE_SECONDS = 5.0
AWAY_SECONDS = 15.0
"""Longer than the interval at which the client tries to reach a broker again."""


def start(fork_server: ForkServer, settings: BusSettings, folder: Path, *, metrics_port: int = 0) -> ForkedProcess:
    return start_executor(
        fork_server, settings, folder, slot=SLOT, most_tokens=256, kv_cache_bytes=16 << 20, metrics_port=metrics_port
    )


@pytest.fixture
def settings(broker: AnyBroker, namespace: str) -> BusSettings:
    settings = broker.settings(namespace)
    create_topics(settings, Partitions(home=2, slots=2, samples=1, chunks=2))
    return settings


@pytest.fixture
def metrics_port() -> int:
    return free_ports(1)[0]


@pytest.fixture
def executor(
    settings: BusSettings, fork_server: ForkServer, tmp_path: Path, metrics_port: int
) -> Iterator[ForkedProcess]:
    executor = start(fork_server, settings, tmp_path, metrics_port=metrics_port)
    yield executor
    executor.send_signal(signal.SIGTERM)
    executor.wait()
    print((tmp_path / f"executor-{SLOT}.log").read_text())


@pytest.fixture
def router(settings: BusSettings, executor: ForkedProcess) -> Router:
    return Router(settings, executor)


def prove(result: TurnResult, model: Any, context: list[int], version: int) -> None:
    """Assert that this model sampled the result under this version: its logprobs equal those of transformers."""
    tokens = unpack_tokens(result.tokens)
    assert result.outcome is TurnOutcome.COMPLETED
    assert result.spans == (VersionSpan(0, len(tokens), version),)
    assert result.context_tokens == len(context)
    expected = logprobs_of(model, context, tokens).numpy()
    assert np.abs(unpack_logprobs(result.logprobs) - expected).max() < 1e-4


@kafka_first
def test_executor_runs_from_start_to_its_second_version(
    router: Router, metrics_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def health() -> str:
        try:
            print_health(Common(), f"127.0.0.1:{metrics_port}", live=False)
        except ProcessUnhealthy as unwell:
            return f"unwell: {unwell}"
        return capsys.readouterr().out.strip()

    models = [new_policy(seed, tied=True) for seed in (0, 1, 2)]
    context = [3, 4, 5, 6] * 20

    router.until(lambda: bool(router.heartbeats))
    assert (router.heartbeats[-1].state, router.heartbeats[-1].policy_version) == (ExecutorState.STARTING, -1)
    until(lambda: health() == "unwell: waits for a first policy version")
    print_health(Common(), f"127.0.0.1:{metrics_port}", live=True)
    capsys.readouterr()
    router.dispatch("too-early", context)
    refused = router.result("too-early")
    assert (refused.outcome, refused.refusal) == (TurnOutcome.REFUSED, Refusal.VERSION)

    router.publish(models[1], 1)
    router.until(lambda: router.serves(1))
    assert router.heartbeats[-1].state is ExecutorState.READY
    router.dispatch("first", context)
    prove(router.result("first"), models[1], context, 1)
    router.dispatch("second", context)
    assert router.result("second").cached_tokens > 0

    router.publish(models[2], 2, digest=bytes(16))
    router.publish(models[2], 3)
    router.until(lambda: router.serves(3))
    assert not any(beat.policy_version == 2 for beat in router.heartbeats)
    until(lambda: health() == "serves version 3")
    router.dispatch("third", context)
    third = router.result("third")
    prove(third, models[2], context, 3)
    assert third.cached_tokens == 0

    router.dispatch("ghost", context, incarnation=router.heartbeats[-1].incarnation - 1)
    router.dispatch("too-long", context, max_tokens=60_000)
    router.dispatch("long", [3] * 300)
    assert router.result("too-long").refusal is Refusal.ROOM
    long = router.result("long")
    assert long.refusal is Refusal.ENGINE and "context" in long.reason
    assert not any(result.trajectory_id == "ghost" for result in router.results)

    times = third.times
    assert 0 < times.requested_at <= times.dispatched_at <= times.received_at <= times.scheduled_at
    assert times.scheduled_at <= times.first_token_at <= times.finished_at
    assert third.device_seconds["dedicated"] > 0


@any_broker
def test_turns_beyond_the_offer_are_refused_and_others_answered_once(router: Router) -> None:
    router.publish(new_policy(0, tied=True), 0)
    router.until(lambda: router.serves(0))
    offered = router.heartbeats[-1].max_turns
    names = [f"t{number}" for number in range(offered + 40)]
    for number, name in enumerate(names):
        router.dispatch(name, [1 + number % 40] * 20, max_tokens=100)
    router.until(lambda: len(router.results) >= len(names))
    assert sorted(result.trajectory_id for result in router.results) == sorted(names)
    outcomes = {result.outcome for result in router.results}
    assert outcomes <= {TurnOutcome.COMPLETED, TurnOutcome.REFUSED}
    assert all(each.refusal is Refusal.ROOM for each in router.results if each.outcome is TurnOutcome.REFUSED)


@any_broker
def test_uncached_context_is_read_back_by_its_offsets(router: Router) -> None:
    model = new_policy(1, tied=True)
    router.until(lambda: bool(router.heartbeats))
    router.publish(model, 1)
    router.until(lambda: router.serves(1))
    contexts = [[3, 4, 5] * 5, [3, 4, 5] * 5 + [6, 7], [3, 4, 5] * 5 + [6, 7, 8, 9]]
    strange = router.log(router.request("other", [9] * 15))
    first = router.log(router.request("moved", contexts[0]))
    second = router.log(router.request("moved", contexts[1], turn=1, chain=(first,), known=15))
    third = router.request("moved", contexts[2], turn=2, chain=(first, second), known=17)
    router.send(third)
    prove(router.result("moved", turn=2), model, contexts[2], 1)

    longer = contexts[2] + [10]
    fourth = router.request("moved", longer, turn=3, chain=(first, second, router.log(third)), known=19)
    router.send(fourth)  # continues from the cached context
    prove(router.result("moved", turn=3), model, longer, 1)

    cut = router.request("cut", contexts[0])
    router.send(cut, offset=router.log(cut), cut=True)
    prove(router.result("cut"), model, contexts[0], 1)

    for name, chain in (("bent", (strange,)), ("gone", (10**6,))):
        router.send(router.request(name, contexts[1], turn=1, chain=chain, known=15))
        torn = router.result(name, turn=1)
        assert (torn.outcome, torn.refusal) == (TurnOutcome.REFUSED, Refusal.CONTEXT), torn.reason
        assert "not on the log" in torn.reason
    lost = router.request("lost", contexts[0])
    router.send(lost, offset=strange, cut=True)
    refused = router.result("lost")
    assert (refused.refusal, "any more" in refused.reason) == (Refusal.ENGINE, True), "an anchor is all that there is"
    router.dispatch("after", contexts[0])
    prove(router.result("after"), model, contexts[0], 1)


@kafka_first
def test_held_turns_are_listed_and_stale_or_invalid_dispatches_are_ignored(router: Router) -> None:
    router.publish(new_policy(0, tied=True), 0)
    router.until(lambda: router.serves(0))
    marks = [each for each in read_whole_topics(router.settings, [DISPATCHED]) if each.record is None]
    assert [(each.key, each.partition) for each in marks] == [("executor-1", SLOT)]
    assert router.heartbeats[-1].incarnation >> 16 == marks[0].offset

    key = router.dispatch("held", [3, 4, 5], max_tokens=200, stop=())
    router.until(lambda: router.lists(key))
    router.writer.tombstone(DISPATCHED, key=FENCING_KEY, partition=SLOT)
    router.writer.flush()
    router.dispatch("zombie", [3, 4, 5])
    router.writer.forward(DISPATCHED, RawMessage(b"poison", b"no dispatch"), partition=SLOT, key=b"poison")
    router.dispatch("unanswerable", [3, 4, 5], home=2)
    router.dispatch("after", [3, 4, 5], claim=1000)
    assert router.result("after").outcome is router.result("held").outcome is TurnOutcome.COMPLETED
    router.until(lambda: not router.heartbeats[-1].holds)
    assert not any(result.trajectory_id == "zombie" for result in router.results)
    dead_letter, other = read_dead_letters(router.settings, DISPATCHED)
    assert (dead_letter.raw.value, dead_letter.partition) == (b"no dispatch", SLOT)
    assert "home 2, and there are 2" in other.reason


@kafka_first
def test_withdrawn_turn_returns_with_its_tokens_and_other_turns_run_on(router: Router) -> None:
    router.publish(new_policy(0, tied=True), 0)
    router.until(lambda: router.serves(0))
    withdrawn = router.request("withdrawn", [3, 4, 5], max_tokens=240, stop_token_ids=())
    other = router.dispatch("other", [3, 4, 5], max_tokens=240, stop=())
    key = router.send(withdrawn)
    router.until(lambda: router.lists(key))
    router.send(withdrawn, withdrawn=True)
    stopped = router.result("withdrawn")
    assert stopped.outcome is TurnOutcome.PREEMPTED and len(unpack_tokens(stopped.tokens)) < 240
    assert stopped.reason == "its trajectory has ended"
    assert router.result(other.trajectory_id).outcome is TurnOutcome.COMPLETED
    router.until(lambda: not router.heartbeats[-1].holds)
    router.send(withdrawn, withdrawn=True)
    assert router.result(router.dispatch("after", [3, 4, 5]).trajectory_id).outcome is TurnOutcome.COMPLETED
    assert sum(result.trajectory_id == "withdrawn" for result in router.results) == 1


@kafka_first
def test_executor_continues_after_a_freeze_and_a_broker_outage(
    own_broker: Broker, broker_kind: str, fork_server: ForkServer, tmp_path: Path
) -> None:
    settings = own_broker.settings()
    faults = {"frozen": freeze, "engine-frozen": freeze_engine}
    if broker_kind != EMBEDDED:  # a restarted embedded broker accepts no records of producers that it knew before
        faults["cut-off"] = cut_off
    create_topics(settings, Partitions(home=2, slots=2, samples=1, chunks=2))
    executor = start(fork_server, settings, tmp_path)
    try:
        router = Router(settings, executor)
        router.publish(new_policy(0, tied=True), 0)
        router.until(lambda: router.serves(0))
        incarnation = router.heartbeats[-1].incarnation
        for name, trouble in faults.items():
            key = router.dispatch(f"{name}-before", [3, 4, 5], max_tokens=200, stop=())
            router.until(lambda: router.lists(key))  # noqa: B023
            began = time.time()
            trouble(executor, own_broker)
            assert router.result(key.trajectory_id).outcome is TurnOutcome.COMPLETED
            after = router.dispatch(f"{name}-after", [3, 4, 5])
            assert router.result(after.trajectory_id).outcome is TurnOutcome.COMPLETED
            sent_times = [beat.sent_at for beat in router.heartbeats if beat.sent_at > began]
            if trouble is not cut_off:
                assert max(later - beat for beat, later in pairwise([began, *sent_times])) > FREEZE_SECONDS - 1
        assert executor.poll() is None and router.heartbeats[-1].incarnation == incarnation
        engine = os.pidfd_open(engine_of(executor))
    finally:
        executor.send_signal(signal.SIGKILL)
        executor.wait()
        print((tmp_path / f"executor-{SLOT}.log").read_text())
    assert select.select([engine], [], [], WAIT_SECONDS)[0]


def freeze(executor: ForkedProcess, broker: Broker) -> None:
    executor.send_signal(signal.SIGSTOP)
    time.sleep(FREEZE_SECONDS)
    executor.send_signal(signal.SIGCONT)


def freeze_engine(executor: ForkedProcess, broker: Broker) -> None:
    os.kill(engine_of(executor), signal.SIGSTOP)
    time.sleep(FREEZE_SECONDS)
    os.kill(engine_of(executor), signal.SIGCONT)


def cut_off(executor: ForkedProcess, broker: Broker) -> None:
    broker.stop()
    time.sleep(AWAY_SECONDS)
    broker.restart()


@any_broker
def test_executor_with_a_lost_engine_ends(router: Router, executor: ForkedProcess) -> None:
    router.until(lambda: bool(router.heartbeats))
    os.kill(engine_of(executor), signal.SIGKILL)
    assert executor.wait(WAIT_SECONDS) == 1
    router.executor = None
    router.until(lambda: router.heartbeats[-1].state is ExecutorState.STOPPING)
