"""The server of `rose lend`: vLLM's own program, and an exit status that tells when its engine core was lost.

Keeps true: flags, signals and log are vLLM's. So is the status, but where the engine core ended and nobody had
asked for that: vLLM leaves with 0 then, and whoever starts servers again after a failure would leave this one down.
And a server that is asked to stop while it loads stops: vLLM's own handler raises KeyboardInterrupt then, which vLLM
itself drops as long as it waits for its engine core (`zmq_socket_ctx`, 0.32), and goes on.
"""

import os
import runpy
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rose.schemas.errors import UsageError
from rose.workers.lender.config import read_config
from rose.workers.lender.vllm import SETTING
from rose.workers.lender.watchdog_page import StatusPage

VLLM = "vllm.entrypoints.openai.api_server"

CORE_LOST_STATUS = 70
"""What sysexits.h calls an internal software error; vLLM itself uses 0, 1 and 2."""

EXITING = 0x4
"""The kernel's flag (PF_EXITING) of a process that is on its way out."""


def main(program: str = VLLM) -> None:
    """Run vLLM's program, under its own name: its processes look for it by that."""
    page, ended = _status_page(), _signalled_processes()
    _exit_on_sigterm()
    runpy.run_module(program, run_name="__main__", alter_sys=True)
    core = page.core
    if core is not None and core.pid not in ended:
        sys.stderr.write(f"rose: engine core {core.pid} ended, and nobody had asked it to\n")
        sys.exit(CORE_LOST_STATUS)


@dataclass(frozen=True, slots=True)
class _SigtermHandler:
    """A handler of SIGTERM; where the one that it stands for raises KeyboardInterrupt it raises SystemExit."""

    handler: Callable[[int, FrameType | None], object]

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self.handler(number, frame)
        except KeyboardInterrupt:
            sys.exit(0)


def _exit_on_sigterm() -> None:
    """From now on a handler of SIGTERM that raises KeyboardInterrupt, which libraries catch, raises SystemExit."""
    install = signal.signal

    def signal_(signalnum: int, handler: Any) -> Any:
        ends = (
            signalnum == signal.SIGTERM and callable(handler) and not isinstance(handler, _SigtermHandler)
        )  # one put back is
        return install(signalnum, _SigtermHandler(handler) if ends else handler)

    signal.signal = signal_


def _status_page() -> StatusPage:
    """What the engine core shares; an empty one where the watchdog took it along: serving begins all the same."""
    try:
        return StatusPage(Path(read_config(Path(os.environ[SETTING])).pulse))
    except (UsageError, OSError):
        return StatusPage(None)


def _signalled_processes() -> set[int]:
    """The processes that this one sends signals, from now on: a server that is asked to stop kills its engine core.

    One that has ended by itself is sent a signal too, when vLLM cleans up after it.
    """
    ended: set[int] = set()

    def note(event: str, arguments: tuple[int, ...]) -> None:
        if event == "os.kill" and arguments[1] and _is_running(arguments[0]):
            ended.add(arguments[0])

    sys.addaudithook(note)
    return ended


def _is_running(process: int) -> bool:
    """Whether it has not begun to end: its pipes are closed, which is how vLLM hears of it, before it can be reaped."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    state, *_, flags = stat.rpartition(")")[2].split()[:7]
    return state not in "ZX" and not int(flags) & EXITING


if __name__ == "__main__":
    main()
