"""The supervisor keeps real roles going, tells when it cannot, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from threading import Event
from time import monotonic

import pytest

from pipeline.command.supervisor import Role, RoleFailed, Supervisor
from tests.brokers import AnyBroker, flags
from topics.admin import create_topics
from topics.catalog import Partitions

PATIENCE_SECONDS = 120.0


def until(holds: Callable[[], bool]) -> None:
    """Look until it holds."""
    deadline, never = monotonic() + PATIENCE_SECONDS, Event()
    while not holds():
        assert monotonic() < deadline
        never.wait(0.05)


def alive(process_id: int) -> bool:
    """Whether it runs; a zombie does not."""
    stat = Path(f"/proc/{process_id}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def router(broker: AnyBroker, namespace: str) -> Role:
    settings = broker.settings(namespace)
    create_topics(settings, Partitions(2, 2, 1, 1))
    return Role("router", ("router", *flags(settings)))


def test_a_role_that_refuses_its_input_ends_the_run_with_its_last_words(tmp_path: Path) -> None:
    supervisor = Supervisor([Role("router", ("router", "--set", "router.nothing=1"))], tmp_path)
    supervisor.start()
    with pytest.raises(RoleFailed, match=r"router ended with status 2; the end of .*router.log") as failed:
        until(lambda: bool(supervisor.tick()))
    assert "there is no router.nothing" in str(failed.value)
    supervisor.stop()


def test_the_role_that_ends_the_run_ends_it(tmp_path: Path) -> None:
    supervisor = Supervisor([Role("trainer", ("config",), ends_run=True)], tmp_path)
    supervisor.start()
    until(lambda: supervisor.tick() == [] and supervisor.finished)
    supervisor.stop()


@pytest.mark.slow
def test_a_killed_role_comes_back_and_stop_leaves_none(router: Role, tmp_path: Path) -> None:
    supervisor = Supervisor([router], tmp_path)
    supervisor.start()
    first = supervisor.process_ids["router"]
    os.kill(first, signal.SIGKILL)
    until(lambda: any("killed by signal SIGKILL" in line for line in supervisor.tick()))
    until(lambda: any("starts again" in line for line in supervisor.tick()))
    second = supervisor.process_ids["router"]
    assert second != first
    until(lambda: "event=started" in (tmp_path / "router.log").read_text())
    supervisor.stop()
    assert not alive(second)


@pytest.mark.slow
def test_roles_do_not_outlive_a_supervisor_that_is_killed(router: Role, tmp_path: Path) -> None:
    program = f"""
        from pathlib import Path
        from threading import Event
        from pipeline.command.supervisor import Role, Supervisor
        supervisor = Supervisor([Role("router", {router.arguments!r})], Path({str(tmp_path)!r}))
        supervisor.start()
        print(supervisor.process_ids["router"], flush=True)
        Event().wait()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        until(lambda: "event=started" in (tmp_path / "router.log").read_text())
        assert alive(child)
        parent.kill()
    until(lambda: not alive(child))
