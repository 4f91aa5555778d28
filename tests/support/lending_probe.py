"""A scheduler of a serving engine that notes the state of the process at each step."""

import gc
import hashlib
import json
import logging
import os
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from rose.workers.lender.vllm.host_process import SWAPPED_NAMES
from rose.workers.lender.vllm.interleaving import StepInterleaver
from tests.support.lender_server_fixtures import NOTES


class LendingProbe(Scheduler):  # type: ignore[misc]
    """The scheduler. A server selects it by `--scheduler-cls`. A note says whether a guest is being built, whether a
    guest step is paused and whether a batch with running requests is in flight, and has a digest of the process state.
    It also counts the blocks of serving that are free and that are held, and the preemptions of requests.

    A state that is seen for the first time is part of the note.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._notes = Path(os.environ[NOTES]).open("w", buffering=1)  # noqa: SIM115
        self._known: set[str] = set()
        self._log_levels = {name: logging.getLogger(name).level for name in logging.root.manager.loggerDict}
        self.note("start")

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self.note("step")
        return super().schedule(throttle_prefills)

    def note(self, when: str) -> None:
        state = process_state(self._log_levels)
        digest = hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()[:16]
        building = any(thread.name == "rose-guest-build" for thread in threading.enumerate())
        within = any(frame.name == StepInterleaver._yield_to_serving.__name__ for frame in traceback.extract_stack())
        in_flight = any(request.num_output_placeholders for request in self.running)
        note: dict[str, Any] = {"when": when, "building": building, "within": within, "seen": digest}
        note["in flight"] = in_flight
        pool = self.kv_cache_manager.block_pool
        note["free"] = pool.get_num_free_blocks()
        note["held blocks"] = pool.num_gpu_blocks - 1 - note["free"]
        note["preemptions"] = sum(request.num_preemptions for request in self.requests.values())
        if digest not in self._known:
            self._known.add(digest)
            note["state"] = state
        self._notes.write(json.dumps(note) + "\n")


class AsyncLendingProbe(LendingProbe, AsyncScheduler):  # type: ignore[misc]
    """The same scheduler for a server with async scheduling."""


def process_state(log_levels: Mapping[str, int]) -> dict[str, Any]:
    """Return the state of the process, with the levels of these loggers."""
    return {
        "environment": dict(os.environ),
        "default dtype": str(torch.get_default_dtype()),
        "threads": torch.get_num_threads(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "names": [id(getattr(module, name)) for module, name in SWAPPED_NAMES],
        "generators": [
            hashlib.sha256(state).hexdigest()[:16]
            for state in (
                repr(random.getstate()).encode(),
                np.random.get_state()[1].tobytes(),  # type: ignore[index]
                torch.get_rng_state().numpy().tobytes(),
            )
        ],
        "log levels": {name: logging.getLogger(name).level for name in log_levels},
        "root log level": logging.getLogger().level,
        "root hash": getattr(kv_cache_utils, "NONE_HASH", b"").hex(),
        "warnings": len(warnings.filters),
        "signals": [repr(signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)],
        "garbage": [*gc.get_threshold(), gc.isenabled()],
        "switching": sys.getswitchinterval(),
        "folder": str(Path.cwd()),
        "profile": sys.getprofile() is None,
    }
