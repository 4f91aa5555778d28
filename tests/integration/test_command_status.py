"""`rose status` and the live view on a real broker: stalls are measured only by what this process received."""

import io
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from threading import Event, Thread
from types import SimpleNamespace

import msgspec
import pytest
from confluent_kafka import Producer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from rich.console import Console

from rose.pipeline.cli import status as statuses
from rose.pipeline.cli.status import RunUnhealthy, show_status, unknown_parts
from rose.pipeline.config.options import Common
from rose.pipeline.monitor import diagnosis, follower
from rose.pipeline.monitor import screen as screens
from rose.pipeline.monitor.broker_probe import BrokerProbe
from rose.pipeline.monitor.diagnosis import Severity, diagnose
from rose.pipeline.monitor.follower import RunFollower
from rose.pipeline.monitor.screen import Screen
from rose.schemas.heartbeats import ExecutorState, Tenant
from rose.schemas.progress import GroupState
from rose.schemas.samples import Outcome
from rose.schemas.weights import SIGNATURE_HEADER, WeightManifest
from rose.schemas.wire import encode
from rose.topics.catalog import COMPLETED, ENVIRONMENT_GROUP, MANIFESTS, PROMPTS
from rose.topics.reader import Reader
from rose.topics.records import InvalidMessage, Place, RawMessage
from rose.topics.settings import BusSettings
from rose.workers.weights.trust import Trust, run_id
from tests.golden.examples import EXAMPLES
from tests.support import waiting as waits
from tests.support.brokers import KAFKA, AnyBroker
from tests.support.log_fixtures import PARTITIONS, Log

pytestmark = pytest.mark.slow

WAIT_SECONDS = 60.0
MANIFEST = next(record for record in EXAMPLES if isinstance(record, WeightManifest))
ANYBODY = Trust(MANIFEST.model_id, MANIFEST.run)
REFUSAL = {"state": ExecutorState.STARTING, "policy_version": -1, "refused_version": 0, "refused_reason": "float32"}


@pytest.fixture
def log(broker: AnyBroker, namespace: str) -> Log:
    return Log(broker.settings(namespace))


def common(settings: BusSettings) -> Common:
    return Common(
        bootstrap_server=settings.bootstrap,
        namespace=settings.namespace,
        settings=[f"broker.embedded={str(settings.embedded).lower()}"],
    )


@contextmanager
def watch(settings: BusSettings, trust: Trust = ANYBODY) -> Iterator[RunFollower]:
    looking = RunFollower(settings, trust=trust, whole=False, window_groups=1, max_lag_versions=4)
    try:
        until(looking, lambda: looking.caught_up and looking.snapshot is not None)
        yield looking
    finally:
        looking.close()


def until(looking: RunFollower, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        looking.poll(0.05)


def test_open_groups_and_waiting_parts_are_read_from_the_log(log: Log) -> None:
    log.group("a")
    log.progress("a:0")
    log.sample("a:1")
    log.group("b")
    log.outcome("b:0")
    log.prompt("c")
    log.heartbeat(worker="old", **REFUSAL)
    with watch(log.settings) as looking:
        facts = looking.facts()
        assert (facts.open_groups, facts.in_a_turn, facts.waiting_for_trainer) == (2, 1, 2)
        assert (facts.prompts_waiting, facts.homes) == (1, PARTITIONS.home)
        assert [each.worker for each in facts.executors] == ["old"]
        assert facts.executors[0].silent_seconds >= facts.applied_seconds > 0, (
            "what was there before is no sign of life"
        )
        log.progress("a:0", ended=True)
        log.heartbeat(worker="new", sent_at=0.0)
        until(looking, lambda: len(looking.run_state.executors) == 2 and not looking.facts().in_a_turn)
        facts = looking.facts()
        new, old = facts.executors
        assert (facts.waiting_for_trainer, new.silent, new.clock_off_seconds < -1e9) == (3, False, True)
        assert facts.applied_seconds < old.silent_seconds


def test_prompt_of_an_open_group_is_not_waiting_behind_a_resetting_group(log: Log) -> None:
    names = [name for name in map(str, range(100)) if log.home(name) == 0][:4]
    hangs, opened, ended, last = (log.prompt(name) for name in names)
    log.group(names[1], offset=opened, decided_to=hangs)
    log.group(names[2], GroupState.SETTLED, offset=ended, decided_to=hangs)
    with watch(log.settings) as looking:
        until(looking, lambda: looking.facts().open_groups == 1)
        assert looking.facts().prompts_waiting == 2
        log.group(names[0], offset=hangs, decided_to=last)
        until(looking, lambda: looking.facts().open_groups == 2)
        assert looking.facts().prompts_waiting == 1


def test_broker_that_delivers_records_counts_as_answering(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    with watch(log.settings) as looking:
        monkeypatch.setattr(BrokerProbe, "probe", lambda _: None)
        log.heartbeat(worker="e", **REFUSAL)
        until(looking, lambda: "e" in looking.run_state.executors)
        assert looking.unanswered_seconds <= 0.0


def test_unobserved_broker_does_not_count_as_unreachable(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """The looking process was stopped, and so were its queries."""
    with watch(log.settings) as looking:
        monkeypatch.setattr(BrokerProbe, "probe", lambda _: None)
        monkeypatch.setattr(looking._reader, "read", lambda *_: [])
        looking.poll(0.0)
        skipped = time.monotonic() + 60.0
        monkeypatch.setattr(follower, "time", SimpleNamespace(monotonic=lambda: skipped, time=time.time))
        looking.poll(0.0)
        assert looking.unanswered_seconds < screens.UNANSWERED_SECONDS
        monkeypatch.setattr(follower, "time", time)


def test_unsigned_versions_and_those_of_another_run_are_ignored(log: Log) -> None:
    key = Ed25519PrivateKey.generate()
    trust = Trust(MANIFEST.model_id, run_id(log.settings.namespace, "demo"), key.public_key())

    def publish(version: int, *, run: str = trust.run, signed: bool = True) -> None:
        manifest = msgspec.structs.replace(MANIFEST, version=version, base_version=None, run=run)
        headers = {SIGNATURE_HEADER: key.sign(encode(manifest))} if signed else {}
        log.writer.write(MANIFESTS, manifest, key=f"{run}/{version}", headers=headers)
        log.writer.flush()

    log.heartbeat(worker="e", **REFUSAL | {"refused_version": -1})
    publish(2**50, run="evil:run")
    publish(2**40, signed=False)
    with watch(log.settings, trust) as looking:
        log.heartbeat(worker="e", **REFUSAL | {"refused_version": -1})
        until(looking, lambda: not looking.facts().executors[0].silent)
        facts = looking.facts()
        assert (facts.newest_version, looking.run_state.versions, facts.disbelieved) == (-1, 0, 2)
        assert "none of the 2 on the log is of this run" in str(diagnose(facts))
        publish(7)
        until(looking, lambda: looking.run_state.versions == 1)
        assert looking.facts().newest_version == 7


@pytest.mark.parametrize(("client", "workers"), [("rose-member", 1), ("my-etl", 0)])
def test_members_homes_lag_and_dead_letters_are_queried_from_the_broker(log: Log, client: str, workers: int) -> None:
    probe = BrokerProbe(log.settings)
    alone = probe.probe()
    assert alone is not None
    assert (alone.environment_workers, alone.homes_owned, alone.prompts_waiting) == (0, 0, 0)
    offset = log.prompt("a")
    log.result(log.request("a:0"))
    spoiled = InvalidMessage(PROMPTS, log.home("a"), offset, RawMessage(None, b"x"), "no prompt")
    log.writer.dead_letter(spoiled, "no prompt")
    log.writer.flush()
    reader = Reader(log.settings, client, group=ENVIRONMENT_GROUP, member_id="member")
    dispatched: list[Place] = []

    def assigned(places: list[Place]) -> dict[Place, int]:
        dispatched.extend(places)
        return dict.fromkeys(places, 0)

    reader.subscribe(
        [PROMPTS, COMPLETED],
        on_assigned=assigned,
        on_revoked=lambda places: None,
    )
    deadline = time.monotonic() + WAIT_SECONDS
    while not dispatched and time.monotonic() < deadline:
        reader.read(1, 0.1)
    found = probe.probe()
    reader.close()
    assert found is not None
    assert (found.environment_workers, found.homes_owned) == (workers, workers * PARTITIONS.home)
    assert found.foreign_clients == ([] if workers else [client])
    assert (found.prompts_waiting, found.lag[COMPLETED]) == (1, 1)
    assert found.dead_letters == {PROMPTS.name: 1}


def test_status_reports_unhealthy_parts_and_exits_with_1(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    log.group("a")
    log.progress("a:0")
    with pytest.raises(RunUnhealthy, match="no executor is there") as unwell:
        show_status(common(log.settings), as_json=True)
    assert unwell.value.exit_status == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["well"], report["open_groups"], report["in_a_turn"]) == (False, 1, 1)
    assert {"severity": "unwell", "who": "executors", "sentence": "no executor is there"} in report["findings"]
    with pytest.raises(RunUnhealthy):
        show_status(common(log.settings), as_json=False)
    text = capsys.readouterr().out
    for words in (
        "no heartbeats of executors yet",
        "1 open",
        "environments",
        "behind by",
        "unwell",
        "executors: no executor is there",
    ):
        assert words in text


def test_status_names_the_reason_of_failed_trajectories_after_all_groups_are_settled(
    log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(4):
        log.group(f"g{number}", GroupState.SETTLED)
        for member in range(2):
            log.outcome(f"g{number}:{member}", Outcome.INFRA_FAILED, reason="KeyError: 'API_KEY'")
    show_status(common(log.settings), as_json=True)
    findings = json.loads(capsys.readouterr().out)["findings"]
    sentence = "8 of the last 8 trajectories failed: KeyError: 'API_KEY'"
    assert {"severity": "note", "who": "run", "sentence": sentence} in findings


@contextmanager
def beating(log: Log, **changes: object) -> Iterator[None]:
    """Send heartbeats of an executor during the block."""
    over = Event()

    def beat() -> None:
        while not over.wait(0.1):
            log.heartbeat(**changes)

    heart = Thread(target=beat)
    heart.start()
    try:
        yield
    finally:
        over.set()
        heart.join()


IDLE = {
    "worker": "executor-0",
    "state": ExecutorState.READY,
    "policy_version": 0,
    "max_turns": 4,
    "rollout": Tenant(),
    "ttl_seconds": 60.0,
}


def test_prompts_unopened_by_a_worker_with_room_are_unhealthy(
    log: Log, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that restarts repeatedly is a member and commits nothing."""
    for module in (diagnosis, statuses):
        monkeypatch.setattr(module, "STALLED_SECONDS", 4.0)
    log.prompt("a")
    own = common(log.settings)
    own = replace(own, settings=[*(own.settings or []), "environment.step_timeout_seconds=1"])
    with closing(Reader(log.settings, "rose-member", group=ENVIRONMENT_GROUP, member_id="member")) as member:
        dispatched: list[Place] = []

        def assigned(places: list[Place]) -> dict[Place, int]:
            dispatched.extend(places)
            return dict.fromkeys(places, 0)

        member.subscribe([PROMPTS, COMPLETED], on_assigned=assigned, on_revoked=lambda places: None)
        waits.until(lambda: bool(member.read(1, 0.1)) or bool(dispatched))
        with beating(log, **IDLE), pytest.raises(RunUnhealthy):
            show_status(own, as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert (report["well"], report["openable"]) == (False, 1)
    [sentence] = [each["sentence"] for each in report["findings"] if each["who"] == "environments"]
    assert "1 prompt waits and the window has room, but no group was opened" in sentence


@pytest.mark.parametrize("broker_kind", [KAFKA], indirect=True)
def test_prompts_behind_an_open_transaction_are_counted(log: Log) -> None:
    log.prompt("a")
    producer = Producer(log.settings.transactional("stranger", "stranger"))
    producer.init_transactions()
    producer.begin_transaction()
    home = log.home("b")
    producer.produce(log.settings.topic(PROMPTS), value=b"{", partition=home)
    assert producer.flush(WAIT_SECONDS) == 0
    log.prompt("b")
    with closing(Reader(log.settings, "worker", group=ENVIRONMENT_GROUP)) as worker:
        worker.commit({(PROMPTS, log.home("a")): 1})
    with watch(log.settings) as looking:
        until(looking, lambda: list(looking.facts().held_homes) == [home])
        assert looking.facts().prompts_waiting == 0
        producer.abort_transaction()
        until(looking, lambda: looking.facts().prompts_waiting == 1)
        assert list(looking.facts().held_homes) == []


def test_stalled_worker_is_named_while_another_progresses(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "STALLED_SECONDS", 1.0)
    dispatched: dict[str, list[int]] = {}

    def assigned(name: str, places: list[Place]) -> dict[Place, int]:
        dispatched[name] = sorted(home for topic, home in places if topic is PROMPTS)
        return {}

    with ExitStack() as stack:
        members = []
        for name in ("environment-0", "environment-1"):
            member = Reader(log.settings, f"rose-{name}", group=ENVIRONMENT_GROUP, member_id=name)
            members.append(stack.enter_context(closing(member)))
            member.subscribe([PROMPTS, COMPLETED], on_assigned=partial(assigned, name), on_revoked=lambda _: None)

        def shared() -> bool:
            for member in members:
                member.read(1, 0.05)
            return sorted(home for homes in dispatched.values() for home in homes) == list(
                range(PARTITIONS.home)
            ) and all(dispatched.get(name) for name in ("environment-0", "environment-1"))

        waits.until(shared)
        groups = {home: next(name for name in map(str, range(99)) if log.home(name) == home) for home in range(4)}
        for name in groups.values():
            log.group(name)
            log.progress(f"{name}:0")
        [stalled, *_], [moving, *_] = dispatched["environment-1"], dispatched["environment-0"]
        looking = stack.enter_context(watch(log.settings))
        for home in (stalled, moving):
            log.result(log.request(f"{groups[home]}:0"))

        def accused() -> list[str]:
            for member in members:
                member.read(1, 0.0)
            log.progress(f"{groups[moving]}:0")
            looking.poll(0.05)
            found = diagnose(looking.facts())
            return [each.sentence for each in found if each.who == "environments" and each.severity is Severity.UNWELL]

        waits.until(lambda: bool(accused()))
        [sentence] = accused()
        assert sentence.startswith(f"1 result waits for environment-1 (home {stalled}), and none was applied for ")
        assert looking.facts().applied_seconds < 1.0


def test_time_without_executor_does_not_count_against_the_router(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "STALLED_SECONDS", 1.0)
    log.group("a")
    log.progress("a:0")

    def accused() -> list[str]:
        found = diagnose(replace(looking.facts(), routers=1))
        return [each.sentence for each in found if each.who == "router" and each.severity is Severity.UNWELL]

    with watch(log.settings) as looking:
        until(looking, lambda: looking.facts().dispatched_seconds > 2.0 and looking.facts().applied_seconds > 2.0)
        log.heartbeat(**IDLE)
        until(looking, lambda: bool(looking.facts().executors))
        assert not accused()
        until(looking, lambda: bool(accused()))


def test_log_without_remaining_work_is_healthy(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    show_status(common(log.settings), as_json=True)
    assert json.loads(capsys.readouterr().out)["well"]


def test_broker_without_answers_about_groups_is_unhealthy(log: Log, namespace: str) -> None:
    """ACLs may forbid every client to describe groups."""
    silent = BrokerProbe(log.settings)
    assert silent.probe() is not None
    silent._settings = replace(log.settings, namespace=f"nowhere-{namespace}")
    assert silent.probe() is None
    [found] = unknown_parts(answered=False, caught_up=True, broker_error=silent.last_error)
    assert found.severity is Severity.UNWELL
    assert found.sentence.startswith("the broker does not list the members and offsets of the consumer groups")
    assert silent.last_error and silent.last_error in found.sentence
    [late] = unknown_parts(answered=True, caught_up=False, broker_error=None)
    assert late.severity is Severity.NOTE
    assert not list(unknown_parts(answered=True, caught_up=True, broker_error=None))


def test_live_view_names_the_cause_of_a_stall(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rose.pipeline.monitor.diagnosis.STALLED_SECONDS", 1.0)
    monkeypatch.setattr(screens, "PLAIN_SECONDS", 0.5)
    log.group("a")
    log.progress("a:0")
    written = io.StringIO()
    with watch(log.settings) as looking:

        def more() -> bool:
            log.heartbeat(worker="executor-0", **REFUSAL)
            return "nothing moves" not in written.getvalue() or "1 refusing" not in written.getvalue()

        Screen(looking, Console(file=written, width=200), title="a run").run(more)
        findings = diagnose(looking.facts())
    assert "nothing moves: executor-0 refuses version 0: float32" in written.getvalue()
    assert "executors: 1 refusing" in written.getvalue()
    assert findings[0].severity is Severity.UNWELL
