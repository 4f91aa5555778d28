"""Probe in each worker of a tensor-parallel server: notes on serving steps, and faults of the guest."""

import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.v1.worker.cpu_worker import CPUWorker

from rose.workers.executor.vllm import spare_weights
from rose.workers.lender.vllm.tp_worker import GROUP
from tests.support.lender_server_fixtures import FAULT, NOTES
from tests.support.lending_probe import process_state

FAULTY = 1
"""The rank with the faults."""


class RankProbe:
    """The worker extension for `--worker-extension-cls`. vLLM imports this module in each worker before it builds the
    worker."""


class StepNotes:
    """One notes file per rank. A note is the process state before a serving step, written when the state changes."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self._file = Path(f"{os.environ[NOTES]}.{worker.rank}").open("w", buffering=1)  # noqa: SIM115
        self._levels = {name: logging.getLogger(name).level for name in logging.root.manager.loggerDict}
        self._last: dict[str, Any] = {}

    def step(self) -> None:
        state = process_state(self._levels)
        changed = {name: value for name, value in state.items() if self._last.get(name) != value}
        self._last = state
        building = any(thread.name == "rose-guest-build" for thread in threading.enumerate())
        self._file.write(json.dumps({"building": building, "changed": changed}) + "\n")


_notes: list[StepNotes] = []
_execute, _all_reduce, _writing = CPUWorker.execute_model, GroupCoordinator.all_reduce, spare_weights.write_version


def _execute_noted(worker: Any, scheduled: Any) -> Any:
    """Note the state before each step of the first worker of the process, which is the serving worker."""
    if not _notes:
        _notes.append(StepNotes(worker))
    if _notes[0].worker is worker:
        _notes[0].step()
    return _execute(worker, scheduled)


def _fault() -> str:
    file = Path(os.environ[FAULT])
    return file.read_text() if file.exists() else ""


def _all_reduce_or_fault(group: GroupCoordinator, tensor: Tensor) -> Tensor:
    if group.unique_name.startswith(GROUP) and group.rank_in_group == FAULTY:
        if _fault() == "step":
            raise RuntimeError("a fault amid a step")
        while _fault() == "hang":
            time.sleep(0.1)  # this is the hang
    reduced: Tensor = _all_reduce(group, tensor)
    return reduced


def _writing_or_fault(model: Any, version: Mapping[str, Tensor], **how: Any) -> Iterator[None]:
    for number, piece in enumerate(_writing(model, version, **how)):
        if number == 3 and _fault() == "prepare" and _notes[0].worker.rank == FAULTY:
            raise RuntimeError("a fault amid preparing")
        yield piece


CPUWorker.execute_model = _execute_noted
GroupCoordinator.all_reduce = _all_reduce_or_fault
spare_weights.write_version = _writing_or_fault
