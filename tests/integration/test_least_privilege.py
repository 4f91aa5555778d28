"""Every role on a broker that denies everything without an ACL: each role with its own ACLs, and with one ACL less."""

import json
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Event, Timer

import pytest
from confluent_kafka import OFFSET_BEGINNING, Producer
from safetensors.torch import load_file

from rose.pipeline.accounting.usage import UsageLedger
from rose.pipeline.cli.roles import announce_starts
from rose.pipeline.config.settings import WARM_START
from rose.pipeline.control.config import ControlConfig
from rose.pipeline.control.service import run_control
from rose.pipeline.journal import JournalWriter
from rose.pipeline.local.fork_server import ForkedProcess, ForkServer
from rose.pipeline.monitor.broker_probe import BrokerProbe
from rose.pipeline.monitor.follower import RunFollower
from rose.pipeline.report.history import read_history
from rose.pipeline.routing.config import RouterConfig
from rose.pipeline.routing.service import run_router
from rose.pipeline.tracking.evaluations import EvaluationTracking
from rose.pipeline.tracking.log import StepLog
from rose.pipeline.tracking.steps import StepPoint
from rose.schemas.errors import RoseError
from rose.schemas.journal import CoreJournal
from rose.schemas.turns import TurnOutcome, TurnResult
from rose.topics.acl import (
    ADMIN,
    CONTROL,
    DEAD_LETTERED,
    ENVIRONMENT,
    EVALUATOR,
    EXECUTOR,
    OPERATOR,
    PRODUCER,
    REPLAY,
    ROLES,
    ROUTER,
    TRACKER,
    TRAINER,
    VIEW,
    Acl,
    Operation,
    Resource,
    Role,
    acls,
    connect_as,
)
from rose.topics.admin import connect, create_topics, delete_before, durability_warnings, lowest_committed
from rose.topics.catalog import (
    CHUNKS,
    COMPLETED,
    DEAD_LETTER_SOURCES,
    DEAD_LETTERS_TRANSACTIONAL_ID,
    DISPATCHED,
    EVALUATION_RESULTS,
    HEARTBEATS,
    JOURNAL,
    OUTCOMES,
    PROMPTS,
    REQUESTED,
    ROLE_STARTS,
    SAMPLES,
    SUMMARIES,
    TRAINER_PREFIX,
    Partitions,
    Retention,
    Topic,
)
from rose.topics.catalog import home_partition as home_of_group
from rose.topics.dead_letters import read_dead_letters
from rose.topics.errors import AuthenticationFailed
from rose.topics.local_broker import free_ports
from rose.topics.log_reader import read_whole_topics
from rose.topics.reader import Reader
from rose.topics.records import Place
from rose.topics.settings import PREFIX, BusSettings
from rose.topics.writer import Writer, resend
from rose.workers.environments.config import EnvironmentConfig
from rose.workers.environments.log_cleaner import LogCleaner
from rose.workers.environments.main import run_environment_worker
from rose.workers.evaluator.config import EvaluationConfig
from rose.workers.evaluator.evaluation import EvaluationSet
from rose.workers.evaluator.loop import run_evaluator
from rose.workers.trainer.stream import SampleStream
from rose.workers.weights.config import WeightsConfig
from rose.workers.weights.trust import Trust, make_keys, private_key, run_id
from tests.integration.test_lend import CONTEXT, START_SECONDS, lending, prove
from tests.support.executor_fixtures import Router
from tests.support.lender_server_fixtures import MODEL, SERVING, Server, server_flags
from tests.support.routing_fixtures import request
from tests.support.secured_kafka import Users, rose, start_audited
from tests.support.secured_node import SecuredNode
from tests.support.waiting import WAIT_SECONDS, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

PARTITIONS = Partitions(home=2, slots=2, samples=2, chunks=2)
TO_TELL = [
    Acl(operation, Resource.TOPIC, f"less.{ROLE_STARTS.name}") for operation in (Operation.READ, Operation.WRITE)
]
TO_RECORD = [Acl(operation, Resource.TOPIC, f"less.{JOURNAL.name}") for operation in (Operation.READ, Operation.WRITE)]
TO_COMPARE = [
    Acl(operation, Resource.TOPIC, f"less.{EVALUATION_RESULTS.name}") for operation in (Operation.READ, Operation.WRITE)
]
LENDER = "lender"
"""A lender is an executor: its bus access is the same."""
GROUPS_ASKED = 9
"""Eight groups from a file, and the group that was dead-lettered."""
TASKS_EVALUATED = 2
"""Tasks of the evaluation of version 0, with one sample each."""
CONFIG = f"""
[topics]
home_partitions = {PARTITIONS.home}
inbox_slots = {PARTITIONS.slots}
sample_partitions = {PARTITIONS.samples}
chunk_partitions = {PARTITIONS.chunks}

[environment]
max_turn_tokens = 16
max_context_tokens = 256
window_groups = 8

[executor]
max_turns = 16
max_model_len = 256
step_tokens = 512
kv_cache_bytes = 16777216

[trainer]
groups_per_step = 4
total_groups = {GROUPS_ASKED}
minibatches = 1

[evaluation]
every_versions = 1000
tasks = {TASKS_EVALUATED}
samples = 1

[control]
page_port = 0

[serving]
environment = {{ {", ".join(f'{name} = "{value}"' for name, value in SERVING.items())} }}
"""

NOTHING_KEPT = Retention(prompts=0.0, turns=0.0, samples=0.0, weights=0.0)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredNode]:
    with start_audited(tmp_path_factory.mktemp("secured")) as running:
        yield running


class Run:
    """The roles of one run, each a process with its own user."""

    def __init__(self, users: Users, folder: Path, fork_server: ForkServer) -> None:
        self.users, self.folder, self._fork_server = users, folder, fork_server
        public = make_keys(folder / "trainer.pem")
        trusted = ("--set", f"weights.trusted_key={public}")
        self._keys = {role.name: trusted for role in (EXECUTOR, EVALUATOR, VIEW)}
        self._keys[TRAINER.name] = ("--set", f"weights.signing_key={folder / 'trainer.pem'}")
        (folder / "rose.toml").write_text(CONFIG)

    def log(self, role: Role | str) -> str:
        return (self.folder / f"{role if isinstance(role, str) else role.name}.log").read_text()

    def start(self, role: Role, *arguments: str) -> ForkedProcess:
        command = (role.name, *arguments, *self.common(role))
        return self._fork_server.start(command, name=role.name, log=self.folder / f"{role.name}.log")

    def lend(self) -> ForkedProcess:
        """Start a lending vLLM server."""
        model, [port] = ("lend", "--model", str(MODEL), "--name", "executor-1"), free_ports(1)
        command = (*model, *self.common(EXECUTOR), "--", *server_flags(port))
        return self._fork_server.start(command, name=LENDER, log=self.folder / f"{LENDER}.log")

    def ask(self, role: Role, *arguments: str) -> str:
        """Return the output of the command for the user of this role."""
        done = rose(self.folder, *arguments, *self.common(role))
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def common(self, role: Role) -> tuple[str, ...]:
        config = ("--config", str(self.folder / "rose.toml"))
        return (*config, *self._keys.get(role.name, ()), *self.users.flags(role))


@pytest.fixture
def run(node: SecuredNode, tmp_path: Path) -> Iterator[Run]:
    with ForkServer(tmp_path) as fork_server:
        yield Run(Users(node, "loop.", tmp_path), tmp_path, fork_server)


def prompt(number: int) -> dict[str, object]:
    return {"group_id": f"g{number}", "group_size": 4, "environment": "calculator", "seed": number}


def write_invalid_records(settings: BusSettings, *places: tuple[Topic, int]) -> None:
    """Write undecodable records."""
    producer = Producer(settings.producer("litter"))
    for topic, partition in places:
        producer.produce(settings.topic(topic), value=b"litter", key=b"litter", partition=partition)
    producer.flush()


def mislead(settings: BusSettings) -> None:
    """Before any role starts, write foreign dead letters, a prompt in a wrong home, and a turn that no executor takes
    in time."""
    producer = Producer(settings.producer("mislead"))
    for topic in DEAD_LETTERED:
        producer.produce(f"{settings.namespace}{topic.dead_letters}", value=b"litter", key=b"litter", partition=0)
    far = 1 - home_of_group("g0", PARTITIONS.home)
    producer.produce(settings.topic(PROMPTS), value=json.dumps(prompt(0)).encode(), key=b"g0", partition=far)
    producer.flush()
    writer = Writer(settings, "mislead")
    vain = request("nobody:0", requested_at=time.time(), patience_seconds=0.001)
    writer.write(REQUESTED, vain, key="nobody:0", partition=0)
    writer.flush()


def test_training_works_with_least_privilege_for_each_role(run: Run) -> None:
    users = run.users
    everything = users.node.settings(users.namespace)
    run.ask(ADMIN, "topics", "create", "--set", "run.executors=1", "--set", "topics.inbox_slots=1")
    assert "all topics have their leaders" in run.ask(ADMIN, "topics", "create")  # adds the other inbox
    assert "no right" not in run.ask(ADMIN, "topics", "check")
    assert PROMPTS.name in run.ask(ADMIN, "topics", "describe")
    mislead(everything)
    write_invalid_records(everything, (PROMPTS, 0), (REQUESTED, 0), (COMPLETED, 0), (SAMPLES, 0))
    processes: dict[Role | str, ForkedProcess] = {LENDER: run.lend()}
    until(lambda: "Application startup complete" in run.log(LENDER), START_SECONDS)
    file = run.folder / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(prompt(number)) for number in range(1, GROUPS_ASKED - 1)))
    run.ask(PRODUCER, "submit", str(file))
    processes |= {role: run.start(role) for role in (ROUTER, ENVIRONMENT, CONTROL, EVALUATOR)}
    until(lambda: "event=cell_session_started" in run.log(ROUTER))
    until(lambda: sum(ends(everything, REQUESTED).values()) > 2 * 4)  # some groups are open, and there is no policy yet
    run.ask(OPERATOR, "settle", "g1:0", "--reason", "nobody wants it")
    processes[ENVIRONMENT].send_signal(signal.SIGKILL)
    processes[ENVIRONMENT] = run.start(ENVIRONMENT)
    processes[TRAINER] = run.start(TRAINER)
    until(lambda: has_answered(everything, "executor-1"))
    processes[EXECUTOR] = run.start(EXECUTOR, "--name", "executor-0")
    until(lambda: "event=version_activated" in run.log(EXECUTOR))
    until(lambda: "event=lend_granted" in run.log(CONTROL))
    write_invalid_records(everything, (HEARTBEATS, 0), (SUMMARIES, 0), (DISPATCHED, 0), (DISPATCHED, 1))
    viewer = users.settings(VIEW)
    until(
        lambda: (
            {each.topic for each in read_dead_letters(viewer, *DEAD_LETTERED) if each.partition >= 0}
            == set(DEAD_LETTERED)
        )
    )
    file.write_text(json.dumps(prompt(GROUPS_ASKED)))
    place = next(each.place for each in read_dead_letters(viewer, PROMPTS) if each.partition >= 0)
    run.ask(OPERATOR, "dlq", "retry", place, "--edit", str(file))
    run.ask(OPERATOR, "grant", "executor-1", "--no-lend")
    until(lambda: "grant=park" in run.log(LENDER))
    run.ask(OPERATOR, "drain", "executor-0", "--within", "5")
    run.ask(OPERATOR, "drain", "executor-0", "--release")
    assert processes.pop(TRAINER).wait(300) == 0, run.log(TRAINER)
    for role, process in processes.items():
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, run.log(role)
    assert f"{4 * GROUPS_ASKED + TASKS_EVALUATED} requested" in run.ask(VIEW, "audit")
    assert "outcome" in run.ask(VIEW, "replay", "g0:0")
    assert "no difference" in run.ask(REPLAY, "replay", "--from", "2000-01-01")
    assert "g0:0" in run.ask(VIEW, "why", "g0:0")
    assert "settled by hand: nobody wants it" in run.ask(VIEW, "why", "g1:0")
    assert place in run.ask(VIEW, "dlq", "list")
    assert "trained" in run.ask(VIEW, "samples", "list")
    follow_steps(users)
    assert [each.version for each in read_history(viewer, UsageLedger()).evaluations] == [0]
    json.loads(rose(run.folder, "status", "--json", *run.common(VIEW)).stdout)
    do_what_is_seldom(users)
    refused = {
        f"{seen.user}: {seen.operation} {seen.name} ({seen.request})" for seen in users.seen() if not seen.allowed
    }
    assert not refused
    never = {
        f"Read on topic {users.namespace}{topic.dead_letters}"
        for topic in DEAD_LETTER_SOURCES
        if topic not in DEAD_LETTERED
    }
    assert users.unused() == {VIEW.name: never}  # it would read these topics if they had records


class Listing:
    """A tracker that keeps the points in a list."""

    def __init__(self, points: list[StepPoint]) -> None:
        self._points = points

    def write(self, point: StepPoint) -> None:
        self._points.append(point)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def follow_steps(users: Users) -> None:
    """Read the steps as `rose track` does, and commit."""
    settings = users.settings(TRACKER)
    connect_as(settings, TRACKER)
    with StepLog(settings, "policy", "test") as log:
        assert any(log.steps(follow=False, should_stop=lambda: False))
        log.commit()
    points: list[StepPoint] = []
    run = run_id(settings.namespace, "demo")
    with closing(EvaluationTracking(settings, "policy", run, lambda: Listing(points))) as evaluations:
        assert evaluations.update() == 1
    [point] = points
    assert point.step == 0
    assert "held-out/avg@1" in point.values


def has_answered(settings: BusSettings, worker: str) -> bool:
    """Whether the worker has completed a turn."""
    results = [each.record for each in read_whole_topics(settings, [COMPLETED]) if isinstance(each.record, TurnResult)]
    return any(each.worker == worker and each.outcome is TurnOutcome.COMPLETED for each in results)


def do_what_is_seldom(users: Users) -> None:
    """Do the rare work of roles: read a context or outcomes back, delete old records, resend every kind of dead
    letter."""
    for role, topic in ((EXECUTOR, REQUESTED), (EVALUATOR, OUTCOMES)):
        with closing(Reader(users.settings(role), "test")) as reader:
            reader.assign({(topic, 0): OFFSET_BEGINNING})
            until(lambda: bool(reader.read(1, 0.1)))
    operator = users.settings(OPERATOR)
    for topic in DEAD_LETTERED:
        dead_letter = next(each for each in read_dead_letters(operator, topic) if each.partition >= 0)
        resend(operator, dead_letter, dead_letter.raw, partition=dead_letter.partition)
    environment, trainer = users.settings(ENVIRONMENT), users.settings(TRAINER)
    sweeper = LogCleaner(replace(environment, retention=NOTHING_KEPT), "environment-0")
    sweeper.sweep(ends(environment, PROMPTS, REQUESTED, COMPLETED))
    sweeper.join()
    lowest_committed(trainer, TRAINER_PREFIX, [(SAMPLES, 0)], client_id="trainer")
    delete_before(replace(trainer, retention=NOTHING_KEPT), ends(trainer, SAMPLES, CHUNKS), client_id="trainer")
    for settings, topics in ((environment, (PROMPTS, REQUESTED, COMPLETED)), (trainer, (SAMPLES, CHUNKS))):
        with closing(Reader(settings, "test")) as reader:
            for place in ends(settings, *topics):
                low, high = reader.watermarks(place)
                assert low == high, f"nothing was deleted from {place}"


def ends(settings: BusSettings, *topics: Topic) -> dict[Place, int]:
    with closing(Reader(settings, "test")) as reader:
        places = [(topic, partition) for topic in topics for partition in range(reader.partition_count(topic))]
        return {place: reader.watermarks(place)[1] for place in places}


@pytest.fixture(scope="module")
def others(node: SecuredNode, tmp_path_factory: pytest.TempPathFactory) -> Users:
    """Users of another namespace with topics."""
    users = Users(node, "less.", tmp_path_factory.mktemp("less"))
    create_topics(node.settings(users.namespace), PARTITIONS)
    return users


def begin(role: Role, settings: BusSettings) -> None:
    """Do the first operations of a role that need group and transactional-id rights, until they raise."""
    connect_as(settings, role)
    stop = Event()
    timer = Timer(WAIT_SECONDS / 2, stop.set)
    timer.daemon = True
    timer.start()
    if role is ENVIRONMENT:
        run_environment_worker(settings, EnvironmentConfig(model_folder=WARM_START), "environment-0", stop)
    elif role is ROUTER:
        run_router(settings, RouterConfig(), stop)
    elif role is CONTROL:
        run_control(settings, ControlConfig(page_port=0), "less.:demo", stop)
    elif role is TRAINER:
        SampleStream(settings, "policy").close()
    elif role is EVALUATOR:
        tasks = EvaluationSet("held-out", (), 1)
        run_evaluator(settings, EvaluationConfig(every_versions=1), WeightsConfig(), tasks, stop)
    elif role is TRACKER:
        with StepLog(settings, "policy", "test") as log:
            any(log.steps(follow=False, should_stop=stop.is_set))
            log.commit()
    elif role is VIEW:
        probe = BrokerProbe(settings)
        probe.probe()
        probe.close()
        if probe.last_error:
            raise RoseError(probe.last_error)
    elif role is OPERATOR:
        Writer(settings, "letters", transactional_id=DEAD_LETTERS_TRANSACTIONAL_ID)
    elif role is ADMIN:
        create_topics(replace(settings, namespace=f"{settings.namespace}{PREFIX}"), PARTITIONS)
        for weakness in durability_warnings(settings):
            raise RoseError(weakness)
    with closing(Reader(settings, "test")) as reader:  # opened by hand, like every reader of the log
        reader.assign({(role.reads[0], 0): OFFSET_BEGINNING})
        while not stop.is_set():
            reader.read(1, 0.1)


@pytest.mark.parametrize("role", ROLES.values(), ids=list(ROLES))
def test_role_without_a_right_names_the_right(others: Users, role: Role) -> None:
    settings = others.settings(role)
    connect_as(settings, role)
    for acl in acls(role, others.namespace):
        if acl in (*TO_TELL, *TO_RECORD, *TO_COMPARE):
            continue
        others.node.forbid(others.name(role), acl)
        with pytest.raises(RoseError) as refused:
            begin(role, settings)
        others.node.allow(others.name(role), [acl])
        message = str(refused.value)
        assert "this client has no right to " in message, f"without {acl}: {message}"
        assert named(acl) in message, f"without {acl}: {message}"
    connect_as(settings, role)


@pytest.mark.parametrize("role", [ROUTER, VIEW], ids=lambda role: role.name)
def test_role_starts_without_the_right_to_announce_its_start(
    others: Users, role: Role, capsys: pytest.CaptureFixture[str]
) -> None:
    """A broker upgraded from 0.2.0 lacks the topic, and so its roles lack the right."""
    settings = others.settings(role)
    [acl] = [acl for acl in acls(role, others.namespace) if acl in TO_TELL]
    others.node.forbid(others.name(role), acl)
    try:
        connect_as(settings, role)
        if role is ROUTER:
            with announce_starts(settings, "router-0"):
                until(lambda: f"no right to {acl}" in capsys.readouterr().out)
        else:
            RunFollower(
                settings, trust=Trust("policy", "run"), whole=False, window_groups=1, max_lag_versions=4
            ).close()
    finally:
        others.node.allow(others.name(role), [acl])


def test_journal_without_the_right_to_write_names_it_and_delays_no_end(others: Users) -> None:
    """A broker upgraded from 0.2.0 lacks this right, too."""
    [write] = [acl for acl in acls(ROUTER, others.namespace) if acl in TO_RECORD]
    record = CoreJournal(core="router-0", cell=0, began_at=1, sequence=0)
    others.node.forbid(others.name(ROUTER), write)
    try:
        with closing(JournalWriter(others.settings(ROUTER), "router-0-journal")) as journal:
            journal(record)
            journal.flush()
            for _ in range(2):
                with pytest.raises(RoseError, match=f"this client has no right to {write}"):
                    journal(record)
    finally:
        others.node.allow(others.name(ROUTER), [write])


def named(acl: Acl) -> str:
    """Return the name of a right in messages: for a prefix right a used topic, for a group right the first query."""
    if acl.resource is Resource.CLUSTER:
        return f"{acl.operation.value} on cluster"
    if acl.resource is Resource.GROUP:
        return f" on group {acl.name}"
    return f"{acl.operation.value} on {acl.resource.label} {acl.name}"


def test_role_on_the_command_line_reports_a_missing_right_in_one_sentence(others: Users, tmp_path: Path) -> None:
    write = next(acl for acl in acls(ROUTER, others.namespace) if str(acl).startswith("Write on topic"))
    flags = others.flags(ROUTER)
    others.node.forbid(others.name(ROUTER), write)
    done = rose(tmp_path, "router", *flags)
    others.node.allow(others.name(ROUTER), [write])
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        1,
        f"rose: this client has no right to {write}: `rose topics acl --role router` prints the ACLs that a role needs",
    )


def test_server_without_a_lending_right_names_it_and_keeps_serving(node: SecuredNode, tmp_path: Path) -> None:
    """Each right is first missing at the start, one after another; later the permanent rights are removed."""
    users = Users(node, "lent.", tmp_path)
    everything, user, flags = node.settings(users.namespace), users.name(EXECUTOR), users.flags(EXECUTOR)
    create_topics(everything, PARTITIONS)
    trusted, rights = make_keys(tmp_path / "trainer.pem"), acls(EXECUTOR, users.namespace)
    node.forbid(user, rights[0])
    with lending(tmp_path, *flags, weights__trusted_key=trusted) as server:
        answer = server.complete(CONTEXT).text

        def tells_and_serves(lacking: Acl, before: int = 0) -> None:
            until(lambda: message(server, lacking) > before)
            assert server.complete(CONTEXT).text == answer

        for lacking, following in zip(rights, [*rights[1:], None], strict=True):
            tells_and_serves(lacking)
            if following is not None:
                node.forbid(user, following)
            node.allow(user, [lacking])
        router = Router(everything, server.process, private_key(tmp_path / "trainer.pem"))
        router.publish_tensors(load_file(MODEL / "model.safetensors"), 0)
        incarnation = lends(router, "first")
        for operation, topic in (
            (Operation.READ, DISPATCHED),
            (Operation.WRITE, COMPLETED),
            (Operation.WRITE, HEARTBEATS),
        ):
            taken = Acl(operation, Resource.TOPIC, everything.topic(topic))
            before = message(server, taken)
            node.forbid(user, taken)
            router.dispatch(f"without-{topic.name}", CONTEXT)
            tells_and_serves(taken, before)
            node.allow(user, [taken])
            incarnation = lends(router, f"with-{topic.name}", incarnation)


def message(server: Server, lacking: Acl) -> int:
    """Return how often the server log names the right."""
    return server.log.read_text().count(f"this client has no right to {lacking}")


def lends(router: Router, turn: str, after: int = 0) -> int:
    """Prove that the server lends; return its incarnation, a later one than `after`."""
    router.until(lambda: router.serves(0) and router.heartbeats[-1].incarnation > after)
    router.dispatch(turn, CONTEXT)
    prove(router.result(turn))
    return router.heartbeats[-1].incarnation


@pytest.mark.parametrize(("role", "field"), [(TRAINER, "signing_key"), (EXECUTOR, "trusted_key")])
def test_unsigned_versions_are_neither_published_nor_accepted(
    others: Users, tmp_path: Path, role: Role, field: str
) -> None:
    done = rose(tmp_path, role.name, *others.flags(role))
    assert done.returncode == 2, done.stderr
    assert f"set weights.{field}; `rose keys FILE` makes both keys" in done.stderr.splitlines()[-1]


def test_unknown_user_is_reported(others: Users) -> None:
    settings = others.node.settings()
    for changed in ({"sasl.password": "guessed"}, {"ssl.ca.location": ""}):
        with pytest.raises(AuthenticationFailed, match=r"do not trust each other .* correct sasl\.\* and ssl\.\*"):
            connect(replace(settings, properties={**settings.properties, **changed}))
