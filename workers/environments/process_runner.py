"""A runner in a process of its own, as the worker sees it.

Keeps true
- No caller waits for the process: threads read its answers and write its jobs.
- However the process ends, `exit_reason` is set once all its answers were read and none of its child processes is
  left.
- Messages are validated: a process that sends an invalid message is killed.
"""

import itertools
import os
import queue
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

import msgspec

from rose.workers.environments.jobs import (
    BEATS,
    COUNTERS_BYTES,
    LIVE,
    NO_JOB,
    RESULTS,
    RUNNING,
    STUCK,
    Job,
    ResultCallback,
    decode_as,
    job_fields,
    map_counters,
)
from rose.workers.environments.runner_server import MAX_MESSAGE_BYTES, ProcessSetup

SPARE_SECONDS = 2.0
"""Time that a killed process may take to end."""


class ProcessRunner:
    """Runs the jobs of one kind of environment in a process of its own."""

    killable = True

    def __init__(self, kind: ProcessSetup, answer: ResultCallback, *, python: str = sys.executable) -> None:
        """Start the process with this interpreter.

        `answer` is called on a thread of its own.
        """
        self.ready = False
        self.exit_reason: str | None = None
        self.exit_unasked = False
        """Whether the process ended although the worker had not asked it to; known with `exit_reason`."""
        self.load_error: str | None = None
        """Why the process could not begin, as the process reported it; None otherwise."""
        self._reported_reason = ""
        """Reason for the end of the process, as the process reported it."""
        self._answer = answer
        self._jobs: dict[int, Job] = {}
        self._numbers = itertools.count()
        self._leaving = False
        ours, remote = socket.socketpair()
        shared = os.memfd_create("environment-signs")
        os.ftruncate(shared, COUNTERS_BYTES)
        self._signs = map_counters(os.dup(shared))
        handed = remote.fileno(), shared
        try:
            self._process = subprocess.Popen(
                [
                    python,
                    "-P",
                    "-c",
                    f"from rose.workers.environments.runner_process import main; main{handed}",
                ],
                stdin=subprocess.PIPE,
                pass_fds=handed,
                start_new_session=True,  # Ctrl-C is for the command
            )
        finally:
            remote.close()
            os.close(shared)
        self._line = Connection(ours.detach())
        self._to_say: queue.Queue[bytes | None] = queue.Queue()
        self._to_say.put(msgspec.msgpack.encode(kind))
        self._reader = Thread(target=self._receive, name="environment-answers", daemon=True)
        try:
            self._reader.start()
            Thread(target=self._write, name="environment-jobs", daemon=True).start()
        except RuntimeError:
            self.kill()
            raise

    def start(self, jobs: list[Job]) -> None:
        """Start these jobs."""
        numbered = {next(self._numbers): job for job in jobs}
        self._jobs.update(numbered)
        self._send("start", [job_fields(job, number) for number, job in numbered.items()])

    def release(self, trajectory_ids: list[str]) -> None:
        """Close the environments of ended trajectories."""
        self._send("release", trajectory_ids)

    def cancel(self, trajectory_ids: list[str]) -> None:
        """Cancel these jobs without an answer, and release their environments."""
        for number in [number for number, job in list(self._jobs.items()) if job.trajectory_id in trajectory_ids]:
            self._jobs.pop(number, None)
        self._send("cancel", trajectory_ids)

    def begin_generation(self, generation: int) -> None:
        """Close all environments of earlier generations."""
        self._jobs.clear()
        self._send("begin_generation", generation)

    @property
    def guard(self) -> int:
        """Process id of the guard, the parent of the environments' process."""
        return self._process.pid

    @property
    def heartbeats(self) -> int:
        """Counter that grows while nothing blocks the process."""
        return self._signs[BEATS]

    @property
    def live(self) -> int:
        """Number of environments that are held or stepped."""
        return self._signs[LIVE]

    @property
    def threads_stuck(self) -> int:
        """Number of pool threads in which an abandoned call still runs."""
        return self._signs[STUCK]

    def current_job(self) -> Job | None:
        """Return the job whose own code the process runs, or ran when it ended."""
        mark = self._signs[RUNNING]
        return None if mark == 0 else self._jobs.get(mark - 1, NO_JOB)

    def stop(self) -> None:
        """Have the process close everything and end."""
        if not self._leaving:
            self._leaving = True
            self._send("leave", None)

    def kill(self) -> None:
        """Kill the process and everything that it has started."""
        self._leaving = True
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()

    def close(self, seconds: float) -> None:
        """Stop the process, wait up to `seconds`, then kill it. A process that has not begun has nothing to close."""
        self.stop()
        self._reader.join(seconds if self.ready else 0.0)
        self.kill()
        self._reader.join(SPARE_SECONDS)

    def _send(self, what: str, detail: object) -> None:
        self._to_say.put(msgspec.msgpack.encode((what, detail)))

    def _write(self) -> None:
        with suppress(OSError):  # the process is gone, which `_receive` handles
            while (message := self._to_say.get()) is not None:
                self._line.send_bytes(message)

    def _receive(self) -> None:
        intrusion = ""
        try:
            while True:
                self._on_message(*msgspec.msgpack.decode(self._line.recv_bytes(MAX_MESSAGE_BYTES)))
        except (EOFError, ConnectionError):
            pass
        except Exception as error:  # noqa: BLE001 - an environment may have written to the connection
            intrusion = f" wrote to ROSE's own line ({type(error).__name__})"
            self.kill()
        status = self._process.wait()
        self.exit_unasked = bool(intrusion) or not self._leaving
        self.kill()
        self._to_say.put(None)
        self._line.close()
        self.exit_reason = intrusion or self._reported_reason or _ending(status)

    def _on_message(self, kind: str, *fields: Any) -> None:
        if kind == "answer":
            number, name, fields = fields
            answer = decode_as(RESULTS, name, fields)
            job = self._jobs.pop(number, None)
            if job is not None:
                self._answer(job, answer)
        elif kind == "unfit":
            self.load_error = str(fields[0])
        elif kind == "changed":
            self._reported_reason = f" is replaced: an environment {fields[0]}"
        elif kind == "lost":
            self._reported_reason = str(fields[0])
        else:
            self.ready = True


def _ending(status: int) -> str:
    if status >= 0:
        return f" ended with status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    return f" was ended by {name}" + (", as when memory runs out" if name == "SIGKILL" else "")
