"""The server of `rose lend`: vLLM's own program, with an exit status that tells when the engine core was lost.

Keeps true
- Flags, signals and log are those of vLLM.
- The exit status is that of vLLM, except when the engine core ended without a request: vLLM exits with 0 then, and a
  supervisor that restarts failed servers would leave this server down.
- A server that receives SIGTERM while it loads stops. vLLM's own handler raises KeyboardInterrupt, which vLLM drops
  while it waits for its engine core (`zmq_socket_ctx`, 0.32), and the server would continue.
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
from rose.workers.lender.status_page import StatusPage
from rose.workers.lender.vllm import SETTING

VLLM = "vllm.entrypoints.openai.api_server"

CORE_LOST_STATUS = 70
"""EX_SOFTWARE of sysexits.h, an internal software error; vLLM itself uses 0, 1 and 2."""

EXITING = 0x4
"""The kernel's flag PF_EXITING of a process that is exiting."""


def main(program: str = VLLM) -> None:
    """Run vLLM's program as `__main__`, because vLLM's processes look for it by this name.

    Exits with CORE_LOST_STATUS if the engine core ended without a request.
    """
    page, ended = _status_page(), _signalled_processes()
    _exit_on_sigterm()
    runpy.run_module(program, run_name="__main__", alter_sys=True)
    core = page.core
    if core is not None and core.pid not in ended:
        sys.stderr.write(f"rose: engine core {core.pid} ended, and nobody had asked it to\n")
        sys.exit(CORE_LOST_STATUS)


@dataclass(frozen=True, slots=True)
class _SigtermHandler:
    """A handler of SIGTERM that calls `handler`, and raises SystemExit if `handler` raises KeyboardInterrupt."""

    handler: Callable[[int, FrameType | None], object]

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self.handler(number, frame)
        except KeyboardInterrupt:
            sys.exit(0)


def _exit_on_sigterm() -> None:
    """Wrap SIGTERM handlers that are installed from now on in `_SigtermHandler`: libraries catch KeyboardInterrupt."""
    install = signal.signal

    def signal_(signalnum: int, handler: Any) -> Any:
        ends = (
            signalnum == signal.SIGTERM and callable(handler) and not isinstance(handler, _SigtermHandler)
        )  # a restored handler is wrapped already
        return install(signalnum, _SigtermHandler(handler) if ends else handler)

    signal.signal = signal_


def _status_page() -> StatusPage:
    """Return the status page, or an empty page if the watchdog has removed the file: serving starts without it."""
    try:
        return StatusPage(Path(read_config(Path(os.environ[SETTING])).pulse))
    except (UsageError, OSError):
        return StatusPage(None)


def _signalled_processes() -> set[int]:
    """Return a set to which each process is added that this process signals from now on while it runs.

    A server that is asked to stop signals its engine core. vLLM's clean-up also signals an engine core that has ended
    by itself, which is not added.
    """
    ended: set[int] = set()

    def note(event: str, arguments: tuple[int, ...]) -> None:
        if event == "os.kill" and arguments[1] and _is_running(arguments[0]):
            ended.add(arguments[0])

    sys.addaudithook(note)
    return ended


def _is_running(process: int) -> bool:
    """Whether the process has not begun to exit.

    vLLM notices the end of a process by its closed pipes, which the kernel closes before the process can be reaped.
    """
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    state, *_, flags = stat.rpartition(")")[2].split()[:7]
    return state not in "ZX" and not int(flags) & EXITING


if __name__ == "__main__":
    main()
