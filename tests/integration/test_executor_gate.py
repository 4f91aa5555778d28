"""An executor with a scripted engine: its behaviour when a grant, a guest or a server stops it."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from prometheus_client import REGISTRY

from rose.pipeline.cli.interventions import DrainTimeout, drain, release_drain, send_grant
from rose.pipeline.config.options import Common
from rose.schemas.errors import UsageError
from rose.schemas.heartbeats import ExecutorState
from rose.schemas.turns import Refusal, TurnOutcome, held_hash
from rose.topics.admin import create_topics
from rose.topics.catalog import COMPLETED, HEARTBEATS, Partitions, Topic
from rose.topics.health import HEALTH, START_SECONDS, HealthStatus, status_of
from rose.topics.log_reader import RecordFetch
from rose.topics.records import Envelope
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from rose.workers.executor.config import ExecutorConfig
from rose.workers.executor.grants import UNRESTRICTED, GrantFollower, Lease, Permission
from rose.workers.executor.ipc.engine_client import EngineClient
from rose.workers.executor.ipc.messages import (
    AbortTurn,
    LendingStats,
    Resume,
    StageWeights,
    SubmitTurn,
    Suspend,
    WeightsRejected,
)
from rose.workers.executor.ipc.shared_memory import ChannelFds
from rose.workers.executor.loop import run_executor
from rose.workers.weights.trust import run_id
from tests.support.brokers import AnyBroker, kafka_first
from tests.support.executor_fixtures import SLOT
from tests.support.scripted_engine import NAME, TICK, running
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, kafka_first]

FIGURES = ("rose_executor_policy_version", "rose_lender_budget_bytes")


@pytest.fixture
def settings(broker: AnyBroker, namespace: str) -> BusSettings:
    settings = broker.settings(namespace)
    create_topics(settings, Partitions(home=2, slots=2, samples=1, chunks=2))
    return settings


@pytest.fixture
def grants(settings: BusSettings) -> Iterator[GrantFollower]:
    grants = GrantFollower(settings, NAME, Lease(run_id(settings.namespace, "demo"), grant_required=False))
    grants.wait_until_read(threading.Event())
    yield grants
    grants.stop()


@contextmanager
def drains(settings: BusSettings) -> Iterator[GrantFollower]:
    """Run the grant follower of a dedicated executor."""
    grants = GrantFollower(settings, NAME, Lease())
    grants.wait_until_read(threading.Event())
    yield grants
    grants.stop()


def exported(name: str) -> float | None:
    return REGISTRY.get_sample_value(name)


def common_of(settings: BusSettings) -> Common:
    """Return the options that reach this broker."""
    embedded = f"broker.embedded={str(settings.embedded).lower()}"
    return Common(bootstrap_server=settings.bootstrap, namespace=settings.namespace, settings=[embedded])


def grant(settings: BusSettings, *, lend: bool, worker: str = NAME, token_budget: int = 0) -> None:
    send_grant(common_of(settings), worker, lend=lend, kv_bytes=0, token_budget=token_budget, reason="night")


def test_executor_is_alive_during_a_long_engine_load(settings: BusSettings) -> None:
    """Otherwise the executor would count as hung and be restarted again and again."""
    channel, stop, life = ChannelFds.create(), threading.Event(), os.pidfd_open(os.getpid())
    config = ExecutorConfig(model_folder=Path(), name=NAME, slot=SLOT)
    executor = threading.Thread(target=run_executor, args=(settings, config, EngineClient(channel, life), {}, stop))
    executor.start()
    try:
        until(lambda: "loads" in HEALTH.status.sentence)
        word = HEALTH._report
        assert status_of(word, word.at + START_SECONDS - 1) == HealthStatus(True, False, word.activity)
    finally:
        stop.set()
        executor.join()
        os.close(life)


def test_grant_parks_and_wakes_a_lender_and_its_held_turns_return(settings: BusSettings, grants: GrantFollower) -> None:
    grant(settings, lend=False)
    grant(settings, lend=True, worker="another")
    until(lambda: bool(grants.permission().denied_reason))
    with running(settings, grants.permission) as (engine, router):
        engine.wait_for_command(Suspend)
        router.until(lambda: bool(router.heartbeats) and "night" in router.heartbeats[-1].paused_reason)
        assert router.heartbeats[-1].state is ExecutorState.PAUSED
        grant(settings, lend=True, token_budget=500)
        engine.wait_for_command(Resume)
        engine.serve()
        router.until(lambda: router.heartbeats[-1].state is ExecutorState.READY)
        assert (router.heartbeats[-1].token_budget, router.heartbeats[-1].paused_reason) == (500, "")

        engine.set_status(lending=LendingStats(budget_bytes=64, frozen=True))
        until(lambda: exported("rose_lender_budget_bytes") == 64 and exported("rose_lender_frozen") == 1)
        router.dispatch("held", [3, 4, 5])
        taken = engine.wait_for_command(SubmitTurn)
        began = time.monotonic()
        grant(settings, lend=False)
        assert engine.wait_for_command(AbortTurn).name == taken.name
        engine.wait_for_command(Suspend)
        assert time.monotonic() - began < 5.0, "a second, on a machine with nothing else to do"
        engine.abort(taken.name, [7, 8])
        engine.set_status(suspended_reason="nobody has woken it", version=-1, kv_bytes_total=0, lending=None)
        back = router.result("held")
        assert (back.outcome, back.reason, len(back.tokens)) == (TurnOutcome.PREEMPTED, "a grant parked it: night", 8)
        router.until(lambda: router.heartbeats[-1].policy_version == -1)
        assert (router.heartbeats[-1].state, router.heartbeats[-1].token_budget) == (ExecutorState.PAUSED, 0)
        assert (exported("rose_lender_budget_bytes"), exported("rose_lender_frozen")) == (0, 0)
        router.dispatch("late", [3, 4, 5])
        assert router.result("late").refusal is not None

        grant(settings, lend=True)
        engine.wait_for_command(Resume)
        assert not any(isinstance(command, StageWeights) for command in engine.commands), "it is not there yet"
        engine.set_status(suspended_reason="", kv_bytes_total=10_000)
        engine.serve()
        router.until(lambda: router.heartbeats[-1].state is ExecutorState.READY)
        assert router.heartbeats[-1].policy_version == exported("rose_executor_policy_version") == 3
    assert [exported(name) for name in FIGURES] == [None, None], "nobody looks any more"


def test_guest_that_returns_unnoticed_gets_its_version_again(
    settings: BusSettings,
) -> None:
    with running(settings, lambda: UNRESTRICTED) as (engine, router):
        engine.wait_for_command(StageWeights)
        engine.reports.send(msgspec.structs.replace(TICK, suspended_reason="its guest is being built"))
        engine.reports.send(TICK)
        engine.serve()
        router.until(lambda: router.serves(3))


def test_turn_that_waits_for_context_over_a_guest_change_needs_a_version(
    settings: BusSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds if the next guest does not activate the served version."""
    answers = threading.Event()

    class Late(RecordFetch):
        def __iter__(self) -> Iterator[Envelope]:
            answers.wait()
            yield from super().__iter__()

    monkeypatch.setattr("rose.workers.executor.contexts.RecordFetch", Late)
    with running(settings, lambda: UNRESTRICTED) as (engine, router):
        try:
            engine.serve()
            router.until(lambda: router.serves(3))
            pending = router.request("held", [3, 4, 5])
            router.send(pending, offset=router.log(pending), cut=True)
            router.until(lambda: bool(router.heartbeats[-1].holds))
            engine.set_status(version=-1)
            engine.reports.send(WeightsRejected(engine.wait_for_command(StageWeights).version, "no memory"))
            answers.set()
            router.until(lambda: not router.heartbeats[-1].holds)
            assert router.result("held").refusal is Refusal.VERSION
            assert not any(isinstance(command, SubmitTurn) for command in engine.commands)
        finally:
            answers.set()


def test_never_idle_server_returns_its_turns_until_it_was_idle(settings: BusSettings) -> None:
    with running(settings, lambda: UNRESTRICTED) as (engine, router):
        engine.serve()
        router.until(lambda: router.serves(3))
        router.dispatch("held", [3, 4, 5])
        taken = engine.wait_for_command(SubmitTurn)
        engine.set_status(blocked_seconds=4.9)
        router.until(lambda: bool(router.heartbeats[-1].holds))
        assert not any(isinstance(command, AbortTurn) for command in engine.commands)
        engine.set_status(blocked_seconds=5.1)
        assert engine.wait_for_command(AbortTurn).name == taken.name
        engine.abort(taken.name, [])
        back = router.result("held")
        assert back.outcome is TurnOutcome.PREEMPTED and "no moment" in back.reason
        router.dispatch("refused", [3, 4, 5])
        assert router.result("refused").refusal is Refusal.ROOM
        assert router.heartbeats[-1].state is ExecutorState.PAUSED
        engine.set_status(blocked_seconds=0.0)
        router.until(lambda: router.heartbeats[-1].state is ExecutorState.READY)


class Withheld(Writer):
    """A writer that stores results only once their leader returns, and other records at once."""

    back: ClassVar[threading.Event]
    answers: ClassVar[list[Callable[[], None]]]

    def write(self, topic: Topic, *arguments: Any, **options: Any) -> None:
        write = partial(super().write, topic, *arguments, **options)
        write() if topic is not COMPLETED or self.back.is_set() else self.answers.append(write)

    def poll(self, *arguments: Any, **options: Any) -> None:
        while self.back.is_set() and self.answers:
            self.answers.pop(0)()
        super().poll(*arguments, **options)


@pytest.fixture
def withheld(monkeypatch: pytest.MonkeyPatch) -> type[Withheld]:
    Withheld.back, Withheld.answers = threading.Event(), []
    monkeypatch.setattr("rose.workers.executor.loop.Writer", Withheld)
    return Withheld


def test_answered_turn_takes_no_room_and_is_listed_until_its_result_is_stored(
    settings: BusSettings, withheld: type[Withheld]
) -> None:
    with running(settings) as (engine, router):
        engine.serve()
        router.until(lambda: router.serves(3))
        done, _ = router.dispatch("done", [3, 4, 5]), router.dispatch("refused", [3, 4, 5], max_tokens=60_000)
        engine.complete(engine.wait_for_command(SubmitTurn).name, [7])
        until(lambda: len(withheld.answers) == 2)
        heartbeat_count = len(router.heartbeats)
        router.until(lambda: len(router.heartbeats) >= heartbeat_count + 10)
        assert router.heartbeats[-1].holds == held_hash(done).to_bytes(8, "little"), "what was refused was never listed"
        assert exported("rose_executor_held_turns") == 0

        again = router.dispatch("done", [3, 4, 5], attempt=1)
        router.until(lambda: router.lists(again))
        engine.complete(engine.wait_for_command(SubmitTurn).name, [7])
        withheld.back.set()
        assert router.result("done").outcome is router.result("done", attempt=1).outcome is TurnOutcome.COMPLETED
        router.until(lambda: not router.heartbeats[-1].holds)


def test_answer_that_cannot_be_learned_from_is_refused_with_the_device_time_that_it_took(settings: BusSettings) -> None:
    with running(settings) as (engine, router):
        engine.serve()
        router.until(lambda: router.serves(3))
        router.dispatch("odd", [3, 4, 5])
        engine.complete(engine.wait_for_command(SubmitTurn).name, [7], logprob=1.0)
        refused = router.result("odd")
        assert (refused.outcome, refused.refusal) == (TurnOutcome.REFUSED, Refusal.ENGINE)
        assert (refused.device_seconds, refused.context_tokens) == ({"serving": 0.5}, 3)


def test_executor_stays_in_its_cell_until_its_results_are_stored(
    broker: AnyBroker, namespace: str, withheld: type[Withheld]
) -> None:
    settings, leave = broker.settings(namespace), [UNRESTRICTED]
    create_topics(settings, Partitions(home=2, slots=2, samples=1, chunks=2, cells=2))
    with running(settings, lambda: leave[0], lends=False) as (engine, router):
        router.reader.assign({(topic, part): 0 for topic in (HEARTBEATS, COMPLETED) for part in range(2)})
        engine.serve()
        router.until(lambda: router.serves(3))
        key, here = router.dispatch("held", [3, 4, 5]), router.heartbeats[-1].incarnation
        name = engine.wait_for_command(SubmitTurn).name
        leave[0] = Permission(cell=0)
        engine.complete(name, [7])
        until(lambda: bool(withheld.answers))
        heartbeat_count = len(router.heartbeats)
        router.until(lambda: len(router.heartbeats) >= heartbeat_count + 20)
        assert {beat.incarnation for beat in router.heartbeats} == {here}
        assert ExecutorState.STOPPING not in {beat.state for beat in router.heartbeats}
        withheld.back.set()
        router.until(lambda: any(beat.state is ExecutorState.STOPPING for beat in router.heartbeats))
        [last] = [beat for beat in router.heartbeats if beat.state is ExecutorState.STOPPING]
        assert (last.incarnation, last.holds) == (here, held_hash(key).to_bytes(8, "little"))
        assert router.result("held").outcome is TurnOutcome.COMPLETED
        router.until(lambda: router.heartbeats[-1].incarnation != here)


def test_last_heartbeat_lists_just_answered_turns(settings: BusSettings) -> None:
    with running(settings) as (engine, router):
        engine.serve()
        router.until(lambda: router.serves(3))
        keys = [router.dispatch(name, [3, 4, 5]) for name in ("before", "with")]
        for key in keys[:1]:
            engine.abort(engine.wait_for_command(SubmitTurn).name, [7])
            router.result(key.trajectory_id)
        engine.wait_for_command(SubmitTurn)
    # The last turn is never answered: its engine hangs, and the router reissues the turn.
    router.until(lambda: router.heartbeats[-1].state is ExecutorState.STOPPING)
    assert router.heartbeats[-1].holds == held_hash(keys[0]).to_bytes(8, "little")


def test_drained_executor_finishes_turns_in_time_and_takes_none_until_undrained(
    settings: BusSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    common = common_of(settings)

    def drained(within: float) -> None:
        drain(common, NAME, within_seconds=within, reason="a new disk")

    with (
        ThreadPoolExecutor(2) as operator,
        drains(settings) as grant_follower,
        running(settings, grant_follower.permission, lends=False) as (engine, router),
    ):
        engine.serve()
        router.until(lambda: router.serves(3))
        keys = [router.dispatch(name, [3, 4, 5]) for name in ("ends", "stays")]
        taken = [engine.wait_for_command(SubmitTurn).name for _ in keys]
        pending = operator.submit(drained, 600.0)
        router.until(lambda: router.heartbeats[-1].paused_reason == "it is drained: a new disk")
        assert router.heartbeats[-1].state is ExecutorState.PAUSED
        router.dispatch("late", [3, 4, 5])
        assert router.result("late").refusal is Refusal.ROOM
        engine.complete(taken[0], [7])
        assert router.result("ends").outcome is TurnOutcome.COMPLETED
        router.until(lambda: router.heartbeats[-1].holds == held_hash(keys[1]).to_bytes(8, "little"))
        assert not pending.done() and not any(isinstance(command, AbortTurn | Suspend) for command in engine.commands)

        sooner = operator.submit(drained, 0.0)
        assert engine.wait_for_command(AbortTurn).name == taken[1]
        engine.abort(taken[1], [7, 8])
        back = router.result("stays")
        assert (back.outcome, back.reason) == (TurnOutcome.PREEMPTED, "it is drained: a new disk")
        assert pending.result() is sooner.result() is None
        assert "it holds nothing" in capsys.readouterr().out
        former = router.heartbeats[-1].incarnation

    with (
        drains(settings) as grant_follower,
        running(settings, grant_follower.permission, lends=False) as (engine, router),
    ):
        router.until(lambda: any(beat.incarnation != former and beat.paused_reason for beat in router.heartbeats))
        assert "new disk" in router.heartbeats[-1].paused_reason
        now = [beat.state for beat in router.heartbeats if beat.incarnation != former]
        assert ExecutorState.READY not in now, "it outlives a start"
        engine.serve()
        release_drain(common, NAME)
        router.until(lambda: router.heartbeats[-1].state is ExecutorState.READY)


def test_drained_lender_parks_when_idle_and_returns_to_its_grant(settings: BusSettings, grants: GrantFollower) -> None:
    grant(settings, lend=True, token_budget=500)
    until(lambda: grants.permission().token_budget == 500)
    with ThreadPoolExecutor(1) as operator, running(settings, grants.permission) as (engine, router):
        engine.wait_for_command(Resume)
        engine.serve()
        router.until(lambda: router.serves(3))
        router.dispatch("ends", [3, 4, 5])
        name = engine.wait_for_command(SubmitTurn).name
        pending = operator.submit(drain, common_of(settings), NAME, within_seconds=600.0, reason="")
        router.until(lambda: router.heartbeats[-1].state is ExecutorState.PAUSED)
        assert not any(isinstance(command, Suspend | Resume) for command in engine.commands), "while something runs"
        engine.complete(name, [7])
        engine.wait_for_command(Suspend)
        pending.result()
        release_drain(common_of(settings), NAME)
        engine.wait_for_command(Resume)
        router.until(lambda: router.heartbeats[-1].state is ExecutorState.READY)
        assert router.heartbeats[-1].token_budget == 500


def test_unknown_executor_cannot_be_drained(settings: BusSettings) -> None:
    with pytest.raises(DrainTimeout, match="no executor named executor-77 sends heartbeats"):
        drain(common_of(settings), "executor-77", within_seconds=0.0, reason="")


def test_impossible_grant_is_reported_in_one_sentence(settings: BusSettings) -> None:
    with pytest.raises(UsageError, match="no such grant"):
        grant(settings, lend=True, worker="no worker")


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf"), -9999.0, 0.5])
def test_turn_with_impossible_logprobs_is_refused(settings: BusSettings, logprob: float) -> None:
    """The turn is tried elsewhere and finally fails as infrastructure: nothing is learned from it."""
    with running(settings) as (engine, router):
        engine.serve()
        router.until(lambda: bool(router.heartbeats) and router.heartbeats[-1].state is ExecutorState.READY)
        router.dispatch("spoiled", [3, 4, 5])
        engine.complete(engine.wait_for_command(SubmitTurn).name, [7, 8], logprob)
        answer = router.result("spoiled")
        assert (answer.outcome, answer.refusal, answer.tokens) == (TurnOutcome.REFUSED, Refusal.ENGINE, b"")
        assert f"a logprob of {logprob:g}" in answer.reason
        router.dispatch("sound", [3, 4, 5])
        engine.complete(engine.wait_for_command(SubmitTurn).name, [7, 8])
        assert router.result("sound").outcome is TurnOutcome.COMPLETED
