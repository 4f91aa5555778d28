"""The worker and the code of its environments: the worker starts safely, its log stays whole, and no process or memory
outlives it."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import structlog

from rose.schemas.errors import UsageError
from rose.topics.errors import BrokerUnreachable
from rose.topics.health import HEALTH
from rose.topics.settings import BusSettings
from rose.workers.environments import runner_pool as stage_module
from rose.workers.environments.config import EnvironmentConfig
from rose.workers.environments.jobs import EnvironmentFailure
from rose.workers.environments.main import run_environment_worker
from rose.workers.environments.registry import UnknownEnvironment
from tests.support.environment_fixtures import WAIT_SECONDS, answers
from tests.support.misbehaving_environment import FOLDER
from tests.support.runner_processes import AWAY, processes, step
from tests.support.scripted_executors import model_folder
from tests.support.waiting import until


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return model_folder(tmp_path)


def alive(folder: Path) -> set[int]:
    """Return other processes with the folder of this test in their environment."""
    mark = f"{FOLDER}={folder}".encode()
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes().split(b"\0") and int(path.parent.name) != os.getpid():
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


WORKER = """
import sys
from pathlib import Path
sys.path[:] = {path}
from tests.support.runner_processes import processes, step
from tests.support.environment_fixtures import answers
with processes(Path({folder!r})) as stage:
    answers(stage, [step("a", "{first}")])
    print("ready", flush=True)
    {then}
"""


def test_shutdown_does_not_wait_for_an_importing_process(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_module, "CLOSE_SECONDS", 3600.0)
    (tmp_path / "away.py").write_text(AWAY)
    (tmp_path / "hangs").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with processes(folder) as stage:
        stage.warm_up("away:Wild")
        until(lambda: (tmp_path / "begun").exists())
    assert not alive(folder)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "blocked and killed", "closed"])
def test_child_processes_of_an_environment_end_with_the_worker(folder: Path, how: str) -> None:
    deed = "hold" if how.startswith("blocked") else "wait"
    waits = f'stage.start([step("b", "{deed}")]); stage.results(3600.0)'
    then = "pass" if how == "closed" else waits
    program = WORKER.format(path=sys.path, folder=str(folder), first="children", then=then)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None and worker.stdout.readline() == b"ready\n"
        if how != "closed":
            until(lambda: len(alive(folder)) >= 7)  # the worker, guard and process, and four sleepers
            worker.kill()
    until(lambda: not alive(folder))


@pytest.mark.slow
def test_shared_memory_of_an_ended_process_is_released(folder: Path) -> None:
    with processes(folder) as stage:
        failed = answers(stage, [step("a", "memory and end")])["a"]
        assert isinstance(failed, EnvironmentFailure) and "ended with status 3" in failed.failure
    until(lambda: not alive(folder))
    assert not (Path("/dev/shm") / (folder / "memory").read_text()).exists()


@pytest.mark.slow
def test_child_processes_of_an_environment_get_sigterm_before_sigkill(folder: Path) -> None:
    with processes(folder) as stage:
        answers(stage, [step("a", "tidy child")])
    until(lambda: not alive(folder))
    assert (folder / "tidied").exists()


def test_pipe_flags_set_by_an_environment_do_not_reach_the_worker(folder: Path) -> None:
    """The worker writes its log to the pipe, and would end at a full pipe."""
    program = WORKER.format(path=sys.path, folder=str(folder), first="non-blocking", then="pass")
    reads, writes = os.pipe()
    try:
        subprocess.run([sys.executable, "-c", program], stdout=writes, stderr=writes, timeout=WAIT_SECONDS, check=True)
        assert os.get_blocking(writes)
    finally:
        os.close(reads)
        os.close(writes)


PRINTED = ["StepResult", "EnvironmentFailure", "StepResult"]


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, True])
def test_environment_can_print_after_the_log_reader_has_gone(folder: Path, tmp_path: Path, named: bool) -> None:
    """This also holds for a process that starts later."""
    jobs = (("a", "print"), ("b", "end"), ("c", "print"))
    then = f"sys.stdin.read(); again = [answers(stage, [step(*job)]) for job in {jobs}]"
    program = WORKER.format(path=sys.path, folder=str(folder), first="print", then=then)
    program += "    assert [type(each).__name__ for found in again for each in found.values()] == " + repr(PRINTED)
    if named:
        os.mkfifo(tmp_path / "log")
        reads = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
        writes = os.open(tmp_path / "log", os.O_WRONLY)
    else:
        reads, writes = os.pipe()
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=writes) as worker:
        os.close(writes)
        assert worker.stdout is not None and worker.stdout.readline() == b"ready\n"
        os.close(reads)
        worker.communicate(timeout=WAIT_SECONDS)
    assert worker.returncode == 0


LIBRARIES = ("numpy", "tokenizers", "queue", "selectors", "prometheus_client")


def test_user_file_never_shadows_a_module_that_rose_imports(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    for name in LIBRARIES:
        (tmp_path / "own" / f"{name}.py").write_text("raise ImportError('it is the user's')\n")
    (tmp_path / "own" / "plain.py").write_text("from tests.support.misbehaving_environment import Wild\n")
    config = EnvironmentConfig(model_folder=folder, environments=("plain:Wild",), import_paths=(tmp_path / "own",))
    before = list(sys.path)
    with pytest.raises(BrokerUnreachable):  # raised once the environment is loaded
        run_environment_worker(BusSettings("127.0.0.1:9"), config, "w0", threading.Event())
    assert sys.path == before, "the worker itself imports nothing of the user's"


@pytest.mark.parametrize(
    ("code", "isolation", "says"),
    [
        ("import sys; sys.exit()", "thread", "cannot import ends_early (SystemExit"),
        ("import sys; sys.exit()", "process", "cannot import ends_early (SystemExit"),
        ("raise KeyboardInterrupt", "process", "raises KeyboardInterrupt"),
        ("raise KeyboardInterrupt", "thread", "cannot import ends_early (KeyboardInterrupt"),
        ("raise type('Panic', (BaseException,), {})('boom')", "thread", "cannot import ends_early (Panic: boom)"),
        ("raise type('Panic', (BaseException,), {})('boom')", "process", "cannot import ends_early (Panic: boom)"),
        ("import os; os._exit(0)", "process", "ends the process, which ended with status 0"),
        ("import os; os.abort()", "auto", "ends the process, which was ended by SIGABRT"),
    ],
)
def test_module_that_exits_at_import_is_refused_at_worker_start(
    folder: Path, tmp_path: Path, code: str, isolation: Any, says: str
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "ends_early.py").write_text(code)
    name = "ends_early:Any"
    config = EnvironmentConfig(
        model_folder=folder, environments=(name,), import_paths=(tmp_path / "own",), isolation=isolation
    )
    before, handler = (
        list(sys.path),
        signal.signal(signal.SIGINT, lambda *_: None),
    )  # the handler of a role, which stops in order
    try:
        with pytest.raises(UnknownEnvironment) as refused, structlog.testing.capture_logs() as logs:
            run_environment_worker(BusSettings("127.0.0.1:9"), config, "w0", threading.Event())
    finally:
        sys.path[:] = before
        signal.signal(signal.SIGINT, handler)
    assert repr(name) in str(refused.value) and says in str(refused.value)
    assert [each["names"] for each in logs if each["event"] == "environments_loading"] == [[name]]
    assert HEALTH.status.sentence == f"loads {name}" and not HEALTH.status.ready


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (None, "cannot be run"),
        (
            "echo \"No module named 'rose'\" >&2; exit 1",
            "cannot import ROSE (No module named 'rose'): install rose-rollouts",
        ),
        ("echo 0.0.1", "has rose-rollouts 0.0.1, and the worker"),
    ],
    ids=["missing", "without rose", "other version"],
)
def test_interpreter_that_cannot_run_environments_is_refused_at_worker_start(
    folder: Path, tmp_path: Path, script: str | None, says: str
) -> None:
    python = tmp_path / "python"
    if script is not None:
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
    config = EnvironmentConfig(model_folder=folder, environments=("plain:Wild",), python=python)
    with pytest.raises(UsageError, match=r"environment\.python") as refused:
        run_environment_worker(BusSettings("127.0.0.1:9"), config, "w0", threading.Event())
    assert says in str(refused.value)


@pytest.mark.slow
def test_environment_runs_with_the_interpreter_of_the_configuration(folder: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexport OWN_INTERPRETER=1\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "asks.py").write_text(
        "import os\nassert os.environ['OWN_INTERPRETER']\nfrom tests.support.misbehaving_environment import Wild\n"
    )
    root = Path(__file__).parents[2]
    config = EnvironmentConfig(
        model_folder=folder, environments=("asks:Wild",), import_paths=(tmp_path, root), python=python
    )
    with pytest.raises(BrokerUnreachable):  # raised once the environment is loaded
        run_environment_worker(BusSettings("127.0.0.1:9"), config, "w0", threading.Event())


ENDS = """
import sys, threading, time
from pathlib import Path
sys.path[:] = {path}
from rose.workers.environments import main
from rose.workers.environments.config import EnvironmentConfig
from rose.topics.settings import BusSettings
main.EXIT_SECONDS = 0.1
config = EnvironmentConfig(
    model_folder=Path({folder!r}), environments=("leaves_a_thread:Wild", "nowhere:Nothing"), isolation="thread"
)
try:
    main.run_environment_worker(BusSettings("127.0.0.1:9"), config, "w0", threading.Event())
except main.UnknownEnvironment:
    print("refused", flush=True)
"""


def test_worker_exits_despite_threads_left_by_environments(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "leaves_a_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(3600,)).start()\n"
        "from tests.support.misbehaving_environment import Wild\n"
    )
    program = ENDS.format(path=[str(tmp_path), *sys.path], folder=str(folder))
    ended = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=WAIT_SECONDS, check=False)
    assert ended.returncode == 1 and ended.stdout.endswith(b"refused\n")
