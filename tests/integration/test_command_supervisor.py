"""The supervisor keeps real roles running, reports when it cannot, and leaves no process behind; so does its fork
server."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rose.pipeline.local.fork_server import ForkServer
from rose.pipeline.local.supervisor import Role, RoleFailed, Supervisor
from rose.topics.admin import create_topics
from rose.topics.catalog import Partitions
from rose.topics.settings import BusSettings
from tests.support.brokers import AnyBroker, any_broker, flags
from tests.support.waiting import has_ended, until


def fork_server_of(role: int) -> int:
    """Return the parent of the guard of the role."""
    return parent_of(parent_of(role))


def parent_of(process_id: int) -> int:
    """Return the parent of a role, its guard."""
    return int(Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture
def fork_server() -> Iterator[ForkServer]:
    with ForkServer() as opened:
        yield opened


@pytest.fixture
def router(broker: AnyBroker, namespace: str) -> Role:
    settings = broker.settings(namespace)
    create_topics(settings, Partitions(2, 2, 1, 1))
    return Role("router", ("router", *flags(settings)))


def test_role_with_a_usage_error_ends_the_run_with_its_last_log_lines(fork_server: ForkServer, tmp_path: Path) -> None:
    supervisor = Supervisor([Role("router", ("router", "--set", "router.nothing=1"))], tmp_path, fork_server)
    supervisor.start()
    with pytest.raises(RoleFailed, match=r"router ended with status 2; the end of .*router.log") as failed:
        until(lambda: bool(supervisor.tick()))
    assert "there is no router.nothing" in str(failed.value)
    supervisor.stop()


def test_role_that_completes_the_run_ends_it(fork_server: ForkServer, tmp_path: Path) -> None:
    """The role ends the run by its records: a role that was asked to stop does not end the run."""
    key = tmp_path / "key"
    supervisor = Supervisor([Role("keys", ("keys", str(key)), ends_run_with=key)], tmp_path, fork_server)
    supervisor.start()
    until(lambda: supervisor.tick() == [] and supervisor.finished)
    supervisor.stop()


def test_role_that_exits_early_is_restarted(fork_server: ForkServer, tmp_path: Path) -> None:
    written = tmp_path / "written"
    written.touch()
    supervisor = Supervisor([Role("trainer", ("config",), ends_run_with=written)], tmp_path, fork_server)
    supervisor.start()
    until(lambda: any("trainer ended with status 0 and starts again" in line for line in supervisor.tick()))
    assert not supervisor.finished
    supervisor.stop()


@any_broker
@pytest.mark.slow
def test_killed_role_is_restarted_and_stop_leaves_no_process(
    router: Role, fork_server: ForkServer, tmp_path: Path
) -> None:
    supervisor = Supervisor([router], tmp_path, fork_server)
    supervisor.start()
    first = supervisor.process_ids["router"]
    os.kill(first, signal.SIGKILL)
    until(lambda: any("killed by signal SIGKILL" in line for line in supervisor.tick()))
    until(lambda: any("starts again" in line for line in supervisor.tick()))
    second = supervisor.process_ids["router"]
    assert second != first
    until(lambda: "event=cell_session_started" in (tmp_path / "router.log").read_text())
    imported = Path(f"/proc/{second}/maps").read_text()
    assert "confluent_kafka" in imported
    assert "libtorch" not in imported
    supervisor.stop()
    assert has_ended(second)


def test_role_with_niceness_runs_at_that_nice_value_within_and_between_sessions(
    broker: AnyBroker, namespace: str, fork_server: ForkServer, tmp_path: Path
) -> None:
    arguments = starting(broker.settings(namespace), tmp_path)
    supervisor = Supervisor([Role("environment-0", arguments, niceness=7)], tmp_path, fork_server)
    supervisor.start()
    until((tmp_path / "children").exists)
    role, own = supervisor.process_ids["environment-0"], os.getpriority(os.PRIO_PROCESS, 0)
    assert {os.getpriority(os.PRIO_PROCESS, each) for each in [role, *children(tmp_path)]} == {own + 7}
    autogroup = Path(f"/proc/{role}/autogroup")
    if autogroup.exists():
        assert autogroup.read_text().split()[-1] == "7"
    supervisor.stop()


class ScriptedProcess:
    """A process that ends when asked, and notes what it was asked."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self._name = name
        self._notes = notes

    def send_signal(self, number: signal.Signals) -> None:
        self._notes.append(f"{number.name} to {self._name}")

    def wait(self, seconds: float | None = None) -> int:
        self._notes.append(f"{self._name} has ended")
        return 0


def test_dependent_role_is_stopped_before_the_roles_that_it_uses(tmp_path: Path) -> None:
    notes: list[str] = []
    fork_server: Any = SimpleNamespace(start=lambda arguments, *, name, **_: ScriptedProcess(name, notes))
    roles = [Role("server", ()), Role("users", (), leaves_first=True), Role("router", ())]
    supervisor = Supervisor(roles, tmp_path, fork_server)
    supervisor.start()
    supervisor.stop()
    assert notes[:2] == ["SIGTERM to users", "users has ended"]
    assert sorted(notes[2:4]) == ["SIGTERM to router", "SIGTERM to server"]


@any_broker
@pytest.mark.slow
def test_roles_of_a_killed_fork_server_end_and_are_restarted(
    router: Role, fork_server: ForkServer, tmp_path: Path
) -> None:
    supervisor = Supervisor([router], tmp_path, fork_server)
    supervisor.start()
    first = supervisor.process_ids["router"]
    os.kill(fork_server_of(first), signal.SIGKILL)
    until(lambda: any("router was killed by signal SIGKILL" in line for line in supervisor.tick()))
    until(lambda: has_ended(first))
    until(lambda: any("starts again" in line for line in supervisor.tick()))
    second = supervisor.process_ids["router"]
    until(lambda: "event=cell_session_started" in (tmp_path / "router.log").read_text())
    its_nursery = fork_server_of(second)
    supervisor.stop()
    assert not has_ended(its_nursery) and has_ended(second)
    fork_server.close()
    assert has_ended(its_nursery)


@any_broker
@pytest.mark.slow
def test_roles_end_with_a_killed_supervisor(router: Role, tmp_path: Path) -> None:
    program = f"""
        from pathlib import Path
        from threading import Event
        from rose.pipeline.local.fork_server import ForkServer
        from rose.pipeline.local.supervisor import Role, Supervisor
        supervisor = Supervisor([Role("router", {router.arguments!r})], Path({str(tmp_path)!r}), ForkServer())
        supervisor.start()
        print(supervisor.process_ids["router"], flush=True)
        Event().wait()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        until(lambda: "event=cell_session_started" in (tmp_path / "router.log").read_text())
        fork_server = fork_server_of(child)
        assert not has_ended(child) and not has_ended(fork_server)
        parent.kill()
    until(lambda: has_ended(child) and has_ended(fork_server))


STARTING = """
import os, pathlib, signal, subprocess
stubborn = ["sh", "-c", "trap '' TERM HUP; while :; do sleep 1; done"]
own = [subprocess.Popen(["sleep", "1000"]), subprocess.Popen(stubborn, start_new_session=True)]
orphan = subprocess.run(["setsid", "sh", "-c", "sleep 1000 > /dev/null & echo $!"], stdout=subprocess.PIPE, text=True)
found = pathlib.Path(__file__).with_name("children")
found.with_suffix(".new").write_text(" ".join(map(str, [own[0].pid, own[1].pid, int(orphan.stdout)])))
found.with_suffix(".new").rename(found)
signal.pause()
"""

SUPERVISES = """
from pathlib import Path
from threading import Event
from rose.pipeline.local.fork_server import ForkServer
from rose.pipeline.local.supervisor import Role, Supervisor
supervisor = Supervisor([Role("environment", {arguments!r})], Path({logs!r}), ForkServer())
supervisor.start()
print(supervisor.process_ids["environment"], flush=True)
Event().wait()
"""


def starting(settings: BusSettings, folder: Path) -> tuple[str, ...]:
    """Return the arguments of a role that starts other processes."""
    (folder / "starting.py").write_text(STARTING)
    create_topics(settings, Partitions(2, 2, 1, 1))
    (folder / "rose.toml").write_text(
        f'[environment]\nimport_paths = ["{folder}"]\nenvironments = ["starting:Environment"]\n'
    )
    return ("environment", "--config", str(folder / "rose.toml"), *flags(settings))


def children(folder: Path) -> list[int]:
    """Return the processes that the role has started."""
    return [int(each) for each in (folder / "children").read_text().split()]


def test_process_id_of_an_ended_role_stays_taken_while_its_children_run(
    broker: AnyBroker, namespace: str, fork_server: ForkServer, tmp_path: Path
) -> None:
    arguments = starting(broker.settings(namespace), tmp_path)
    process = fork_server.start(arguments, name="environment-0", log=tmp_path / "log")
    until((tmp_path / "children").exists)
    os.kill(process.pid, signal.SIGQUIT)

    def ended() -> bool:
        free = not psutil.pid_exists(process.pid)  # checked first: a process that runs after this check ran before it
        left = [each for each in children(tmp_path) if not has_ended(each)]
        assert not (free and left)
        return not left

    until(ended)
    assert process.wait(60.0) == -signal.SIGQUIT
    until(lambda: not psutil.pid_exists(process.pid))  # the guard reports the status first


@any_broker
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP, signal.SIGQUIT], ids=lambda each: each.name)
@pytest.mark.parametrize("killed", ["role", "guard", "fork server", "supervisor"])
def test_children_of_a_role_end_with_it_whichever_process_is_killed(
    broker: AnyBroker, namespace: str, tmp_path: Path, killed: str, number: signal.Signals
) -> None:
    """The children are a plain child, a child with its own session that ignores SIGTERM, and an orphan."""
    program = SUPERVISES.format(arguments=starting(broker.settings(namespace), tmp_path), logs=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        role = int(supervisor.stdout.readline())
        until((tmp_path / "children").exists)
        started = children(tmp_path)
        chain = {
            "role": role,
            "guard": parent_of(role),
            "fork server": fork_server_of(role),
            "supervisor": supervisor.pid,
        }
        assert not any(has_ended(each) for each in [*started, *chain.values()])
        os.kill(chain[killed], number)
        until(lambda: all(has_ended(each) for each in [role, *started]))
        supervisor.kill()
    until(lambda: all(has_ended(each) for each in chain.values()))


@pytest.mark.slow
def test_pending_role_is_stopped_at_once(fork_server: ForkServer, tmp_path: Path) -> None:
    log = tmp_path / "log"
    router = fork_server.start(("router", "--help"), name="router", log=log)
    router.send_signal(signal.SIGTERM)
    assert router.poll() == -signal.SIGTERM
    assert fork_server.start(("router", "--help"), name="router", log=log).wait() == 0
    assert log.read_text().count("Usage: rose router") == 1


@pytest.mark.slow
def test_role_stopped_before_its_fork_never_runs(fork_server: ForkServer, router: Role, tmp_path: Path) -> None:
    out = tmp_path / "out"
    fork_server.start(router.arguments, name="router", log=tmp_path / "log").send_signal(signal.SIGKILL)
    fork_server.start(("router", "--help"), name="router", log=out)
    until(lambda: "Usage: rose router" in out.read_text())
    [process] = [each for each in psutil.Process().children() if any("serve(" in word for word in each.cmdline())]
    until(lambda: not process.children())


FAILING = """
import rose.workers.environments.main as program
from rose.workers.environments.calculator import Calculator as Environment

class Unexpected(BaseException): pass

def connect(settings):
    raise Unexpected("of its own")

print("said before")
program.connect = connect
"""


@any_broker
@pytest.mark.slow
def test_forked_role_ends_like_a_spawned_role(
    broker: AnyBroker, namespace: str, fork_server: ForkServer, tmp_path: Path
) -> None:
    """Exit status and last log lines are compared for a refusal, an unexpected error and a success."""
    (tmp_path / "failing.py").write_text(FAILING)
    settings = broker.settings(namespace)
    create_topics(settings, Partitions(2, 2, 1, 1))
    (tmp_path / "rose.toml").write_text(
        f'[environment]\nimport_paths = ["{tmp_path}"]\nenvironments = ["failing:Environment"]\nisolation = "thread"\n'
    )
    for name, arguments in {
        "refused": ("config", "--set", "router.nothing=1"),
        "misspelt": ("router", "--nothing"),
        "unexpected": ("environment", "--config", str(tmp_path / "rose.toml"), *flags(settings)),
        "well": ("config",),
    }.items():
        started = subprocess.run(
            [sys.executable, "-P", "-m", "rose.pipeline.cli.main", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        log = tmp_path / f"{name}.log"
        assert fork_server.start(arguments, name=name, log=log).wait() == started.returncode
        assert log.read_text().splitlines()[-3:] == started.stdout.splitlines()[-3:]
    unexpected = (tmp_path / "unexpected.log").read_text()
    assert "said before" in unexpected and "Traceback (most recent call last)" in unexpected


DRAWING = """
import os, random, sys
import numpy
print("drawn", random.random(), numpy.random.random(), os.environ["ROSE_RUN__SEED"], os.getpgid(0) == os.getpid())
print("stdin", repr(sys.stdin.read()))
"""


@any_broker
@pytest.mark.slow
def test_forked_roles_have_own_random_numbers_and_the_supervisor_environment(
    broker: AnyBroker, namespace: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "drawing.py").write_text(DRAWING)
    settings = broker.settings(namespace)
    create_topics(settings, Partitions(2, 2, 1, 1))
    (tmp_path / "rose.toml").write_text(
        f'[environment]\nimport_paths = ["{tmp_path}"]\nenvironments = ["drawing:Environment"]\n'
    )
    monkeypatch.setenv("ROSE_RUN__SEED", "41")
    arguments = ("environment", "--config", str(tmp_path / "rose.toml"), *flags(settings))
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    with ForkServer() as fork_server:
        roles = [fork_server.start(arguments, name=log.stem, log=log) for log in logs]
        for role in roles:
            role.wait()
    first, second = (next(line.split() for line in log.read_text().splitlines() if "drawn" in line) for log in logs)
    assert first[1] != second[1] and first[2] != second[2]
    assert first[3:] == second[3:] == ["41", "True"]
    assert all("stdin ''" in log.read_text() for log in logs)
