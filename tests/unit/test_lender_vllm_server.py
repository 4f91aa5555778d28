"""Exit status and remains of a `rose lend` server; a script stands in for vLLM's."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest

from rose.workers.lender import sidecar
from rose.workers.lender.config import LendConfig
from rose.workers.lender.sidecar import FOLDER_PREFIX, make_folder
from rose.workers.lender.status_page import StatusPage
from rose.workers.lender.vllm import SETTING
from rose.workers.lender.vllm_server import CORE_LOST_STATUS
from tests.support.waiting import has_ended, until

ROOT = Path(__file__).parents[2]

SERVER = """
import multiprocessing, os, signal, sys, time
from multiprocessing import connection
from pathlib import Path
from rose.workers.lender.status_page import StatusPage

def core(page, does):
    pulse = StatusPage.for_core(page)
    if does in ("dies", "is cleared away"):
        os.kill(os.getpid(), signal.SIGKILL)
    if does == "leaves last":
        os.remove(page)
    if does.startswith("leaves"):
        pulse.clear_core()
        return
    time.sleep(600)

if __name__ == "__main__":
    page, does, status = sys.argv[1], sys.argv[2], int(sys.argv[3])
    process = multiprocessing.get_context("spawn").Process(target=core, args=(page, does))
    process.start()
    if does == "serves":
        while not StatusPage(Path(page)).core:
            time.sleep(0.01)
        process.terminate()
    if does == "is cleared away":
        connection.wait([process.sentinel])
        process.terminate()
    process.join()
    assert sys.argv[0].endswith("played.py") and __spec__.name == "played"
    sys.exit(status) if status else None
"""


@pytest.mark.parametrize(
    ("does", "status", "left_with"),
    [
        ("dies", 0, CORE_LOST_STATUS),
        ("is cleared away", 0, CORE_LOST_STATUS),
        ("leaves", 0, 0),
        ("leaves last", 0, 0),
        ("serves", 0, 0),
        ("dies", 1, 1),
    ],
)
def test_server_with_a_lost_core_reports_that_and_any_other_exits_as_vllm(
    tmp_path: Path, does: str, status: int, left_with: int
) -> None:
    """`serves` runs until stopped and ends its core itself. `is cleared away` dies, and gets a signal once its server
    learns of it, as with vLLM. `leaves last` runs after the watchdog has ended with its status page."""
    (tmp_path / "played.py").write_text(SERVER)
    page = tmp_path / "pulse"
    StatusPage.create(page)
    config = LendConfig(model_folder="", socket="", pulse=str(page))
    (tmp_path / "lend.json").write_bytes(msgspec.json.encode(config))
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            "from rose.workers.lender.vllm_server import main; main('played')",
            str(page),
            does,
            str(status),
        ],
        cwd=ROOT,
        env=os.environ | {SETTING: str(tmp_path / "lend.json"), "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=120.0,
    )
    assert ran.returncode == left_with, ran.stderr
    assert ("nobody had asked it to" in ran.stderr) == (left_with == CORE_LOST_STATUS)


def test_server_starts_without_its_lending_configuration(tmp_path: Path) -> None:
    (tmp_path / "played.py").write_text("print('serves')")
    ran = subprocess.run(
        [sys.executable, "-c", "from rose.workers.lender.vllm_server import main; main('played')"],
        cwd=ROOT,
        env=os.environ | {SETTING: str(tmp_path / "lend.json"), "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        timeout=120.0,
        check=True,
    )
    assert ran.stdout == b"serves\n"


LOADS = """
import signal, sys, time
def interrupt(*_):
    raise KeyboardInterrupt("terminated")

signal.signal(signal.SIGTERM, interrupt)
for _ in range(sys.getrecursionlimit()):  # as libraries do around what must not be interrupted
    signal.signal(signal.SIGTERM, signal.signal(signal.SIGTERM, signal.SIG_IGN))
print("loads", flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    sys.exit("it goes on")
"""


def test_server_stops_when_asked_during_loading(tmp_path: Path) -> None:
    """vLLM's signal handler raises an exception that is caught where it waits for its engine core."""
    (tmp_path / "played.py").write_text(LOADS)
    with subprocess.Popen(
        [sys.executable, "-c", "from rose.workers.lender.vllm_server import main; main('played')"],
        cwd=ROOT,
        env=os.environ | {SETTING: str(tmp_path / "lend.json"), "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        stdout=subprocess.PIPE,
    ) as server:
        assert server.stdout is not None and server.stdout.readline() == b"loads\n"
        server.terminate()
    assert server.returncode == 0


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder in which servers create their folders."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


HOLDER = """
import os, sys, tempfile, time
tempfile.tempdir = sys.argv[1]
from rose.workers.lender.sidecar import make_folder
print(make_folder(), flush=True)
child = os.fork()
if child:
    print(child, flush=True)
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"])
time.sleep(600)
"""


def test_folder_of_killed_processes_is_removed_by_the_next_start(folders: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folders)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    held, child = Path(holder.stdout.readline().strip()), int(holder.stdout.readline())
    (held / "socket").touch()
    make_folder()
    assert held.exists()
    os.kill(child, signal.SIGKILL)
    until(lambda: has_ended(child))
    make_folder()
    assert held.exists(), "what the server has become has it still"
    holder.kill()
    holder.wait()
    make_folder()
    assert not held.exists()


def test_foreign_folder_or_file_is_left_alone(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folders / f"{FOLDER_PREFIX}file").touch()
    elsewhere = folders / "elsewhere"
    elsewhere.mkdir()
    (folders / f"{FOLDER_PREFIX}link").symlink_to(elsewhere)
    theirs = folders / f"{FOLDER_PREFIX}theirs"
    theirs.mkdir()
    make_folder()
    assert not theirs.exists() and elsewhere.exists() and (folders / f"{FOLDER_PREFIX}file").exists()
    theirs.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    make_folder()
    assert theirs.exists()


def test_concurrent_starts_never_share_or_lose_a_folder(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other start finds a folder between its creation and its lock, and takes it for an abandoned folder."""
    make, others = tempfile.mkdtemp, list[Path]()

    def found_at_once(*, prefix: str) -> str:
        folder = make(prefix=prefix)
        if not others:
            others.append(Path(folder))
            sidecar._remove_abandoned()
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", found_at_once)
    mine = make_folder()
    assert mine.exists() and mine not in others and not others[0].exists()
