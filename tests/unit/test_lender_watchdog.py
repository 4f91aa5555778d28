"""The watchdog: it restarts the sidecar, a stop file stops lending, and a hung guest ends its engine core."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.workers.lender import status_page as status_pages
from rose.workers.lender import watchdog as watchdogs
from rose.workers.lender.status_page import (
    ProcessId,
    StatusPage,
    current_process_id,
    open_pidfd,
    process_id_of,
    process_state,
)
from rose.workers.lender.watchdog import MAX_GAP_SECONDS, HangDetector, Watchdog, is_halted, stop_file_exists
from tests.support.waiting import until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STOP_SECONDS = 1.0
"""Time within which a stop file stops lending."""

CORE = """
import sys, time
from rose.workers.lender.status_page import ProcessId, StatusPage
status_page = StatusPage.for_core(sys.argv[1])
status_page.set_ranks([ProcessId.unpack(int(rank)) for rank in sys.argv[3:]])

def a_step_that_hangs():
    while True:
        time.sleep(0.01)

if sys.argv[2] == "guest":
    status_page.guest_entered()
a_step_that_hangs()
"""


def named(process: "subprocess.Popen[bytes]", *, before: int = 0) -> str:
    """Return the id and start time of a process, as a core reports it. `before` is the start of an earlier process with
    this id."""
    found = process_id_of(process.pid)
    assert found is not None
    return str(found._replace(started=found.started - before).packed)


def halted(process: "subprocess.Popen[bytes]") -> bool:
    found = process_id_of(process.pid)
    return found is None or is_halted(found)


class SidecarStarter:
    """Starts sidecars that do nothing."""

    def __init__(self, command: str) -> None:
        self.command = command
        self.started: list[subprocess.Popen[bytes]] = []

    def begin(self) -> int:
        self.started.append(subprocess.Popen(["sh", "-c", self.command]))
        return self.started[-1].pid


@contextmanager
def kept(folder: Path, begin: Callable[[], int], *, hang_seconds: float = 60.0) -> Iterator[StatusPage]:
    """Run a watchdog during the block, and end it in order."""
    status_page, stop = StatusPage.create(folder / "status_page"), Event()
    watchdog = Watchdog(status_page, folder / "marks" / "stop", begin, hang_seconds=hang_seconds)
    thread = Thread(target=watchdog.run, args=(stop,))
    thread.start()
    try:
        yield StatusPage(folder / "status_page")
    finally:
        stop.set()
        thread.join()


def test_killed_sidecar_is_restarted_and_a_normal_exit_is_final(tmp_path: Path) -> None:
    sidecars = SidecarStarter("exec sleep 600")
    with kept(tmp_path, sidecars.begin):
        until(lambda: len(sidecars.started) == 1)
        os.kill(sidecars.started[0].pid, signal.SIGKILL)
        until(lambda: len(sidecars.started) == 2)
        assert not halted(sidecars.started[1])
    assert halted(sidecars.started[1]), "it goes with its watchdog"
    once = SidecarStarter("exit 0")
    (tmp_path / "again").mkdir()
    with kept(tmp_path / "again", once.begin):
        until(lambda: len(once.started) == 1)
        time.sleep(2.0)
        assert len(once.started) == 1


def test_watchdog_that_cannot_start_the_sidecar_keeps_trying(tmp_path: Path) -> None:
    sidecars, failed = SidecarStarter("exec sleep 600"), list[float]()

    def begin() -> int:
        if not failed:
            failed.append(time.monotonic())
            raise BlockingIOError("no process is left")
        return sidecars.begin()

    with kept(tmp_path, begin) as status_page:
        until(lambda: len(sidecars.started) == 1)
        assert status_page.stop_reason is None


def test_sidecar_without_kernel_information_is_restarted(tmp_path: Path) -> None:
    sidecars = SidecarStarter("exec sleep 600")
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with kept(tmp_path, sidecars.begin):
            until(lambda: len(sidecars.started) == 1)
            os.kill(sidecars.started[0].pid, signal.SIGKILL)
            until(lambda: len(sidecars.started) == 2)
        assert halted(sidecars.started[1])
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_stop_file_stops_lending_and_so_does_a_silent_watchdog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "marks" / "stop"
    file.parent.mkdir()
    with kept(tmp_path, SidecarStarter("exec sleep 600").begin) as status_page:
        assert status_page.stop_reason is None
        for present in (True, False, True):
            began = time.monotonic()
            file.touch() if present else file.unlink()
            until(lambda: bool(status_page.stop_reason) is present)  # noqa: B023
            assert time.monotonic() - began < STOP_SECONDS
    file.unlink()
    monkeypatch.setattr(status_pages, "WATCHDOG_SILENT_SECONDS", 0.0)
    status_page.on_poll(stop=False)
    assert "silent" in str(status_page.stop_reason)
    assert StatusPage(None).stop_reason is None, "where there never was a watchdog, none is missed"


def test_unreadable_stop_file_stops_lending(tmp_path: Path) -> None:
    assert not stop_file_exists(tmp_path / "no" / "such")
    assert stop_file_exists(tmp_path / ("x" * 1000)), "a name that no file can have"


@pytest.mark.parametrize("holder", ["guest", "serving"])
def test_hung_guest_ends_its_engine_core_and_slow_serving_does_not(tmp_path: Path, holder: str) -> None:
    log = tmp_path / "log"
    with kept(tmp_path, SidecarStarter("exec sleep 600").begin, hang_seconds=1.0), log.open("wb") as output:
        ranks = [subprocess.Popen(["sh", "-c", "trap '' RTMIN+6; exec sleep 600"]) for _ in range(2)]
        other_process = subprocess.Popen(["sleep", "600"])  # has the id of an ended rank
        names = [*map(named, ranks), named(other_process, before=1)]
        core = subprocess.Popen(
            [sys.executable, "-c", CORE, str(tmp_path / "status_page"), holder, *names], cwd=ROOT, stderr=output
        )
        if holder == "guest":
            assert core.wait(60.0) == -signal.SIGKILL
            assert [rank.wait(60.0) for rank in ranks] == [-signal.SIGKILL] * 2
            assert "a_step_that_hangs" in log.read_text()
            assert "has had the thread" in (tmp_path / "marks" / "stop").read_text()
            ranks.clear()
        else:
            time.sleep(4.0)
            assert core.poll() is None and not (tmp_path / "marks").exists()
            ranks.append(core)
        for each in (other_process, *ranks):
            assert each.poll() is None
            each.kill()
            each.wait()


def test_halted_rank_time_does_not_count_as_guest_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine core waits for the rank, in the guest's turn."""
    looks: list[bool] = []

    class NotingHangDetector(HangDetector):
        def on_poll(self, since: int, *, halted: bool, now: float) -> bool:
            if since:
                looks.append(halted)
            return super().on_poll(since, halted=halted, now=now)

    monkeypatch.setattr(watchdogs, "HangDetector", NotingHangDetector)
    ranks = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    ranks[1].send_signal(signal.SIGSTOP)
    with kept(tmp_path, SidecarStarter("exec sleep 600").begin):
        command = [sys.executable, "-c", CORE, str(tmp_path / "status_page"), "guest", *map(named, ranks)]
        core = subprocess.Popen(command, cwd=ROOT)
        until(lambda: len(looks) > 2)
        assert set(looks) == {True}
        ranks[1].send_signal(signal.SIGCONT)
        until(lambda: looks[-1] is False)
        ranks[1].kill()
        ranks[1].wait()
        begun = len(looks)
        until(lambda: len(looks) > begun + 2)
        assert looks[-1] is False, "one that is gone is nobody's doing"
    for each in (core, ranks[0]):
        each.kill()
        each.wait()


@pytest.mark.parametrize("server", ["killed", "alive"])
def test_engine_core_that_outlives_its_server_ends_with_the_watchdog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str
) -> None:
    monkeypatch.setattr(watchdogs, "ORPHAN_SECONDS", 0.5)  # it does not exit by itself
    with kept(tmp_path, SidecarStarter("exec sleep 600").begin) as status_page:
        rank = subprocess.Popen(["sleep", "600"])  # a hung rank
        other_process = subprocess.Popen(["sleep", "600"])  # has the id of an ended rank
        names = [named(rank), named(other_process, before=1)]
        core = subprocess.Popen(
            [sys.executable, "-c", CORE, str(tmp_path / "status_page"), "serving", *names], cwd=ROOT
        )
        until(lambda: status_page.core == process_id_of(core.pid) and len(status_page.ranks) == len(names))
        time.sleep(2 * watchdogs.POLL_SECONDS)  # until the next check of the watchdog
        if server == "killed":
            monkeypatch.setattr(os, "getppid", lambda: 1)
    if server == "killed":
        assert core.wait(60.0) in (-signal.SIGTERM, -signal.SIGKILL)
        assert rank.wait(60.0) == -signal.SIGKILL
    for each in (other_process,) if server == "killed" else (other_process, core, rank):
        assert each.poll() is None
        each.kill()
        each.wait()


def test_engine_core_started_after_the_last_check_ends_with_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status_page, stop = StatusPage.create(tmp_path / "status_page"), Event()
    watchdog = Watchdog(status_page, tmp_path / "stop", SidecarStarter("exec sleep 600").begin, hang_seconds=60.0)
    core = subprocess.Popen([sys.executable, "-c", CORE, str(tmp_path / "status_page"), "serving"], cwd=ROOT)
    until(lambda: status_page.core is not None)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    stop.set()  # it never checks
    watchdog.run(stop)
    assert core.wait(60.0) in (-signal.SIGTERM, -signal.SIGKILL)


def test_engine_cores_do_not_overwrite_status_of_each_other(tmp_path: Path) -> None:
    page = StatusPage.create(tmp_path / "status_page")
    first = StatusPage.for_core(str(tmp_path / "status_page"))
    core = subprocess.Popen([sys.executable, "-c", CORE, str(tmp_path / "status_page"), "serving"], cwd=ROOT)
    until(lambda: page.core == process_id_of(core.pid))
    first.clear_core()
    assert page.core == process_id_of(core.pid)
    core.kill()
    core.wait()


def test_process_is_identified_by_id_and_start_time(tmp_path: Path) -> None:
    program = tmp_path / "a) Z 1 (b"  # its name, in the line of the kernel
    program.symlink_to("/bin/sleep")
    process = subprocess.Popen([str(program), "600"])
    until(lambda: program.name in Path(f"/proc/{process.pid}/stat").read_text())
    found = process_id_of(process.pid)
    assert found is not None and found != current_process_id() == process_id_of(os.getpid())
    assert ProcessId.unpack(found.packed) == found and found.packed < 2**64
    until(lambda: process_state(found) == "S")
    descriptor = open_pidfd(found)
    earlier = found._replace(started=found.started - 1)
    assert descriptor is not None and (open_pidfd(earlier), process_state(earlier)) == (None, None)
    process.kill()
    process.wait()
    os.close(descriptor)
    assert (open_pidfd(found), process_state(found), process_id_of(process.pid)) == (None, None, None)


LOOKS = st.tuples(st.integers(0, 3), st.booleans(), st.floats(0.01, 5.0))


@given(st.lists(LOOKS, max_size=80))
def test_hang_counts_only_observed_seconds_of_one_hold(looks: list[tuple[int, bool, float]]) -> None:
    """Each check: the observed hold, whether the process was halted, and the seconds since the last check."""
    hang, now, held, before = HangDetector(3.0), 0.0, 0.0, 0
    for since, halted, seconds in looks:
        now += seconds
        if since != before:
            held = 0.0
        elif since and not halted:
            held += min(seconds, MAX_GAP_SECONDS)
        before = since
        hangs = hang.on_poll(since, halted=halted, now=now)
        assert hangs == (since != 0 and held >= 3.0 - 1e-9) or abs(held - 3.0) < 1e-6
