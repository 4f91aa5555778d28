"""Elasticity on a real broker: a router, the control app, and a lender with a scripted engine."""

import json
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rose.pipeline.cli.interventions import release_grant
from rose.schemas.grants import CapacityGrant
from rose.schemas.heartbeats import ExecutorState
from rose.schemas.turns import TurnOutcome
from rose.topics.admin import create_topics
from rose.topics.catalog import GRANTS, REQUESTED, SUMMARIES, Partitions
from rose.topics.dead_letters import read_dead_letters
from rose.topics.local_broker import free_ports
from rose.topics.log_reader import read_whole_topics
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from rose.workers.executor.grants import GrantFollower, Lease
from rose.workers.executor.ipc.messages import (
    COMMAND_DECODER,
    AbortTurn,
    ActivateWeights,
    Resume,
    StageWeights,
    SubmitTurn,
    Suspend,
    WeightsActivated,
    WeightsStaged,
)
from rose.workers.weights.trust import run_id
from tests.integration.test_executor_gate import common_of, grant
from tests.support.brokers import AnyBroker, flags, kafka_first
from tests.support.executor_fixtures import Router
from tests.support.roles import freeze, kill, role_process, rose, stop, thaw
from tests.support.router_process_fixtures import router_process
from tests.support.routing_fixtures import request
from tests.support.scripted_engine import NAME, Engine, running, turn_finished

pytestmark = pytest.mark.slow

CONTROL = {"lease_seconds": 6.0, "dwell_seconds": 1.0, "idle_seconds": 2.0, "margin_seconds": 0.5}


class Guest(Engine):
    """A guest that starts at once when woken, activates each version, and answers turns while allowed."""

    answers = True

    def _run(self) -> None:
        self._unanswered: set[str] = set()
        self.set_status(suspended_reason="it was not told to lend", version=-1)
        while not self._stop.wait(0.02):
            for command in map(COMMAND_DECODER.decode, self._orders.read()):
                self._obey(command)
            self.reports.send(self.tick)

    def _obey(self, command: Any) -> None:
        match command:
            case Resume():
                self.set_status(suspended_reason="")
            case Suspend():
                self.set_status(suspended_reason="it was not told to lend", version=-1)
            case StageWeights():
                self.reports.send(WeightsStaged(command.version))
            case ActivateWeights():
                self.reports.send(WeightsActivated(command.version, 0.0))
                self.set_status(version=command.version)
            case SubmitTurn() if self.answers:
                self.reports.send(turn_finished(command.name, [7]))
            case SubmitTurn():
                self._unanswered.add(command.name)
            case AbortTurn() if command.name in self._unanswered:  # an abort may cross the answer, which then stands
                self._unanswered.remove(command.name)
                self.abort(command.name, [])


@pytest.fixture
def settings(broker: AnyBroker, namespace: str) -> BusSettings:
    settings = broker.settings(namespace)
    create_topics(settings, Partitions(home=2, slots=2, samples=1, chunks=2))
    return settings


@contextmanager
def lender(settings: BusSettings) -> Iterator[tuple[Guest, Router]]:
    """Run a lender that requires a grant, and its router counterpart."""
    grants = GrantFollower(settings, NAME, Lease(run_id(settings.namespace, "demo"), grant_required=True))
    try:
        with running(settings, grants.permission, kind=Guest) as (guest, router):
            assert isinstance(guest, Guest)
            yield guest, router
    finally:
        grants.stop()


def control_process(settings: BusSettings, log: Path, **more: object) -> Any:
    own = {f"control.{name}": value for name, value in {"page_port": 0, **CONTROL, **more}.items()}
    return role_process("control", settings, 0, own, log=log)


class RequestSender:
    """Requests turns from the router."""

    def __init__(self, settings: BusSettings, router: Router) -> None:
        self._writer, self._router, self._count = Writer(settings, "asks"), router, 0

    def turns(self, count: int) -> None:
        for _ in range(count):
            name = f"g{self._count}:0"
            self._count += 1
            turn_request = request(name, home=1, patience_seconds=600.0, requested_at=time.time(), context=3)
            self._writer.write(REQUESTED, turn_request, key=name, partition=1)
        self._writer.flush()

    def until_done(self) -> None:
        self._router.until(
            lambda: (
                len({each.trajectory_id for each in self._router.results if each.outcome is TurnOutcome.COMPLETED})
                == self._count
            )
        )


def until_parked(router: Router, why: str) -> None:
    router.until(lambda: bool(router.heartbeats) and why in router.heartbeats[-1].paused_reason)
    assert router.heartbeats[-1].state is ExecutorState.PAUSED


def until_lends(router: Router) -> None:
    router.until(lambda: bool(router.heartbeats) and router.heartbeats[-1].state is ExecutorState.READY)


@kafka_first
def test_work_wakes_a_lender_until_it_ends_or_the_lease_expires(settings: BusSettings, tmp_path: Path) -> None:
    log = tmp_path / "control.log"
    with lender(settings) as (guest, router), router_process(settings):
        until_parked(router, "needs one")
        asking = RequestSender(settings, router)
        with control_process(settings, log) as control:
            assert router.heartbeats[-1].by_grant
            asking.turns(20)
            asking.until_done()
            until_parked(router, "a grant parked it: of no use")
            guest.answers, answered = False, len(router.results)
            asking.turns(5)
            router.until(lambda: len(router.heartbeats[-1].holds) == 5 * 8)
            kill(control)
            until_parked(router, "its grant ran out")
            router.until(lambda: not router.heartbeats[-1].holds)
        router.until(lambda: len(router.results) == answered + 5)  # results and heartbeats are on different topics
        assert {each.outcome for each in router.results[answered:]} == {TurnOutcome.PREEMPTED}
        with control_process(settings, log) as control:
            until_lends(router)
            freeze(control)
            until_parked(router, "its grant ran out")
            router.until(lambda: not router.heartbeats[-1].holds)
            # not earlier, because the guest never answers a turn that it was not allowed to answer
            guest.answers = True
            thaw(control)
            asking.until_done()
            guest.answers = False
            asking.turns(5)
            router.until(lambda: len(router.heartbeats[-1].holds) == 5 * 8)
            stop(control)
        until_parked(router, "its grant ran out")
    grants = [each.record for each in read_whole_topics(settings, [GRANTS]) if isinstance(each.record, CapacityGrant)]
    assert grants and all(each.reason and each.lease_seconds == CONTROL["lease_seconds"] for each in grants)
    assert {each.job for each in grants} == {run_id(settings.namespace, "demo")}


@kafka_first
def test_manual_grant_overrides_the_control_app_and_its_page_shows_the_grant(
    settings: BusSettings, tmp_path: Path
) -> None:
    [port] = free_ports(1)

    def page() -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/state.json", timeout=10) as answer:
            state: dict[str, Any] = json.load(answer)
        return state

    with lender(settings) as (guest, router), router_process(settings):
        guest.answers = False
        until_parked(router, "needs one")
        with control_process(settings, tmp_path / "control.log", page_port=port) as control:
            RequestSender(settings, router).turns(5)
            until_lends(router)
            state = page()
            assert state["job"] == run_id(settings.namespace, "demo") and state["lending"] == 1
            assert "turns wait: done in" in state["decisions"][0]["reason"]
            grant(settings, lend=False)
            until_parked(router, "a grant parked it: night")
            router.until(lambda: page()["lenders"][0]["told"] == "by hand: parked")
            release_grant(common_of(settings), NAME)
            until_lends(router)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as answer:
                assert NAME in answer.read().decode()
            stop(control)


@kafka_first
def test_invalid_summary_is_dead_lettered_and_the_next_summary_is_read(settings: BusSettings, tmp_path: Path) -> None:
    with control_process(settings, tmp_path / "control.log"), lender(settings) as (_, router):
        until_parked(router, "needs one")
        with router_process(settings):
            RequestSender(settings, router).turns(5)
            until_lends(router)
            writer = Writer(settings, "stranger")
            writer.forward(SUMMARIES, read_any(settings)._replace(value=b"litter"), partition=0, key=b"0")
            writer.flush()
            router.until(lambda: bool(list(read_dead_letters(settings, SUMMARIES))))
            assert router.heartbeats[-1].state is ExecutorState.READY


def read_any(settings: BusSettings) -> Any:
    return next(iter(read_whole_topics(settings, [SUMMARIES]))).raw


def test_permanent_error_is_reported_in_one_sentence(settings: BusSettings) -> None:
    done = rose("control", *flags(settings), "-X", "ssl.crl.location=revoked.pem", "--set", "control.page_port=0")
    assert done.returncode == 2 and "the control app has no ssl.crl.location" in done.stderr.splitlines()[-1]
