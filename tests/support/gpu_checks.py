"""Checks for the runner of GPU checks: one that works, one that crashes, one that raises, one that hangs."""

import os
import signal
import threading

from bench.gpu.report import Report, Unavailable


def works(report: Report) -> None:
    report.write(device="none")
    report.row(measured=1.5)
    report.check("longest", 3.0, "ms", 2.0, "nothing")


def crashes(report: Report) -> None:
    report.row(measured=1)
    os.kill(os.getpid(), signal.SIGSEGV)


def raises(report: Report) -> None:
    raise RuntimeError("no kernel image is available")


def hangs(report: Report) -> None:
    threading.Event().wait()


def lacks(report: Report) -> None:
    raise Unavailable("no CUDA GPU is here")
