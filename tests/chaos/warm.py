"""Roles as processes that need not import anything: forked from one that has imported what an engine and torch want.

Keeps true
- A forked role runs what `python -m pipeline.command.main` runs, in a process, session and log of its own.
- It ends when the process from which roles are forked ends, and that one with whoever started it.

An executor's start is 14 s of imports and 1 s of work: three of them, and those that a storm kills, would want more of
two cores than the storm itself.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from topics.processes import end_with

IMPORTED = (
    "pipeline.command.main",
    "pipeline.command.roles",
    "workers.environments.main",
    "workers.executor.main",
    "workers.executor.loop",
    "workers.executor.vllm.engine",
    "workers.trainer.loop",
    "workers.weights.anchor_store",
    "workers.weights.receive",
    "workers.weights.signing",
)
"""What the roles import when they run."""


class Forked:
    """A role that was forked; what a storm does to a `subprocess.Popen`, it can do to this."""

    def __init__(self, arguments: Sequence[str], *, folder: Path, log: Path) -> None:
        """Run `rose` with these arguments in a folder; what it prints is appended to the log."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, *IMPORTED])
        self._process = context.Process(target=_run, args=(tuple(arguments), folder, log))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._process.exitcode

    def wait(self) -> None:
        """Until it has ended."""
        self._process.join()

    def send_signal(self, number: signal.Signals) -> None:
        """To the role, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _run(arguments: tuple[str, ...], folder: Path, log: Path) -> None:
    end_with(os.getppid(), signal.SIGKILL)()
    os.setsid()
    os.chdir(folder)
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for inherited, own in ((0, nothing), (1, output), (2, output)):
        os.dup2(own, inherited)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    for name in [name for name in os.environ if name.startswith("ROSE_")]:
        del os.environ[name]
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.argv = ["rose", *arguments]

    from pipeline.command.main import main

    main()
