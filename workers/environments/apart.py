"""A runner in a process of its own, as the worker sees it.

Keeps true
- Nothing here waits for the process: threads read what it says and write what it is to do.
- However it ends, `ended` says so once everything that it has said was taken in, and nothing that it started is left.
- What it says is held to the form of an answer: a process that says anything else is ended.
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

from workers.environments.jobs import ANSWERS, NOBODY, Answering, Job, job_fields, taken_as
from workers.environments.serving import MOST_BYTES, Kind
from workers.environments.signs import BEATS, LIVE, RUNNING, SIGNS_BYTES, STUCK, signs_in

SPARE_SECONDS = 2.0
"""That a process may take to end once it is killed."""


class Apart:
    """Jobs of one kind of environment run in a process of their own."""

    killable = True

    def __init__(self, kind: Kind, answer: Answering) -> None:
        """`answer` is called in a thread of its own."""
        self.ready = False
        self.ended = ""
        self.unfit = ""
        """Why there is no such environment, where the process could not make any."""
        self._change = ""
        self._answer = answer
        self._jobs: dict[int, Job] = {}
        self._numbers = itertools.count()
        self._leaving = False
        ours, its = socket.socketpair()
        shared = os.memfd_create("environment-signs")
        os.ftruncate(shared, SIGNS_BYTES)
        self._signs = signs_in(os.dup(shared))
        handed = its.fileno(), shared
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from workers.environments.child import main; main{handed}"],
                stdin=subprocess.PIPE,
                pass_fds=handed,
                start_new_session=True,  # Ctrl-C is for the command
            )
        finally:
            its.close()
            os.close(shared)
        self._line = Connection(ours.detach())
        self._to_say: queue.Queue[bytes | None] = queue.Queue()
        self._to_say.put(msgspec.msgpack.encode(kind))
        self._reader = Thread(target=self._listen, name="environment-answers", daemon=True)
        try:
            self._reader.start()
            Thread(target=self._write, name="environment-jobs", daemon=True).start()
        except RuntimeError:
            self.abandon()
            raise

    def start(self, jobs: list[Job]) -> None:
        """Begin with these jobs."""
        numbered = {next(self._numbers): job for job in jobs}
        self._jobs.update(numbered)
        self._say("start", [job_fields(job, number) for number, job in numbered.items()])

    def let_go(self, trajectory_ids: list[str]) -> None:
        """Close the environments of trajectories that have ended."""
        self._say("let_go", trajectory_ids)

    def withdraw(self, trajectory_ids: list[str]) -> None:
        """Answer no job of these that was started, and hold nothing of them."""
        for number in [number for number, job in list(self._jobs.items()) if job.trajectory_id in trajectory_ids]:
            self._jobs.pop(number, None)
        self._say("withdraw", trajectory_ids)

    def new_life(self, life: int) -> None:
        """Close all environments: what was held of earlier lives does not count any more."""
        self._jobs.clear()
        self._say("new_life", life)

    @property
    def beats(self) -> int:
        """Grows while nothing blocks it."""
        return self._signs[BEATS]

    @property
    def live(self) -> int:
        """Environments that are held or stepped."""
        return self._signs[LIVE]

    @property
    def threads_stuck(self) -> int:
        """Threads of its pool in which a call goes on that was given up."""
        return self._signs[STUCK]

    def running(self) -> Job | None:
        """The job whose own code the process is in, or was in when it ended."""
        mark = self._signs[RUNNING]
        return None if mark == 0 else self._jobs.get(mark - 1, NOBODY)

    def leave(self) -> None:
        """Have it close everything and end."""
        if not self._leaving:
            self._leaving = True
            self._say("leave", None)

    def abandon(self) -> None:
        """Kill it, with whatever it has started."""
        self._leaving = True
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()

    def close(self, seconds: float) -> None:
        """Leave, wait so long for the end, then kill it. One that has not begun has nothing to close."""
        self.leave()
        self._reader.join(seconds if self.ready else 0.0)
        self.abandon()
        self._reader.join(SPARE_SECONDS)

    def _say(self, what: str, detail: object) -> None:
        self._to_say.put(msgspec.msgpack.encode((what, detail)))

    def _write(self) -> None:
        with suppress(OSError):  # it is gone, as `_listen` will find
            while (message := self._to_say.get()) is not None:
                self._line.send_bytes(message)

    def _listen(self) -> None:
        lied = ""
        try:
            while True:
                self._take(*msgspec.msgpack.decode(self._line.recv_bytes(MOST_BYTES)))
        except (EOFError, ConnectionError):
            pass
        except Exception as error:  # noqa: BLE001 - of a process that an environment has meddled with
            lied = f" wrote to ROSE's own line ({type(error).__name__})"
            self.abandon()
        status = self._process.wait()
        self.abandon()
        self._to_say.put(None)
        self._line.close()
        self.ended = lied or self._change or _ending(status)

    def _take(self, what: str, *said: Any) -> None:
        if what == "answer":
            number, name, fields = said
            answer = taken_as(ANSWERS, name, fields)
            job = self._jobs.pop(number, None)
            if job is not None:
                self._answer(job, answer)
        elif what == "unfit":
            self.unfit = str(said[0])
        elif what == "changed":
            self._change = f" is replaced: an environment {said[0]}"
        else:
            self.ready = True


def _ending(status: int) -> str:
    if status >= 0:
        return f" ended with status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    return f" was ended by {name}" + (", as when memory runs out" if name == "SIGKILL" else "")
