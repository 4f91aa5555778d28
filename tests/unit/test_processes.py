"""What every role has as a process."""

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


def test_a_process_that_is_asked_to_stop_just_as_it_waits_for_that_stops() -> None:
    command = [sys.executable, "-c", ASKED_AMID_A_WAIT]
    assert subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS).stdout == "stops\n"


@pytest.mark.parametrize(("before", "seconds", "told"), [("", WAIT_SECONDS, "stops"), (NOHUP, 0.1, "goes on")])
def test_a_process_whose_terminal_is_closed_stops_unless_it_was_told_not_to(
    before: str, seconds: float, told: str
) -> None:
    command = [sys.executable, "-c", TOLD_OF_ITS_TERMINAL.format(before=before, seconds=seconds)]
    assert subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS).stdout == f"{told}\n"


def test_a_process_that_hangs_and_is_aborted_leaves_its_stacks_in_its_log() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", WAITS], stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "there\n"
        process.send_signal(signal.SIGABRT)
        assert " in hangs\n" in process.stderr.read()
    assert process.returncode == -signal.SIGABRT
