"""The guest's share on one of serving's ranks: in that worker's process, driven by calls from the loop (`tp_driver`).

Keeps true
- Between two calls the process is as its host left it, as in the loop's own (`process_globals`).
- Nothing that goes wrong here is raised into the worker: it is the answer to the call.
- The guest's ranks compute together over a group of their own, never over serving's. One that fails, in a step or in a
  long call, leaves that group, which ends the wait of the others there; none of them steps again.
- A rank reads its own share of a version, out of memory that all ranks map, and holds no more than that.
"""

import ctypes
import faulthandler
import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import Lock
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import parallel_state
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.worker_base import WorkerWrapperBase

from rose.schemas.errors import describe_error
from rose.workers.executor.ipc.messages import TensorLayout
from rose.workers.executor.ipc.weight_buffers import StagedTensors
from rose.workers.executor.vllm.backend import patch_runner, release_runner
from rose.workers.executor.vllm.start import hide_llvmlite
from rose.workers.executor.vllm.weights import PolicyWeights, keep_unpacked_weights
from rose.workers.lender.process_id import ProcessId, current_process_id
from rose.workers.lender.vllm.kv_pool import return_all_pages
from rose.workers.lender.vllm.process_globals import GlobalsSwap, globals_for_build
from rose.workers.lender.vllm.time_sliced import TimeSlicedCall
from rose.workers.lender.watchdog_page import STACK_SIGNAL

GROUP = "rose_guest"
"""The guest's group. vLLM has groups called `tp` compute over shared memory, where one waits for a rank that has failed
for as long as the process lives; any other name gets gloo, which tells the others when one leaves."""

_trim = ctypes.CDLL(None).malloc_trim
"""Has the C library give free memory back to the system, also between what is in use. Without it a small KV cache that
is freed leaves a gap, of which something else takes a little, and the next cache needs as much again."""

_workers: dict[int, "GuestWorker"] = {}
"""By the id of serving's worker. There is one in a process."""


def call_worker(host: WorkerWrapperBase, name: str, *arguments: Any) -> tuple[bool, Any]:
    """What serving's executor runs in each worker: whether it went well, and what came of it. Raises nothing."""
    try:
        rank = _workers.setdefault(id(host), GuestWorker(host))
        return True, getattr(rank, name)(*arguments)
    except Exception as error:  # noqa: BLE001  whatever a guest does, serving goes on
        return False, describe_error(error)


def _outcome_of(work: TimeSlicedCall[Any]) -> tuple[bool, str, Any]:
    """A long call that is done."""
    try:
        return True, "", work.result()
    except Exception as error:  # noqa: BLE001  as in `call_worker`
        return True, describe_error(error), None


class GuestWorker:
    """At most one model, beside that of `host`."""

    def __init__(self, host: WorkerWrapperBase) -> None:
        self._host = host
        self._globals: GlobalsSwap | None = None
        self._call: TimeSlicedCall[Any] | None = None
        """The newest long call, until it is done."""
        self._outcome: tuple[bool, str, Any] = True, "", None
        """Of the newest that is done: that it is, what went wrong, and what it returned."""
        self._guest: WorkerWrapperBase | None = None
        self._group: parallel_state.GroupCoordinator | None = None
        self._weights: PolicyWeights | None = None
        self._version: dict[str, torch.Tensor] = {}
        """That is being prepared, or is prepared: views over the buffer."""
        self._pieces: Iterator[None] = iter(())
        """Of preparing it."""

    def process_id(self, watched: bool) -> ProcessId:
        """Which it is. `watched`: by a watchdog, that may ask for the stacks of its threads.

        What is there by now is no garbage, and is not looked through again: as vLLM has it in the engine core and in
        the workers of GPUs. Each guest that is built or let go of would have all of it looked through, in one piece.
        """
        if watched:
            faulthandler.register(STACK_SIGNAL, all_threads=True)
        gc.collect()
        gc.freeze()
        return current_process_id()

    def begin(self, name: str, *arguments: Any) -> None:
        """Begin a long call: `join`, then `load`, `run`, `patch_model`, `allocate_spare`, or `release` at any time."""
        if name == "join" or self._globals is None:
            self._globals = globals_for_build()
        if name == "load":
            self._globals.set(parallel_state, "_TP", self._group)
        self._call = TimeSlicedCall(partial(getattr(self, name), *arguments), "rose-guest-build")

    def resume(self, seconds: float) -> tuple[bool, str, Any]:
        """Go on with it for so long; whether it is done, what went wrong, and what it returned."""
        assert self._globals is not None
        if self._call is None:  # another rank is not done yet
            return self._outcome
        with self._globals.as_guest_build():
            if not self._call.resume(seconds):
                return False, "", None
        self._outcome, self._call = _outcome_of(self._call), None
        if self._outcome[1]:  # here, where the error's frames hold the group no more
            self._destroy_group()
        return self._outcome

    def join(self) -> None:
        """Make the guest's group, with the other ranks."""
        world = parallel_state.get_world_group()
        self._group = parallel_state.GroupCoordinator(
            [list(world.ranks)],
            world.local_rank,
            torch.distributed.get_backend(world.device_group),
            use_device_communicator=True,
            group_name=GROUP,
        )

    def load(self, config: VllmConfig) -> None:
        """Build this rank's share of the model."""
        host = self._host.worker
        self._guest = WorkerWrapperBase(rpc_rank=self._host.rpc_rank, global_rank=self._host.global_rank)
        settings = {
            "vllm_config": config,
            "local_rank": host.local_rank,
            "rank": host.rank,
            "distributed_init_method": host.distributed_init_method,
            "is_driver_worker": host.is_driver_worker,
            "shared_worker_lock": Lock(),
        }
        with keep_unpacked_weights(), hide_llvmlite():
            self._guest.init_worker([settings] * (self._host.rpc_rank + 1))
            self._guest.init_device()
            self._guest.load_model()
            current_platform.update_block_size_for_backend(config)

    def run(self, method: str, arguments: tuple[Any, ...], settings: Mapping[str, Any]) -> Any:
        """A method of vLLM's worker, while an engine core is made."""
        with keep_unpacked_weights(), hide_llvmlite():
            return run_method(self._guest, method, arguments, dict(settings))

    def patch_model(self, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Once the core is made; the parameters that are held here."""
        assert self._guest is not None
        patch_runner(self._guest.worker.model_runner)
        self._weights = PolicyWeights(self._guest.worker, folder, shapes)
        return sum(parameter.numel() for parameter in self._guest.worker.get_model().parameters())

    def allocate_spare(self) -> None:
        assert self._weights is not None
        self._weights.allocate_spare()

    def step(self, scheduled: SchedulerOutput, grammar: GrammarOutput | None) -> Any:
        """Compute and sample; what came of it, of the first rank alone."""
        assert self._guest is not None and self._globals is not None
        failure, output = "", None
        with self._globals.as_guest():
            try:
                output = self._guest.execute_model(scheduled)
                if output is None:
                    output = self._guest.sample_tokens(grammar)
            except Exception as error:  # noqa: BLE001  the others may wait for this rank
                failure = describe_error(error)
        if failure:  # here, where the error's frames hold the group no more
            self._destroy_group()
            raise RuntimeError(failure)
        return output if self._host.global_rank == 0 else None

    def stage(self, file: str, layout: Sequence[TensorLayout], names: Sequence[str]) -> None:
        """Begin with a version that lies in the file `buffer`."""
        assert self._weights is not None
        descriptor = os.open(file, os.O_RDWR)
        try:
            staged = dict(StagedTensors(descriptor, layout))
        finally:
            os.close(descriptor)
        self._version = {name: staged[name] for name in names}
        self._pieces = self._weights.stage(self._version)

    def continue_staging(self) -> bool:
        """One piece of it; whether it is prepared. Raises SwapRefused."""
        assert self._globals is not None
        with self._globals.as_guest():
            return next(self._pieces, self) is self

    def activate(self) -> None:
        """Serve it from the next step on."""
        assert self._weights is not None
        version, self._version = self._version, {}
        self._weights.activate(version)

    def release(self) -> None:
        """Let go of all of it."""
        self._version, self._pieces = {}, iter(())
        worker: Any = getattr(self._guest, "worker", None)  # as far as `load` came
        if getattr(worker, "model_runner", None) is not None:
            if current_platform.is_cpu():
                return_all_pages(worker.model_runner.kv_caches)
            release_runner(worker.model_runner)
        worker = self._guest = self._weights = None
        self._destroy_group()
        gc.collect()
        _trim(0)

    def _destroy_group(self) -> None:
        """The guest's group, in which nobody waits for this rank any more."""
        group, self._group = self._group, None
        if group is None:
            return
        communicator = group.device_communicator
        group.destroy()
        if communicator is not None:
            communicator.device_group = communicator.cpu_group = None
