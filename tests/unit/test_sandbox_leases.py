"""Whatever is killed, no process and no file of a sandbox is left."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rose.workers.environments.sandbox import process
from rose.workers.environments.sandbox.host import SandboxSettings, configure_sandboxes, sandbox_host
from rose.workers.environments.sandbox.leases import PASS_SECONDS, folder_of_leases, process_name, reap
from rose.workers.environments.sandbox.process import SHELL, SandboxProcess
from rose.workers.environments.sandbox.state import PackReference
from rose.workers.environments.sandbox.store import PackStore
from rose.workers.environments.sandbox.tree import digest_of
from tests.support.sandbox_fixtures import LIMITS, begun, needs_sandboxes, own_leases, run, shell, sleepers
from tests.support.waiting import has_ended, until

pytestmark = [needs_sandboxes, pytest.mark.usefixtures("own_leases")]

__all__ = ["own_leases"]

HOLDER = """
import sys
from rose.workers.environments.sandbox.process import SHELL, SandboxProcess
from tests.support.sandbox_fixtures import LIMITS
sandbox = SandboxProcess(LIMITS)
sandbox.run([*SHELL, "setsid sleep 98{word} & sleep 98{word} & echo > file"])
print(sandbox.lease.path, flush=True)
{then}
"""
IDLE, BUSY = "sys.stdin.read()", 'sandbox.run([*SHELL, "sleep 98{word}"])'


@pytest.fixture
def word(request: pytest.FixtureRequest) -> str:
    return f"{os.getpid()}{abs(hash(request.node.name)) % 10**6}"


def start_holder(word: str, then: str) -> tuple["subprocess.Popen[str]", Path]:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER.format(word=word, then=then.format(word=word))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    lease = Path(holder.stdout.readline().strip())
    until(lambda: len(sleepers(f"98{word}")) >= 2)
    assert lease.exists()
    return holder, lease


def first_process(lease: Path) -> int:
    """The parent of the sandbox's first process."""
    return int(lease.read_text().splitlines()[1].split()[0])


@pytest.mark.parametrize("then", [IDLE, BUSY], ids=["idle", "busy"])
def test_killed_holder_leaves_no_process_and_no_lease(then: str, word: str) -> None:
    holder, lease = start_holder(word, then)
    holder.kill()
    holder.wait()
    until(lambda: not sleepers(f"98{word}") and not lease.exists())


def test_killed_parent_of_the_first_process_leaves_no_process(word: str) -> None:
    holder, lease = start_holder(word, IDLE)
    os.kill(first_process(lease), signal.SIGKILL)
    until(lambda: not sleepers(f"98{word}"))
    holder.kill()
    holder.wait()


def test_killed_first_process_leaves_no_process_and_no_lease(word: str) -> None:
    holder, lease = start_holder(word, IDLE)
    parent = first_process(lease)
    (first,) = map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
    os.kill(first, signal.SIGKILL)
    until(lambda: not sleepers(f"98{word}") and not lease.exists())
    holder.kill()
    holder.wait()


def test_holder_and_parent_killed_at_once_leave_a_lease_that_the_next_pass_removes(word: str) -> None:
    holder, lease = start_holder(word, IDLE)
    parent = first_process(lease)
    os.kill(parent, signal.SIGSTOP)
    holder.kill()
    holder.wait()
    os.kill(parent, signal.SIGKILL)
    until(lambda: not sleepers(f"98{word}"))
    os.utime(lease, (time.time() - 2 * PASS_SECONDS,) * 2)
    assert reap(folder_of_leases()) == 1 and not lease.exists()


def test_frozen_first_process_of_a_dead_holder_is_killed_by_the_next_pass(word: str) -> None:
    holder, lease = start_holder(word, IDLE)
    parent = first_process(lease)
    (first,) = map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
    os.kill(first, signal.SIGSTOP)
    holder.kill()
    holder.wait()
    os.utime(lease, (time.time() - 2 * PASS_SECONDS,) * 2)
    assert reap(folder_of_leases()) == 1
    until(lambda: not sleepers(f"98{word}") and has_ended(first))


def test_lease_of_a_running_holder_is_kept(word: str) -> None:
    holder, lease = start_holder(word, IDLE)
    os.utime(lease, (time.time() - 10.0,) * 2)
    assert reap(folder_of_leases()) == 0 and lease.exists()
    holder.kill()
    holder.wait()


def test_lease_of_a_later_process_with_the_same_id_is_removed() -> None:
    lease = folder_of_leases() / "old.lease"
    pid, started = process_name(os.getpid()).split()
    lease.write_text(f"{pid} {int(started) - 1}\n")
    os.utime(lease, (time.time() - 2 * PASS_SECONDS,) * 2)
    assert reap(folder_of_leases()) == 1


def test_sandbox_whose_lease_is_not_renewed_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LEASE_SECONDS", 1.0)
    sandbox = SandboxProcess(LIMITS)
    monkeypatch.setattr(sandbox.lease, "renew", lambda: None)
    until(lambda: not sandbox.is_running)
    sandbox.close()


def test_sandbox_whose_lease_is_removed_ends() -> None:
    sandbox = SandboxProcess(LIMITS)
    sandbox.lease.path.unlink()
    until(lambda: not sandbox.is_running)
    sandbox.close()


def test_command_has_no_file_of_its_sandbox_however_many_files_the_worker_has() -> None:
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(300)]
    sandbox = SandboxProcess(LIMITS)
    for file in held:
        os.close(file)
    assert sandbox.run([*SHELL, "ls /proc/self/fd"]).output == b"0\n1\n2\n3\n"  # 3: the folder
    sandbox.close()


def test_environment_that_is_closed_during_a_command_leaves_no_sandbox(word: str) -> None:
    environment = begun()

    async def given_up() -> None:
        step = asyncio.ensure_future(environment.step(shell(f"sleep 98{word}")))
        await asyncio.to_thread(until, lambda: bool(sleepers(f"98{word}")))
        step.cancel()
        await environment.close()

    run(given_up())  # which waits for the thread of the command
    assert environment.sandbox is None
    assert not list(folder_of_leases().glob("*.lease"))


def test_dropped_sandbox_ends() -> None:
    sandbox = SandboxProcess(LIMITS)
    sandbox.run([*SHELL, "true"])
    lease = sandbox.lease.path
    del sandbox
    until(lambda: not lease.exists())


def test_host_that_refuses_user_namespaces_is_named_in_one_sentence(tmp_path: Path) -> None:
    code = "from tests.support.sandbox_fixtures import *; print(refusal())"
    refusing = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$0" "$@"'
    if subprocess.run(["unshare", "-Ur", "sh", "-c", "echo 0 > /proc/sys/user/max_user_namespaces"]).returncode:
        pytest.skip("needs a user namespace whose limit can be set")
    result = subprocess.run(
        ["unshare", "-Ur", "sh", "-c", refusing, sys.executable, "-c", code], capture_output=True, text=True
    )
    assert "no sandbox can be made here (unshare of user" in result.stdout and "allow unprivileged" in result.stdout


def test_store_keeps_what_is_held_and_deletes_the_rest(tmp_path: Path) -> None:
    store = PackStore(tmp_path / "store", keep_seconds=100.0)
    held, ended, old = "a" * 32, "b" * 32, "c" * 32
    pack = PackReference(digest_of(b"content"), "d" * 32, b"content")
    for lineage in (held, ended, old):
        store.put(lineage, pack)
    store.end(ended)
    os.utime(tmp_path / "store" / old, (time.time() - 200.0,) * 2)
    os.utime(tmp_path / "store" / held, (time.time() - 200.0,) * 2)
    store.renew(held)
    assert store.sweep() == 1
    os.utime(tmp_path / "store" / ended, ((tmp_path / "store" / ended).stat().st_mtime - 121.0,) * 2)
    assert store.sweep() <= 1
    assert [folder.name for folder in (tmp_path / "store").iterdir()] == [held]


def test_store_in_a_folder_with_other_contents_deletes_none_of_them(tmp_path: Path) -> None:
    others = [tmp_path / "checkpoints", tmp_path / f"{'a' * 32}-run"]
    for folder in others:
        folder.mkdir()
        os.utime(folder, (time.time() - 200.0,) * 2)
    assert PackStore(tmp_path, keep_seconds=100.0).sweep() == 0
    assert all(folder.exists() for folder in others)


def test_process_that_holds_a_sandbox_renews_its_packs(tmp_path: Path) -> None:
    configure_sandboxes(SandboxSettings(store=str(tmp_path / "store")))
    host, lineage = sandbox_host(), "e" * 32
    folder = tmp_path / "store" / lineage
    host.hold(lineage)
    folder.mkdir()
    began = time.time() - 60.0
    os.utime(folder, (began, began))
    until(lambda: folder.stat().st_mtime > began)
    host.let_go(lineage, ended=False)
    configure_sandboxes(SandboxSettings())
