"""Process behaviour of every role."""

import signal
import subprocess
import sys

import pytest

WAITS = """
import time
from rose.pipeline.process_setup import dump_stacks_on_crash

def hangs():
    print("there", flush=True)
    time.sleep(600)

dump_stacks_on_crash()
hangs()
"""

ASKED_AMID_A_WAIT = """
import os, signal
from rose.pipeline.process_setup import stop_on_signals

stop = stop_on_signals()
with stop._cond:  # as at the beginning and end of stop.wait()
    os.kill(os.getpid(), signal.SIGTERM)
stop.wait()
print("stops")
"""

TOLD_OF_ITS_TERMINAL = """
import os, signal
{before}
from rose.pipeline.process_setup import stop_on_signals

stop = stop_on_signals()
os.kill(os.getpid(), signal.SIGHUP)
print("stops" if stop.wait({seconds}) else "goes on")
"""
NOHUP = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"
WAIT_SECONDS = 60.0


def test_process_asked_to_stop_as_it_starts_to_wait_stops() -> None:
    command = [sys.executable, "-c", ASKED_AMID_A_WAIT]
    assert subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS).stdout == "stops\n"


@pytest.mark.parametrize(("before", "seconds", "printed"), [("", WAIT_SECONDS, "stops"), (NOHUP, 0.1, "goes on")])
def test_process_with_a_closed_terminal_stops_unless_hangup_is_ignored(
    before: str, seconds: float, printed: str
) -> None:
    command = [sys.executable, "-c", TOLD_OF_ITS_TERMINAL.format(before=before, seconds=seconds)]
    assert subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS).stdout == f"{printed}\n"


def test_hung_process_that_is_aborted_logs_its_stacks() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", WAITS], stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "there\n"
        process.send_signal(signal.SIGABRT)
        assert " in hangs\n" in process.stderr.read()
    assert process.returncode == -signal.SIGABRT
