"""The processes that run tests side by side, forked from one that has imported the tests and what they want.

Keeps true
- A test finds in its process what it would find in one that was started: its own signals, environment, standard input.
- Where one process runs all tests (`-n 0`) there is nothing of this.

vLLM alone takes ten seconds of a core to import, the tests themselves as many, and every process that runs tests
collects all of them.

    forks = Forks(["tests"], {})
    config.option.tx = [forks.gateway] * 6  # of pytest-xdist
"""

import gc
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

from rose.topics.processes import die_with_parent

WANTED = (
    "rose.workers.executor.vllm.process_env",
    "rose.pipeline.cli.run_commands",
    "rose.pipeline.cli.roles",
    "rose.workers.environments.main",
    "rose.workers.trainer.main",
    "rose.workers.trainer.loop",
    "rose.workers.executor.vllm.engine",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
)
"""Modules that many tests import, and every slow import."""

MOST_BYTES = 1 << 16
"""Size limit of the code that a fork runs, in bytes."""

ASK = """
import socket, sys
place, *_, code = sys.argv[1:]
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
    line.connect(place)
    socket.send_fds(line, [code.encode()], [0, 1, 2])
    line.recv(1)
"""
"""execnet starts this program as a Python with `-u -c CODE`. A fork runs the code on the streams of this program."""


class Fork:
    """A forked process."""

    def __init__(self, place: str, code: str, streams: Sequence[int]) -> None:
        """`streams` are its standard input, output and error."""
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.connect(place)
        socket.send_fds(self._line, [code.encode()], list(streams))

    def wait(self) -> None:
        """Wait until the process has ended."""
        with self._line:
            self._line.recv(1)


class Forks:
    """The source of the forks."""

    def __init__(self, paths: Sequence[str], environment: Mapping[str, str]) -> None:
        """`paths` are the files and folders of the tests; `environment` has variables added to those of this
        process."""
        self._folder = Path(tempfile.mkdtemp(prefix="rose-tests-"))
        self.place = str(self._folder / "forks")
        """Socket path for `Fork`."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.bind(self.place)
            line.listen()
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import fork_all; fork_all({line.fileno()}, {list(paths)})"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(line.fileno(),),
                env=os.environ | environment,
                preexec_fn=die_with_parent(os.getpid(), signal.SIGKILL),
            )
        self.gateway = f"popen//python={shlex.join((sys.executable, '-S', '-c', ASK, self.place))}"
        """Gateway specification for execnet."""

    def close(self) -> None:
        """End the source. Forked processes continue."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder)


def fork_all(number: int, paths: Sequence[str]) -> None:
    """Import the modules, then fork for each connection. The code after the loop runs in the forks."""
    for module in WANTED:
        with suppress(Exception):  # the next import reports the error
            import_module(module)
    pytest.main(["--collect-only", "-qq", *paths])  # the test processes report tests that cannot be imported
    if threads := [f.read_text().strip() for f in Path("/proc/self/task").glob("*/comm")][1:]:
        sys.exit(f"importing the tests started threads that no fork would have ({threads}): import that in the tests")
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # exit statuses are not collected
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=number) as line:
        while True:
            connection, _ = line.accept()
            code, streams, _, _ = socket.recv_fds(connection, MOST_BYTES, 3)
            if os.fork() == 0:
                break
            for descriptor in (connection.detach(), *streams):
                os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for standard, stream in enumerate(streams):
        os.dup2(stream, standard)
        os.close(stream)
    if "numpy" in sys.modules:
        # otherwise all forks would draw the same numbers; `random` reseeds by itself
        sys.modules["numpy"].random.seed()
    exec(code, vars(sys.modules["__main__"]))  # noqa: S102
