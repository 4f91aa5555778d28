"""The processes that benchmarks start and measure."""

import json
import subprocess
import sys
from dataclasses import asdict

import psutil

from rose.topics.settings import BusSettings


def start_program(program: str, settings: BusSettings, *, number: int = 0) -> "subprocess.Popen[bytes]":
    """Start a program of `bench.bus_programs` in its own process.

    `number`: number of the router, if there are several.
    """
    command = [sys.executable, "-m", "bench.bus_programs", program, json.dumps(asdict(settings)), f"--number={number}"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def processor_seconds(pid: int) -> float:
    """Return the processor seconds of all threads of a process, in user and kernel mode."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
