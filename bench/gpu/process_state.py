"""Check what a guest engine shares with the serving engine of its process: events, memory, random states, errors."""

import ctypes
import errno
import mmap
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from timeit import timeit
from typing import Any

import numpy as np
import torch

from bench.gpu.card import Card, card_of
from bench.gpu.report import Report

MADV_DONTNEED = 4
FILLING = 7


class PlaceholderEvent:
    """The stand-in of vLLM's CPU worker for `torch.cuda.Event`: every wait returns at once."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def stale_reads(report: Report) -> None:
    """A: decides how harmful an import of vLLM's CPU worker is in the engine core of a GPU server.

    A step's tokens are copied to the host, and the host waits for an event after the copy. Rows: the share of reads
    with wrong values, with CUDA's event and with the placeholder.
    """
    card = card_of(report)
    rounds = card.size(200, 5)
    for kind, made in (("CUDA", card.event), ("placeholder", PlaceholderEvent)):
        stale = sum(_is_stale(card, made(), value) for value in range(1, rounds + 1))
        report.row(event=kind, reads=rounds, stale_share=stale / rounds)
        if kind == "CUDA":
            report.check("stale_reads", stale, "reads", 0, "an event of CUDA that the host waits for")


def _is_stale(card: Card, event: Any, value: int) -> bool:
    tokens = torch.zeros(64, dtype=torch.int64, device=card.device)
    card.wait()
    card.busy(1)  # a step's kernels
    tokens += value
    host = tokens.to("cpu", non_blocking=True)
    event.record()
    event.synchronize()
    read = host.tolist()
    card.wait()
    return bool(read != [value] * 64)


def madvise_device(report: Report) -> None:
    """B: decides whether `madvise` on addresses of the GPU fails, does nothing, or frees memory.

    An own KV cache of a guest could give its memory back so.
    """
    card = card_of(report)
    size = card.size(256 << 20, 1 << 20)
    if card.dry:
        tensor = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    else:
        tensor = torch.empty(size, dtype=torch.uint8, device=card.device)
    tensor.fill_(FILLING)
    card.wait()
    before = card.free_bytes()
    libc = ctypes.CDLL(None, use_errno=True)
    status = libc.madvise(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(size), MADV_DONTNEED)
    code = ctypes.get_errno() if status else 0
    report.row(
        status=status,
        errno=errno.errorcode.get(code, str(code)) if code else "none",
        freed_bytes=card.free_bytes() - before,
        contents_kept=bool((tensor == FILLING).all()),
    )


def sticky_error(report: Report) -> None:
    """K: decides whether a CUDA error of the guest can be contained in the process of serving.

    A process indexes out of bounds on one stream (a device assert). Rows: the results of this call and of its next
    calls on another stream, then its exit status.
    """
    card = card_of(report)
    command = [sys.executable, "-m", "bench.gpu.device_assert", card.device]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    for line in ran.stdout.splitlines():
        report.row(call=line)
    report.row(exit_status=ran.returncode)


def random_states(report: Report) -> None:
    """L: decides which random states the guest may exchange around each of its steps.

    Rows: microseconds to read and to set the state of all GPUs, of one GPU, of torch on the CPU, of numpy and of
    Python.
    """
    card = card_of(report)
    times = card.size(300, 3)
    states: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "torch, CPU": (torch.get_rng_state, torch.set_rng_state),
        "numpy": (np.random.get_state, np.random.set_state),
        "random": (random.getstate, random.setstate),
    }
    if not card.dry:
        states["torch, all GPUs"] = torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all
        states["torch, one GPU"] = torch.cuda.get_rng_state, torch.cuda.set_rng_state
    for name, (read, write) in states.items():
        report.row(
            state=name,
            read_us=1e6 / times * timeit(read, number=times),
            write_us=1e6 / times * timeit(partial(write, read()), number=times),
        )
